"""Accuracies by depth and rank."""

import pytest
import torch

from tests.backbones import backbone, train_heads
from tokenahead.training.evaluation.drafts import rank_accuracies


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
