"""What a drafter is worth along known text, by place in the draft: loss, accuracy, acceptance; nothing is drawn.

Expected acceptance is that of `expected.accepted_up_to`, here for every drafter that has distributions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .distributions import Batch, DraftedProbs, drafted_probs
from .expected import accepted_up_to

TOP_K = (1, 5)
"""How many of the drafter's likeliest tokens are looked at for accuracies."""


@dataclass
class DraftMeasures:
    """Sums over positions, by place in the draft: the place j is the j-th drafted token, two and more tokens ahead.

    Attributes:
        sums: By name, [m] float64.
        counts: [m] float64, positions whose first j drafted tokens are all targets.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: torch.Tensor | None = None

    def add(self, probs: DraftedProbs) -> None:
        """Adds positions."""
        target, scored = probs.target.log_softmax(-1), probs.scored
        chosen = probs.draft.gather(-1, probs.tokens[..., None])
        rank = (probs.draft > chosen).sum(-1)
        terms = {
            "loss": -chosen[..., 0],
            "accepted_block": accepted_up_to(probs.tokens, probs.draft, target, 1.0, "block"),
            "accepted_token": accepted_up_to(probs.tokens, probs.draft, target, 1.0, "token"),
            "accepted_greedy": accepted_up_to(probs.tokens, probs.draft, target, 0.0, "block"),
            "overlap": torch.minimum(probs.draft, target).exp().sum(-1),
            **{f"top_{k}": (rank < k).float() for k in TOP_K},
        }
        for name, values in terms.items():
            total = torch.where(scored, values.double(), 0.0).sum(0).cpu()
            self.sums[name] = self.sums.get(name, 0.0) + total
        counts = scored.sum(0).double().cpu()
        self.counts = counts if self.counts is None else self.counts + counts

    def reduced(self, accelerator: Any) -> DraftMeasures:
        """The same over all processes; every one of them calls this."""
        if accelerator.num_processes == 1:
            return self
        everyone: list[Any] = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(everyone, (self.sums, self.counts))
        total = DraftMeasures()
        for sums, counts in everyone:
            if counts is not None:
                total.counts = counts if total.counts is None else total.counts + counts
                total.sums = {name: total.sums.get(name, 0.0) + values for name, values in sums.items()}
        return total

    def means(self) -> dict[str, list[float]]:
        """Means by place, as far as there were positions; an infinite loss stays infinite."""
        if self.counts is None:
            return {}
        places = int((self.counts > 0).sum())
        return {name: (values[:places] / self.counts[:places]).tolist() for name, values in self.sums.items()}

    def expected_accepted(self, rule: str = "block") -> float | None:
        """Expected drafts that one verification keeps, T = 1; None where nothing was measured."""
        means = self.means()
        return sum(means[f"accepted_{rule}"]) if means else None


@torch.no_grad()
def measure_drafts(model: Any, batch: Batch, measures: DraftMeasures | None = None) -> DraftMeasures:
    """Adds a batch to the measures (new ones if there are none), in evaluation mode.

    Args:
        model: See `drafted_probs`.
        batch: See `drafted_probs`.
        measures: Where to add.
    """
    measures, was_training = measures or DraftMeasures(), model.training
    model.eval()
    try:
        for probs in drafted_probs(model, batch):
            measures.add(probs)
    finally:
        model.train(was_training)
    return measures
