"""A Markov chain of order one, and how far a drafter gets that does not see the tokens between the context and its own.

The chain is its own exact teacher: distributions, sequential picks and the ceilings of drafters are computed, not
estimated.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from tokenahead.generation.tensors.sampling import pick


class MarkovChain(nn.Module):
    """Q[a, b] = `rows`, drawn from Dirichlet(alpha); a module, so that it can be the teacher of `PTPTrainer`.

    Args:
        states: V.
        alpha: Small values give peaked rows.
        seed: Of the rows.
    """

    rows: torch.Tensor

    def __init__(self, states: int, alpha: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weights = torch._standard_gamma(torch.full((states, states), alpha, dtype=torch.float64), generator=generator)
        self.register_buffer("rows", weights / weights.sum(-1, keepdim=True))

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> SimpleNamespace:
        """`logits` [B, T, V] of the next token after each."""
        return SimpleNamespace(logits=self.rows[input_ids].log())

    @property
    def stationary(self) -> torch.Tensor:
        """The distribution of a state far from the start, [V]."""
        return torch.linalg.matrix_power(self.rows, 4096)[0]

    def walk(self, first: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Sequential inverse-CDF sampling: states [B, n] from `uniforms` [B, n], after `first` [B]."""
        found = [first]
        for column in uniforms.T:
            found.append(pick(column, self.rows[found[-1]]))
        return torch.stack(found[1:], dim=1)

    def texts(self, count: int, length: int, seed: int) -> torch.Tensor:
        """Stationary sequences [count, length]."""
        generator = torch.Generator().manual_seed(seed)
        uniforms = torch.rand(count, length, generator=generator, dtype=torch.float64)
        first = pick(uniforms[:, 0], self.stationary.expand(count, -1))
        return torch.cat([first[:, None], self.walk(first, uniforms[:, 1:])], dim=1)


def ceilings(chain: MarkovChain, count: int) -> dict[str, float]:
    """How many of `count` tokens the best drafters get right, each drafted without seeing the ones drafted before it.

    Returns:
        Expected numbers from a stationary state on. `marginal`: picks from exact marginals with the target's uniforms;
        `own_u`: the best functions of each token's own uniform (found by coordinate ascent); `speculative`: samples
        from exact marginals, verified token by token.
    """
    totals = dict.fromkeys(("marginal", "own_u", "speculative"), 0.0)
    edges = torch.cat([chain.rows.cumsum(-1).clamp(max=1).flatten(), torch.tensor([0.0, 1.0])]).unique()
    widths, middles = edges.diff(), (edges[1:] + edges[:-1]) / 2
    picks = pick(middles.expand(len(chain.rows), -1).T, chain.rows.expand(len(middles), -1, -1))  # [segments, V]
    for state, weight in enumerate(chain.stationary.tolist()):
        probs = [torch.eye(len(chain.rows), dtype=torch.float64)[state]]
        for _ in range(count):
            probs.append(probs[-1] @ chain.rows)
        drafts = [pick(middles, distribution.expand(len(middles), -1)) for distribution in probs[1:]]
        start = probs[0]
        shared = [_agreement(draft, picks, widths) for draft in drafts]
        overlap = [torch.minimum(chain.rows, distribution) for distribution in probs[1:]]
        totals["marginal"] += weight * _chained(start, shared)
        totals["speculative"] += weight * _chained(start, overlap)
        totals["own_u"] += weight * _best_own(start, shared, picks, widths)
    return totals


def _agreement(draft: torch.Tensor, picks: torch.Tensor, widths: torch.Tensor) -> torch.Tensor:
    """[V, V]: mass of uniforms that take state i to j while the draft [segments] is j."""
    states = picks.shape[1]
    hit = picks == draft[:, None]
    rows = torch.zeros(states, states, dtype=torch.float64)
    index = torch.arange(states).expand(len(draft), -1)[hit], draft[:, None].expand(-1, states)[hit]
    return rows.index_put_(index, widths[:, None].expand(-1, states)[hit], accumulate=True)


def _chained(start: torch.Tensor, steps: list[torch.Tensor]) -> float:
    """Expected length of the run of agreements, from agreements [V, V] per step."""
    total, alive = 0.0, start
    for step in steps:
        alive = alive @ step
        total += float(alive.sum())
    return total


def _best_own(start: torch.Tensor, steps: list[torch.Tensor], picks: torch.Tensor, widths: torch.Tensor) -> float:
    """Choose every draft again, given the others, until nothing is gained."""
    steps, best, ones = list(steps), 0.0, torch.ones_like(start)
    while True:
        behind = [ones]
        for step in reversed(steps[1:]):
            behind.append(1 + step @ behind[-1])
        alive = start
        for index, value in enumerate(reversed(behind)):
            score = torch.zeros(len(widths), len(start), dtype=torch.float64)
            score.scatter_add_(1, picks, alive.expand(len(widths), -1))
            steps[index] = _agreement((score * value).argmax(-1), picks, widths)
            alive = alive @ steps[index]
        reached = _chained(start, steps)
        if reached <= best + 1e-9:
            return reached
        best = reached
