"""Auxiliary slots of parallel token prediction: how many follow each possible acceptance count, where, and seeing what.

One forward reads [b | drafts | groups of slots]. Group d stands behind b and the first d drafts, for the case that
exactly those are accepted; it has its own slots, one uniform each. Best-of-M has several branches of drafts behind b,
each with groups of its own, and in every group several vectors of uniforms, which share the group's first slot: that
one reads the uniform of the token which the target picks. Knows no model.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..contract import line
from ..schedule import AcceptanceRates


@dataclass(frozen=True)
class SlotLayout:
    """Slots of one forward, the same for all rows of a batch.

    Attributes:
        sizes: Slots per group 0..m, for one vector.
        branch: [A] int64, the branch that each slot stands behind.
        group: [A] int64, its group.
        vector: [A] int64, its vector of uniforms; 0 for the slots that all vectors share.
        place: [A] int64, its place in its group.
        order: [F + A] int64, how far each row of the forward stands behind b in its text; F = 1 + branches m.
        new: [F + A, F + A] bool, what the rows see of each other.
        index: [branches, m + 1, vectors, longest] int64, the slots of every vector; arbitrary where there is none.
        counts: [m + 1] int64, slots per group, for one vector.
    """

    sizes: tuple[int, ...]
    branch: torch.Tensor
    group: torch.Tensor
    vector: torch.Tensor
    place: torch.Tensor
    order: torch.Tensor
    new: torch.Tensor
    index: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, sizes: list[int], device: torch.device, branches: int = 1, vectors: int = 1) -> SlotLayout:
        """The layout of groups of these sizes."""
        return _layout(tuple(sizes), torch.device(device), branches, vectors)

    def of_group(self, chosen: torch.Tensor, branch: torch.Tensor | int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots behind `chosen[b]` drafts of a branch: indices [B, vectors, longest], and which exist [B, longest].

        Args:
            chosen: [B] int64, a group per row of the batch.
            branch: One for all rows, or [B] int64.
        """
        places = line(max(self.sizes), self.group.device)
        return self.index[branch, chosen], places < self.counts[chosen][:, None]


@lru_cache(maxsize=64)
def _layout(sizes: tuple[int, ...], device: torch.device, branches: int, vectors: int) -> SlotLayout:
    """See `SlotLayout.of`; lengths repeat from cycle to cycle."""
    grid = torch.cartesian_prod(*map(torch.arange, (branches, len(sizes), vectors, max(sizes))))
    _, group, vector, place = grid.unbind(1)
    exists = (place < torch.tensor(sizes)[group]) & ((place > 0) | (vector == 0))
    index = (exists.cumsum(0) - 1).clamp(min=0).view(branches, len(sizes), vectors, -1)
    index[..., 0] = index[:, :, :1, 0].clone()
    slots = branch, group, vector, place = grid[exists].unbind(1)
    drafts = torch.cartesian_prod(torch.arange(branches), torch.arange(1, len(sizes)))
    read_branch, read_order = torch.cat([drafts.new_zeros(1, 2), drafts]).unbind(1)
    behind = torch.cat([read_branch, branch]), torch.cat([read_order, group])
    tokens = (behind[0][:, None] == read_branch) & (behind[1][:, None] >= read_order) | (read_order == 0)
    same = (branch[:, None] == branch) & (group[:, None] == group) & (place[:, None] >= place)
    same &= (vector[:, None] == vector) | (place == 0)
    new = torch.cat([tokens, torch.nn.functional.pad(same, (0, 0, len(read_order), 0), value=False)], dim=1)
    order = torch.cat([read_order, group + place])
    return SlotLayout(sizes, *(part.to(device) for part in (*slots, order, new, index, torch.tensor(sizes))))


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
