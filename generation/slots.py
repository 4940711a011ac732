"""Auxiliary slots of parallel token prediction: how many follow each possible acceptance count, where, and seeing what.

One forward reads [b, d_1..d_m | groups 0..m]. Group d stands behind b and the first d drafts, for the case that exactly
those are accepted; it has its own slots, one uniform each. Knows no model.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch

from .schedule import AcceptanceRates


@dataclass(frozen=True)
class SlotLayout:
    """Slots of one forward, the same for all rows.

    Attributes:
        sizes: Slots per group 0..m.
        group: [A] int64, each slot's group.
        place: [A] int64, each slot's place in its group.
    """

    sizes: list[int]
    group: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, sizes: list[int], device: torch.device) -> SlotLayout:
        """The layout of groups of these sizes."""
        group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
        starts = torch.tensor([sum(sizes[:d]) for d in range(len(sizes))], device=device)
        return cls(sizes, group, torch.arange(len(group), device=device) - starts[group])

    def visible(self, cached: torch.Tensor) -> torch.Tensor:
        """What each row of the forward sees: [B, 1, m + 1 + A, W + m + 1 + A] bool.

        Args:
            cached: [B, W] bool, the real columns of the cache.
        """
        block = len(self.sizes)
        order = torch.arange(block, device=cached.device)
        tokens = torch.cat([order, self.group])[:, None] >= order  # b and the drafts that a row stands behind
        same = (self.group[:, None] == self.group) & (self.place[:, None] >= self.place)
        slots = torch.nn.functional.pad(same, (0, 0, block, 0), value=False)
        new = torch.cat([tokens, slots], dim=1).expand(len(cached), -1, -1)
        old = cached[:, None].expand(-1, new.shape[1], -1)
        return torch.cat([old, new], dim=2)[:, None]

    def of_group(self, chosen: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the slots of group `chosen[b]` for every row, [B, longest], and which of them exist."""
        starts = [sum(self.sizes[:d]) for d in chosen]
        counts = torch.tensor([self.sizes[d] for d in chosen], device=self.group.device)[:, None]
        places = torch.arange(max(self.sizes[d] for d in chosen), device=self.group.device)
        index = torch.tensor(starts, device=self.group.device)[:, None] + places
        return index.clamp(max=max(len(self.group) - 1, 0)), places < counts


def split_budget(budget: int, drafted: int, longest: int, rates: AcceptanceRates) -> list[int]:
    """Slots per group 0..m that maximise sum_d A_d H(B_d) under sum_d B_d = budget.

    A_d is the probability that d of the m drafts are accepted, H(k) = S_1 + ... + S_k the expected accepted tokens of a
    draft of k, with S_j the probability of accepting j. H is concave, so slots are given one by one to the best group.

    Args:
        budget: Slots in all.
        drafted: m.
        longest: Most slots per group.
        rates: Measured acceptance.
    """
    survival = [1.0, *rates.survival()]
    reach = [survival[min(d, len(survival) - 1)] for d in range(drafted + 1)] + [0.0]
    ends = [reach[d] - reach[d + 1] for d in range(drafted + 1)]
    sizes = [0] * (drafted + 1)
    heap = [(-end * survival[1], d) for d, end in enumerate(ends)]
    heapq.heapify(heap)
    for _ in range(min(budget, longest * len(sizes))):
        _, d = heapq.heappop(heap)
        sizes[d] += 1
        if sizes[d] < longest:
            heapq.heappush(heap, (-ends[d] * survival[min(sizes[d] + 1, len(survival) - 1)], d))
    return sizes
