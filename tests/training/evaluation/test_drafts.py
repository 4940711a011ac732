"""Distributions of drafts along text, for every drafter that has distributions, and what is measured of them."""

import pytest
import torch
from transformers import DynamicCache

from tests.backbones import backbone, train_heads
from tests.every_model import llama
from tests.families import family_model
from tests.models import tiny_model
from tokenahead import EagleHead, MTPHeads
from tokenahead.training.evaluation.drafts import DraftMeasures, drafted_probs, rank_accuracies


def models():
    yield "evabyte_ff", tiny_model(num_pred_heads=4)
    yield "evabyte_btree", tiny_model(mtp_head={"head_type": "btree", "window": 4, "rank": 2})
    for kind in ("ff", "cp", "medusa", "hydra", "layer"):
        yield kind, MTPHeads.from_backbone(llama(), window=4, head_type=kind)
    for version in (1, 3):
        yield f"eagle{version}", EagleHead.from_backbone(llama(num_hidden_layers=4), version=version)
    yield "modules", family_model("llama", num_nextn_predict_layers=2)


def batch_for(model, rows: int = 3, length: int = 12):
    size = model.config.get_text_config().vocab_size
    ids = torch.randint(3, size, (rows, length), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(length) < torch.tensor([[length], [length - 3], [5]])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


@pytest.mark.by_day("evabyte_btree", "ff", "hydra", "eagle3", "modules")
@pytest.mark.parametrize(("name", "model"), [pytest.param(*pair, id=pair[0]) for pair in models()])
def test_distributions_are_normalised_and_the_losses_are_those_of_the_model(name, model):
    model = model.eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    batch = batch_for(model)
    for probs in drafted_probs(model, batch):
        mass = probs.draft.exp().sum(-1)
        torch.testing.assert_close(mass, torch.ones_like(mass), rtol=0, atol=1e-5)
    measures = DraftMeasures().add(model, batch)
    means, calls = measures.means(), measures.calls
    assert all(0 <= share <= 1 for rule in ("block", "token") for share in calls[rule].by_position)
    if not name.startswith("eagle"):
        expected = model(**batch).head_losses[1:].tolist()
        assert means["loss"][: len(expected)] == pytest.approx(expected, rel=1e-4)


def test_the_verifier_reads_the_backbone_where_the_draft_stands():
    """A head that is the backbone's own, moved on: each draft's distribution is compared with the distribution of that
    very position."""
    heads = MTPHeads.from_backbone(llama(), window=3).eval()
    batch = batch_for(heads)
    logits = heads.backbone(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    (probs,) = drafted_probs(heads, batch)
    rows, columns = (batch["labels"][:, 2:] != -100).nonzero(as_tuple=True)
    torch.testing.assert_close(probs.target[:, 0], logits[rows, columns + 1], rtol=1e-4, atol=1e-4)
    assert torch.equal(probs.tokens[:, 0], batch["input_ids"][rows, columns + 2])


@pytest.mark.core_cases("1")
@pytest.mark.parametrize("version", [1, 3])
def test_an_eagle_head_drafts_what_its_distributions_say(version):
    """The distribution of step i at a row is that of drafting by hand behind the same prefix with the true tokens."""
    head = EagleHead.from_backbone(llama(num_hidden_layers=4), version=version).eval()
    batch = batch_for(head)
    batch = {name: value[:1] for name, value in batch.items()}
    probs = torch.cat([part.draft for part in drafted_probs(head, batch)])
    ids, column = batch["input_ids"], 4
    wanted = True
    states = head.backbone(ids[:, : column + 1], output_hidden_states=wanted).hidden_states
    cache = DynamicCache()
    features, logits = head.step(head.fuse(states), ids[:, 1 : column + 2], past_key_values=cache)
    for step in range(3):
        found = probs[column, step]
        torch.testing.assert_close(found, logits[0, -1].float().log_softmax(-1), rtol=1e-4, atol=1e-4)
        position = torch.tensor([[column + 1 + step]])
        features, logits = head.step(features[:, -1:], ids[:, column + 2 + step][:, None], position, None, cache)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", [dict(), dict(head_type="hydra", unembedding=None)], ids=["ff", "hydra"])
def test_accuracies_by_rank_are_those_of_proposals_one_by_one(kind, temperature):
    model = backbone()
    with torch.enable_grad():
        heads = train_heads(model, steps=5, **kind)
    ids = torch.randint(2, 48, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[1, 6:] = -100
    found = rank_accuracies(heads, [{"input_ids": ids, "labels": labels}], 4, temperature)
    distribution, logits = heads.distribution(ids), model(ids).logits
    hits, counts = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3)
    for row, end in ((0, 9), (1, 6)):
        for column in range(end):
            for depth in range(3):
                if column + 2 + depth >= end:
                    continue
                window = torch.zeros(2, 9, 4, dtype=torch.long)
                window[row, column, : depth + 1] = ids[row, column + 1 : column + 2 + depth]
                best = distribution.conditional_log_probs(window)[row, column, depth + 1].topk(4).indices
                target = logits[row, column + 1 + depth]
                share = (target / temperature).softmax(-1)[best] if temperature else target.argmax() == best
                hits[depth] += share.double()
                counts[depth] += 1
    torch.testing.assert_close(found, hits / counts[:, None].double(), atol=1e-6, rtol=0)
