"""How many drafted tokens a verifier would keep, along known text: expected values, not samples.

Let r_j be the product of q / p over the first j drafted tokens of the text, and P_j the weight of block verification
(Sun et al. 2024; P_j = min(1, P_{j-1} p / q)). A draft that begins with these tokens is r_j times as probable as a text
that does, so that

    A_{j+1} = sum over x of min(r_j P_j p(x), r_j q(x))

has the mean, over texts of the verifier's law, of the probability that block verification keeps at least j + 1 drafted
tokens. It lies between 0 and 1, which a plain importance weight r_j would not. On text that somebody else wrote it is
an estimate of the same thing along that text. Token verification has min(1, q / p) in place of r_j P_j.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .teacher_forced import Batch, DraftedLaws, drafted_laws

TOP_K = (1, 5)
"""How many of the drafter's likeliest tokens are looked at for accuracies."""
_MOST = 80.0  # largest logarithm of r_j that is told from larger ones; its exponential is finite in float64


def block_survival(draft: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A_1..A_m: expected shares of drafts of which block verification keeps at least so many tokens.

    Args:
        draft: [N, m, v] log-probabilities of the drafter along the tokens.
        target: [N, m, v] log-probabilities of the verifier along the tokens.
        tokens: [N, m] int64, the text.

    Returns:
        [N, m] float64 in [0, 1].
    """
    draft, target = draft.double(), target.double()
    ratio = kept = torch.zeros(
        len(tokens), dtype=torch.float64, device=tokens.device
    )  # logarithms of r_j and of r_j P_j
    shares = []
    for q, p, token in zip(draft.unbind(1), target.unbind(1), tokens.unbind(1)):
        shares.append(torch.minimum(kept[:, None] + p, ratio[:, None] + q).exp().sum(-1))
        step = (q - p).gather(-1, token[:, None])[:, 0].nan_to_num(nan=-torch.inf)
        ratio = (ratio + step).clamp(max=_MOST)
        kept = torch.minimum(kept, ratio)
    return torch.stack(shares, dim=1)


def token_survival(draft: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The same for token verification (Leviathan et al. 2023), [N, m] float64."""
    draft, target = draft.double(), target.double()
    overlap = torch.minimum(draft, target).exp().sum(-1)
    chosen = (draft - target).gather(-1, tokens[..., None])[..., 0].nan_to_num(nan=-torch.inf).clamp(max=0)
    before = torch.nn.functional.pad(chosen.cumsum(1)[:, :-1], (1, 0))
    return overlap * before.exp()


@dataclass
class DraftMeasures:
    """Sums over positions, by place in the draft: the place j is the j-th drafted token, two and more tokens ahead.

    Attributes:
        sums: By name, [m] float64.
        counts: [m] float64, positions whose first j drafted tokens are all targets.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: torch.Tensor | None = None

    def add(self, laws: DraftedLaws) -> None:
        """Adds positions."""
        target, scored = laws.target.log_softmax(-1), laws.scored
        chosen = laws.draft.gather(-1, laws.tokens[..., None])
        rank = (laws.draft > chosen).sum(-1)
        terms = {
            "loss": -chosen[..., 0],
            "accepted_block": block_survival(laws.draft, target, laws.tokens),
            "accepted_token": token_survival(laws.draft, target, laws.tokens),
            "overlap": torch.minimum(laws.draft, target).exp().sum(-1),
            "greedy": (laws.draft.argmax(-1) == target.argmax(-1)).float(),
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
        model: See `drafted_laws`.
        batch: See `drafted_laws`.
        measures: Where to add.
    """
    measures, was_training = measures or DraftMeasures(), model.training
    model.eval()
    try:
        for laws in drafted_laws(model, batch):
            measures.add(laws)
    finally:
        model.train(was_training)
    return measures
