"""Features on disk: the losses of training without them, rows that share a call, and what is refused."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig

from tests.training.conftest import ragged_rows, trainer_for
from tests.training.test_empty_batches import DRAFTERS as EMPTY
from tests.training.test_empty_batches import block
from tests.training.test_evaluation_loss import llama
from tests.training.test_joined_rows import DRAFTERS as JOINED
from tests.training.test_joined_rows import HALF, eagle
from tokenahead import MTPHeads
from tokenahead.modeling.block import losses as block_losses
from tokenahead.modeling.common import teacher as heads_teacher
from tokenahead.modeling.eagle import losses as eagle_losses
from tokenahead.training import cache_features
from tokenahead.training.features import FeatureDataset

DRAFTERS = {
    **{name: JOINED[name] for name in ("circuit", "layers", "draft layers", "taught", "lk over half")},
    **{name: JOINED[name] for name in ("eagle 1", "eagle 3", "eagle over half")},
    **{name: EMPTY[name] for name in ("block", "block speculators")},
    "block over half": block(law_options={"rank": 4}, draft_ids=HALF),
    "p-eagle": eagle(mask_token_id=3, loss_options={"steps": 3, "kept": 1.0}),
}


def rows():
    return ragged_rows(12, vocab_size=64)


def losses(trainer):
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.by_day("lk over half", "block")
@pytest.mark.parametrize("name", DRAFTERS)
def test_training_on_features_has_the_losses_of_training_on_the_backbone(name, tmp_path, monkeypatch):
    data, found = rows(), []
    for cached in (False, True):
        torch.manual_seed(0)
        drafter = DRAFTERS[name]()
        if cached:
            data = cache_features(drafter, data, tmp_path / "f", tokens_per_shard=50)
            assert len(data.parts) > 2
        trainer = trainer_for(drafter, tmp_path, data, max_steps=3, learning_rate=0.05, optim="sgd")
        if cached:
            trainer.data_collator = data.collate
            drafter.backbone.forward = None  # is not called
            for module in (heads_teacher, eagle_losses, block_losses):  # nor the unembedding of all tokens
                monkeypatch.setattr(module, "logit_summaries", None)
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], rel=2e-5)
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.parametrize("kind", ["llama", "dynamic rope", "mamba"])
def test_rows_of_similar_lengths_go_through_the_backbone_together(kind, tmp_path, monkeypatch):
    torch.manual_seed(0)
    if kind == "mamba":
        config = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2)
        base = AutoModelForCausalLM.from_config(config).eval()
    else:
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        base = llama(max_position_embeddings=30, **({"rope_parameters": rope} if kind == "dynamic rope" else {}))
    heads = MTPHeads.from_backbone(base, window=3, draft_ids=torch.arange(0, 320, 2))
    lengths, fresh = torch.randint(20, 60, (60,)).tolist(), copy.deepcopy(base)
    data, forward, computed = [{"input_ids": torch.randint(5, 320, (n,))} for n in lengths], base.forward, []

    def counted(input_ids, **kwargs):
        computed.append(input_ids.shape)
        return forward(input_ids, **kwargs)

    monkeypatch.setattr(base, "forward", counted)
    found = cache_features(heads, data, tmp_path, tokens_per_batch=512)
    together = sum(rows * length for rows, length in computed)
    assert all(rows * length <= 512 for rows, length in computed)
    if kind == "dynamic rope":  # of the longest row in a batch
        assert together == sum(lengths)
    else:
        assert together <= 1.1 * sum(lengths) and len(computed) < 16
    alone = fresh.eval()
    for number in sorted(range(60), key=lengths.__getitem__):  # these angles follow the length upwards alone
        row = data[number]
        states = alone(row["input_ids"][None], output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(found[number]["cached_states"][:, -1], states[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(found[number]["input_ids"], row["input_ids"])


@pytest.mark.core
def test_refusals(tmp_path):
    heads, data = DRAFTERS["circuit"](), rows()
    cache_features(heads, data, tmp_path / "f")
    with pytest.raises(ValueError, match="data="):
        cache_features(heads, data[:5], tmp_path / "f")
    with pytest.raises(ValueError, match="layers="):
        cache_features(DRAFTERS["layers"](), data, tmp_path / "f")
    with torch.no_grad():
        heads.backbone.lm_head.weight.add_(1)
    with pytest.raises(ValueError, match="weights="):
        cache_features(heads, data, tmp_path / "f")
    with pytest.raises(ValueError, match="dtype='int8'"):
        cache_features(heads, data, tmp_path / "g", dtype="int8")
    with pytest.raises(FileNotFoundError):
        FeatureDataset(tmp_path / "g")
    with pytest.raises(ValueError, match="needs.*2"):
        DRAFTERS["layers"]()(
            data[0]["input_ids"][None], labels=data[0]["labels"][None], cached_states=torch.zeros(1, 20, 1, 32)
        )
