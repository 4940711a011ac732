"""docs/adding_a_method.md: a method with its own network, in one folder."""

from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from tests.backbones import backbone
from tests.example_method.model import GRUDrafter
from tokenahead.extending import TrainableDrafter
from tokenahead.generation.drafter import DRAFTERS
from tokenahead.modeling.common.loading import StrictLoadingMixin, drafter_class, read_drafter
from tokenahead.testing import continuation_distribution, continuation_p_value
from tokenahead.training import MTPTrainer

BATCH = torch.tensor([[0, 0, 7, 8, 5, 6], [9, 10, 11, 9, 10, 11], [3, 3, 4, 3, 3, 4]])


@pytest.mark.parametrize("sampled", [False, True])
def test_train_save_load_attach_and_generate(sampled, tmp_path):
    model = backbone(vocabulary=5 if sampled else 48, seed=2)
    torch.manual_seed(0)
    prompts = torch.randint(1, model.config.vocab_size, (64, 2))
    sampling = dict(do_sample=True, top_k=0) if sampled else dict(do_sample=False)
    texts = model.generate(prompts, max_new_tokens=14, pad_token_id=0, **sampling)
    data = [{"input_ids": row, "labels": row} for row in texts]
    drafter = GRUDrafter.from_backbone(model)
    assert isinstance(drafter, TrainableDrafter)
    common = dict(max_steps=60, per_device_train_batch_size=16, learning_rate=1e-2, use_cpu=True, report_to=[])
    arguments = TrainingArguments(tmp_path / "run", save_strategy="no", disable_tqdm=True, **common)
    trainer = MTPTrainer(drafter, arguments, train_dataset=data, eval_dataset=data[:16])
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_loss"] < before["eval_loss"] and after["eval_loss_head_1"] < before["eval_loss_head_1"]
    trainer.save_model(tmp_path / "drafter")
    loaded = GRUDrafter.from_pretrained(tmp_path / "drafter").attach(model)
    if sampled:
        prompt = torch.tensor([[1, 3, 2, 4, 3]])
        options = dict(do_sample=True, temperature=0.8, top_k=4)
        out = model.generate(prompt.expand(800, -1), assistant_model=loaded, max_new_tokens=4, **options)
        exact = continuation_distribution(model, prompt, 2, temperature=0.8, top_k=4)
        assert continuation_p_value(out[:, 5:7], exact) > 0.001
        return
    options = dict(attention_mask=(BATCH > 0).long(), max_new_tokens=24, do_sample=False)
    out = model.generate(BATCH, assistant_model=loaded, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, model.generate(BATCH, **options))
    assert sum(map(sum, out.speculation.rows_accepted)) > 0


def test_a_backbone_of_another_size_is_refused():
    with pytest.raises(ValueError, match="vocab_size=5"):
        GRUDrafter.from_backbone(backbone()).detach().attach(backbone(vocabulary=5))


def test_it_follows_the_dtype_of_its_backbone():
    model = backbone().bfloat16()
    drafter = GRUDrafter.from_backbone(model)
    out = model.generate(BATCH[1:2], assistant_model=drafter, max_new_tokens=6)
    assert out.shape[1] == BATCH.shape[1] + 6


def test_the_registry_knows_directories_of_strict_classes_alone(tmp_path, monkeypatch):
    class Strict(StrictLoadingMixin, GRUDrafter): ...

    model = backbone()
    Strict.from_backbone(model).save_pretrained(tmp_path)
    monkeypatch.setitem(DRAFTERS, "gru", GRUDrafter)
    assert drafter_class(tmp_path) is None
    monkeypatch.setitem(DRAFTERS, "gru", Strict)
    loaded = read_drafter(tmp_path).attach(model)
    assert type(loaded) is Strict
    plain = model.generate(BATCH[1:2], max_new_tokens=12)
    assert torch.equal(model.generate(BATCH[1:2], assistant_model=loaded, max_new_tokens=12), plain)


def test_the_page_shows_the_session():
    session = Path(__file__).with_name("session.py").read_text(encoding="utf-8").partition("class GRUSession")[2]
    page = Path(__file__).parents[2] / "docs" / "adding_a_method.md"
    assert "class GRUSession" + session.rstrip() + "\n```" in page.read_text(encoding="utf-8")
