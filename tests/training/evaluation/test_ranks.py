"""Accuracies by depth and rank, and the trees of fixed shape that are built from them."""

import pytest
import torch

from tests.backbones import backbone, train_heads
from tokenahead import MTPHeads
from tokenahead.generation.trees.building import choices_from_accuracies
from tokenahead.training.evaluation.drafts import rank_accuracies


def written(model, rows=12, length=30):
    """A batch of text that the model writes."""
    starts = torch.randint(2, 48, (rows, 3), generator=torch.Generator().manual_seed(1))
    ids = model.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=length, do_sample=False)
    return {"input_ids": ids, "labels": ids}


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", [dict(), dict(head_type="hydra", unembedding=None)], ids=["ff", "hydra"])
def test_accuracies_are_those_of_proposals_one_by_one(kind, temperature):
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


@pytest.mark.core
def test_a_tree_of_measured_accuracies_keeps_more_than_one_of_equal_size_without():
    model = backbone()
    heads = train_heads(model, steps=12)
    accuracies = rank_accuracies(heads, [written(model)])
    assert accuracies.shape == (3, 10) and (accuracies.sum(1) <= 1 + 1e-9).all()
    measured = choices_from_accuracies(accuracies, 6)
    assert len(measured) == 6
    trees, kept = {"measured": measured, "flat": [(rank,) for rank in range(6)]}, {}
    prompts = torch.randint(2, 48, (16, 4), generator=torch.Generator().manual_seed(5))
    for name, tree in trees.items():
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), assistant_model=heads, do_sample=False,
            max_new_tokens=24, draft_tree=tree, return_dict_in_generate=True,
        )  # fmt: skip
        kept[name] = sum(map(sum, out.speculation.rows_accepted)) / sum(map(len, out.speculation.rows_accepted))
    assert kept["measured"] > kept["flat"]


@pytest.mark.core
def test_text_without_targets_is_refused():
    heads = MTPHeads.from_backbone(backbone(), window=3)
    ids = torch.randint(2, 48, (1, 6))
    with pytest.raises(ValueError, match="no position"):
        rank_accuracies(heads, [{"input_ids": ids, "labels": torch.full_like(ids, -100)}])
