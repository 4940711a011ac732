"""How often the target's token is the drafter's r-th proposal at depth j: what a tree of fixed shape is built from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .distributions import Batch, drafted_probs


@torch.no_grad()
def rank_accuracies(model: Any, batches: Iterable[Batch], ranks: int = 10, temperature: float = 0.0) -> torch.Tensor:
    """Accuracies by depth and rank, given the true tokens before (Medusa, arXiv 2401.10774, section 2.3.3).

    `choices_from_accuracies` makes a tree of them, which `generate` takes as `draft_tree`:

        >>> choices = choices_from_accuracies(rank_accuracies(heads, batches), num_nodes=24)
        >>> out = backbone.generate(**inputs, assistant_model=heads, draft_tree=choices)

    Args:
        model: A drafter, see `drafted_probs`; text that its backbone wrote measures what it will draft.
        batches: `input_ids` and `labels` [B, L], and where there are `attention_mask` and `position_ids`.
        ranks: R, proposals to look at; no more than the vocabulary has.
        temperature: Of the target. 0: its likeliest token counts. Else its distribution does: the probability to draw
            the proposal, which is the chance to keep it in a tree of fixed shape.

    Returns:
        [m, R] float64, m depths; the first drafted token stands two tokens ahead.

    Raises:
        ValueError: No position of the batches is a target, or a negative temperature.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    was_training = model.training
    model.eval()
    hits, counts = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for probs in drafted_probs(model, batch):
            proposed = probs.draft.topk(min(ranks, probs.draft.shape[-1])).indices
            if temperature:
                found = (probs.target / temperature).softmax(-1).gather(-1, proposed).double()
            else:
                found = (probs.target.argmax(-1, keepdim=True) == proposed).double()
            hits = hits + (found * probs.scored[..., None]).sum(0).cpu()
            counts = counts + probs.scored.sum(0).double().cpu()
    model.train(was_training)
    if not hits.dim():
        raise ValueError("rank_accuracies: no position of the batches is a target; give labels that are not all -100")
    return hits / counts.clamp(min=1)[:, None]
