"""Auxiliary slots of parallel token prediction: how many follow each possible acceptance count, where, and their mask.

One forward reads [bonus token | drafts | groups of slots]. Group d follows the bonus token and the first d drafts, for
the case that exactly those are accepted; it has its own slots, one uniform each. Best-of-M has several branches of
drafts, each with its own groups, and in every group several vectors of uniforms, which share the group's first slot:
that one reads the uniform of the target's pick. Knows no model.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...generation.tensors.masks import cached_arange, made_once


@dataclass(frozen=True)
class SlotLayout:
    """Slots of one forward, the same for all sequences of a batch.

    Attributes:
        sizes: Slots per group 0..m, for one vector.
        branch: [A] int64, the branch that each slot follows.
        group: [A] int64, its group.
        vector: [A] int64, its vector of uniforms; 0 for the slots that all vectors share.
        index_in_group: [A] int64.
        order: [F + A] int64, how far each position of the forward is after the bonus token; F = 1 + branches m.
        new: [F + A, F + A] bool, the mask of these positions.
        index: [branches, m + 1, vectors, longest] int64, the slots of every vector; arbitrary where there is none.
        counts: [m + 1] int64, slots per group, for one vector.
    """

    sizes: tuple[int, ...]
    branch: Tensor
    group: Tensor
    vector: Tensor
    index_in_group: Tensor
    order: Tensor
    new: Tensor
    index: Tensor
    counts: Tensor

    @classmethod
    def of(cls, sizes: list[int], device: torch.device, branches: int = 1, vectors: int = 1) -> SlotLayout:
        """Return the layout of groups of these sizes."""
        return _layout(tuple(sizes), torch.device(device), branches, vectors)

    def of_group(self, chosen: Tensor, branch: Tensor | int = 0) -> tuple[Tensor, Tensor]:
        """Return the slots after `chosen[b]` drafts of a branch (one, or one per sequence): [B, vectors, longest].

        And which of them exist, [B, longest].
        """
        steps = cached_arange(max(self.sizes), self.group.device)
        return self.index[branch, chosen], steps < self.counts[chosen][:, None]


@made_once
def _layout(sizes: tuple[int, ...], device: torch.device, branches: int, vectors: int) -> SlotLayout:
    """See `SlotLayout.of`; lengths repeat from cycle to cycle."""
    grid = torch.cartesian_prod(*map(torch.arange, (branches, len(sizes), vectors, max(sizes))))  # [N, 4]
    _, group, vector, step = grid.unbind(1)
    exists = (step < torch.tensor(sizes)[group]) & ((step > 0) | (vector == 0))  # slot 0 once for all vectors
    index = (exists.cumsum(0) - 1).clamp(min=0).view(branches, len(sizes), vectors, -1)
    index[..., 0] = index[:, :, :1, 0].clone()  # all vectors have slot 0
    slots = branch, group, vector, step = grid[exists].unbind(1)
    drafts = torch.cartesian_prod(torch.arange(branches), torch.arange(1, len(sizes)))  # [branches m, 2]
    read_branch, read_order = torch.cat([drafts.new_zeros(1, 2), drafts]).unbind(1)  # [F] each
    after = torch.cat([read_branch, branch]), torch.cat([read_order, group])  # [F + A] each
    tokens = (after[0][:, None] == read_branch) & (after[1][:, None] >= read_order) | (read_order == 0)  # [F + A, F]
    same = (branch[:, None] == branch) & (group[:, None] == group) & (step[:, None] >= step)  # [A, A]
    same &= (vector[:, None] == vector) | (step == 0)
    new = torch.cat([tokens, torch.nn.functional.pad(same, (0, 0, len(read_order), 0), value=False)], dim=1)
    order = torch.cat([read_order, group + step])  # [F + A]
    return SlotLayout(sizes, *_moved((*slots, order, new, index, torch.tensor(sizes)), device))


def _moved(parts: tuple[Tensor, ...], device: torch.device) -> list[Tensor]:
    """Return tensors of whole numbers or truth values on a device, in one copy."""
    flat = torch.cat([part.flatten().long() for part in parts]).to(device)
    pieces = flat.split([part.numel() for part in parts])
    return [piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts)]


@lru_cache(maxsize=256)
def split_budget(
    budget: int, drafted: int, longest: int, survival: tuple[float, ...], repeats_pick: bool = False
) -> list[int]:
    """Return slots per group 0..m that maximise sum_d A_d H(B_d) under sum_d B_d <= budget; the list is cached.

    A_d is the probability that d of the m drafts are accepted, H(k) = S_1 + ... + S_k the expected accepted tokens of a
    draft of k, with S_j the probability of accepting j. Where a group's first slot repeats the target's pick
    (one-hot), it drafts nothing, and a group of k slots is worth H(k - 1). All groups share H, which is concave: if k
    groups are opened, they are those of the k greatest A_d, and the rest goes slot by slot to where it gains most.

    Args:
        budget: Slots in all.
        drafted: m.
        longest: Most slots per group.
        survival: S_1, S_2, ...; the last one applies to all after it.
        repeats_pick: Whether a group's first slot drafts nothing.
    """
    reach = [1.0, *(survival[min(d, len(survival) - 1)] for d in range(drafted)), 0.0]
    ends = [reach[d] - reach[d + 1] for d in range(drafted + 1)]
    order = sorted(range(drafted + 1), key=lambda d: -ends[d])
    best, best_value = [0] * (drafted + 1), -1.0
    for opened in range(1, min(drafted + 1, budget) + 1) if repeats_pick else (drafted + 1,):
        sizes, value = _fill(budget, longest, survival, ends, order[:opened], int(repeats_pick))
        if value > best_value + 1e-12:
            best, best_value = sizes, value
    return best


def _fill(
    budget: int, longest: int, survival: tuple[float, ...], ends: list[float], opened: list[int], price: int
) -> tuple[list[int], float]:
    """Return sizes, and their value, if the `opened` groups cost `price` slots each before the first that drafts."""
    sizes, value = [0] * len(ends), 0.0
    heap = [(-ends[d] * survival[0], d) for d in opened]
    heapq.heapify(heap)
    for _ in range(min(budget, longest * len(opened)) - price * len(opened)):
        gain, d = heapq.heappop(heap)
        sizes[d], value = (sizes[d] or price) + 1, value - gain
        if sizes[d] < longest:
            heapq.heappush(heap, (-ends[d] * survival[min(sizes[d] - price, len(survival) - 1)], d))
        if not heap:
            break
    return sizes, value
