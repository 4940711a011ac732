"""The geometry of one EVA forward: which keys each new token sees. Uses neither weights nor buffers.

A sequence in the cache is `summaries` chunk summaries followed by raw keys, which begin with a window. The new
tokens have the raw slots `offset .. offset + length - 1`. A query at slot t sees

- raw slot s where s // W == t // W and s <= t,
- every summary of an earlier window: those in the cache, and those of raw windows before its own, which the layer
  computes on the fly ("provisional": they may contain speculative tokens and are not stored).

Nodes of a tree have consecutive columns, too, but node i has the slot `offset + depth of i`, and of the columns from
`offset` on it sees its ancestors and itself. Where a window closes within the tree, its chunks from b's on differ from
path to path: the layer summarises them for every node along its own path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from ...generation.tensors.masks import cached_arange, cached_range

if TYPE_CHECKING:
    from ...generation.contract import DraftTree


@dataclass
class EvaBlock:
    """Geometry of one forward of `length` new tokens per sequence, for every layer.

    Attributes:
        length: New tokens per sequence, M.
        window: W, tokens per window.
        chunk: C, tokens per summary.
        offsets: Raw tokens in the cache before the block, per sequence.
        summaries: Chunk summaries in the cache before the raw tokens, per sequence.
        fold: Whole windows that each sequence's cache must summarise before the block is written.
        folds: Whole windows that each sequence's cache must summarise after the block was attended to.
        on_device: `offsets` and `summaries` as [R] int64 on the device; computed only where sequences differ.
        tree: Which of the new tokens descend from which; None: each from the one before.
        mask: Additive mask for the attention function, or None where plain causal attention is right.
    """

    length: int
    window: int
    chunk: int
    offsets: list[int]
    summaries: list[int]
    fold: list[int]
    folds: list[int]
    device: torch.device
    on_device: Callable[[], tuple[Tensor, Tensor]]
    tree: DraftTree | None = None
    mask: Tensor | None = None

    @cached_property
    def is_fresh(self) -> bool:
        """Return whether no sequence has a past, so that the block attends to nothing but itself."""
        return not any(self.offsets) and not any(self.summaries)

    @property
    def is_long(self) -> bool:
        """Return whether attention runs window by window rather than over one dense mask."""
        return self.length > self.window and self.tree is None

    @cached_property
    def is_uniform(self) -> bool:
        """Return whether all sequences have the same geometry, so that slices replace gathers."""
        return len(set(self.offsets)) == 1 and len(set(self.summaries)) == 1

    @cached_property
    def provisional(self) -> int:
        """Number of raw windows before the last one of the longest sequence."""
        ahead = self.length - 1 if self.tree is None else self.tree.depth
        return (max(self.offsets) + ahead) // self.window

    @cached_property
    def used(self) -> int:
        """Slots of the cache that the block may read."""
        return max(map(int.__add__, self.summaries, self.offsets)) + self.length

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor]:
        return self.on_device()

    def count_from(self, summaries: int, offsets: int, length: int) -> Tensor:
        """Return s, s + 1, .. [R or 1, length], s = `summaries` * (its summaries) + `offsets` * (its raw tokens)."""
        if self.is_uniform:
            start = summaries * self.summaries[0] + offsets * self.offsets[0]
            return cached_range(start, length, self.device)[None]
        all_offsets, all_summaries = self._lengths
        start = all_summaries * summaries + all_offsets * offsets  # [R]
        return start[:, None] + cached_arange(length, self.device)  # [R, length]

    @cached_property
    def new_slots(self) -> Tensor:
        """Slots of the buffers for the new tokens, [R, M] or [1, M]."""
        return self.count_from(1, 1, self.length)

    def positions(self) -> Tensor:
        """Return the true positions of the new tokens, [R, M] or [1, M]."""
        return self._slots(self.chunk)

    def raw_slots(self, total: int) -> Tensor:
        """Return the slots of the buffers that hold raw tokens 0 .. total - 1, and those of `_path_slots` of a tree."""
        slots = self.count_from(1, 0, total)
        return slots if self.tree is None else torch.cat([slots.expand(len(self.offsets), -1), self._path_slots], dim=1)

    @cached_property
    def _path_chunks(self) -> int:
        """Chunks, from b's on, that a path of the tree may fill."""
        return 0 if self.tree is None else (self.tree.depth + 2 * self.chunk - 2) // self.chunk

    @cached_property
    def _path_slots(self) -> Tensor:
        """Slots of the buffers that hold b's and the next chunks along the path to every node, [R, M * chunks * C]."""
        tree = cast("DraftTree", self.tree)
        ahead = cached_arange(self._path_chunks * self.chunk, self.device) - self.count_from(0, 1, 1) % self.chunk
        index = ahead.clamp(0, tree.depth)[:, None].expand(len(self.offsets), self.length, -1)  # [R, M, chunks C]
        after_b = torch.where(ahead[:, None] < 0, ahead[:, None], tree.paths().gather(2, index))  # [R, M, chunks C]
        return (self.count_from(1, 1, 1)[..., None] + after_b).flatten(1)  # [R, M chunks C]

    def at_slots(self, states: Tensor, total: int) -> Tensor:
        """Put per-token states [R, H, M, d] at their raw slots: [R, H, total, d], zero elsewhere."""
        result = states.new_zeros(*states.shape[:2], total, states.shape[3])
        if self.is_uniform:
            result[:, :, self.offsets[0] : self.offsets[0] + self.length] = states
            return result
        return result.scatter(2, self._slots()[:, None, :, None].expand_as(states), states)  # [R, H, total, d]

    def take(self, outputs: Tensor) -> Tensor:
        """Return the inverse of `at_slots`, for outputs [R, total, ...]: [R, M, ...]."""
        if self.is_uniform:
            return outputs[:, self.offsets[0] : self.offsets[0] + self.length]
        return outputs.gather(1, self._slots()[:, :, None, None].expand(-1, -1, *outputs.shape[2:]))

    def with_mask(self, dtype: torch.dtype, explicit: bool) -> EvaBlock:
        """Build the mask; `explicit` requires one even where `is_causal` would do (eager attention)."""
        if self.is_long:
            self.mask = _additive(self._visible_by_window(), dtype)
        elif self.tree is not None:
            self.mask = _additive(self._visible_in_tree(self.tree), dtype)[:, None]  # [R, 1, M, S]
        elif (explicit or not self.is_fresh) and (self.length > 1 or not self.is_uniform or self.provisional):
            if self.is_uniform and not self.provisional and self.length <= _DRAFT:
                # one launch, as every decoding cycle needs it
                own = _causal(self.length, dtype, self.device)
                self.mask = torch.nn.functional.pad(own, (self.used - self.length, 0))[None, None]  # [1, 1, M, used]
            else:
                self.mask = _additive(self._visible(), dtype)[:, None]  # [R, 1, M, S]
        return self

    def _slots(self, summaries: int = 0) -> Tensor:
        """Return raw slots of the new tokens, [R or 1, M], after `summaries` for every summary."""
        if self.tree is None:
            return self.count_from(summaries, 1, self.length)
        return self.count_from(summaries, 1, 1) + self.tree.positions()

    def _visible(self) -> Tensor:
        """Return visibility [R or 1, M, used + provisional summaries]."""
        query = self._slots()[:, :, None]  # [1 or R, M, 1]
        key = self.count_from(-1, 0, self.used)[:, None, :]  # [1 or R, 1, used]
        if not self.provisional:
            return key <= query
        same_window = (key // self.window == query // self.window) & (key <= query)  # [1 or R, M, used]
        chunks = torch.arange(self.provisional * self.window // self.chunk, device=self.device)  # [P]
        earlier = chunks // (self.window // self.chunk) < query // self.window  # [1 or R, M, P]
        return torch.cat([(key < 0) | same_window, earlier], dim=-1)

    def _visible_in_tree(self, tree: DraftTree) -> Tensor:
        """Return visibility [R, M, used + provisional summaries + summaries of every node's path]."""
        node = self.count_from(-1, -1, self.used)  # [1 or R, used], the node in each slot
        index = node.clamp(0, self.length - 1).expand(len(self.offsets), -1)  # [R, used]
        on_path = tree.mask().gather(2, index[:, None].expand(-1, self.length, -1))  # [R, M, used]
        seen = (node < 0)[:, None] | (on_path & (node < self.length)[:, None])  # [R, M, used]
        if not self.provisional:
            return seen
        key, window = self.count_from(-1, 0, self.used), self._slots() // self.window
        key_window = torch.where(node < 0, key // self.window, window.gather(1, index))  # [R, used]
        seen = seen & ((key < 0)[:, None] | (key_window[:, None] == window[..., None]))
        per_window, first = self.window // self.chunk, self.count_from(0, 1, 1) // self.chunk  # b's chunk
        chunks = cached_arange(self.provisional * per_window, self.device)  # [P]
        shared = (chunks < first)[:, None] & (chunks // per_window < window[..., None])  # [R, M, P]
        chunks = first + cached_arange(self._path_chunks, self.device)  # [1 or R, path's chunks]
        own = chunks[:, None] // per_window < window[..., None]  # [R, M, path's chunks]
        itself = torch.eye(self.length, dtype=torch.bool, device=self.device)[..., None]  # [M, M, 1]
        return torch.cat([seen, shared, (itself & own[:, :, None]).flatten(2)], dim=-1)  # [R, M, S]

    def _visible_by_window(self) -> Tensor:
        """Return visibility window by window, [R * windows, 1, W, cached + new summaries + W]."""
        per_window = self.window // self.chunk
        windows = torch.arange(self.provisional + 1, device=self.device)
        past = self.count_from(-1, 0, max(self.summaries)) < 0  # [1 or R, S]
        new = torch.arange(self.provisional * per_window, device=self.device) // per_window < windows[:, None]
        own = torch.ones(self.window, self.window, dtype=torch.bool, device=self.device).tril()  # [W, W]
        parts = (past[:, None, None, :], new[None, :, None, :], own[None, None])
        shape = (len(self.offsets), len(windows), self.window)
        return torch.cat([part.expand(*shape, part.shape[-1]) for part in parts], dim=-1).flatten(0, 1)[:, None]


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return visible.to(dtype).log_()  # 0 where visible, -inf elsewhere


_DRAFT = 64
"""Longest block whose causal mask is kept."""


@lru_cache(maxsize=64)
def _causal(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return what every new token adds to the scores of the block, [M, M], made once; never write to it."""
    with torch.inference_mode(False):
        return _additive(torch.ones(length, length, dtype=torch.bool, device=device).tril(), dtype)


@dataclass
class SequenceMap:
    """A map between the columns of a batch [B, L] and the tokens of sequences [R, M] without padding before them.

    Attributes:
        source: [R, M] int64, flat index into B * L of each token; unused ones point at any column.
        target: [B, L] int64, flat index into R * M of each column; padding points at any token.
        counts: [R] int64, real tokens per sequence.
    """

    source: Tensor
    target: Tensor
    counts: Tensor

    @classmethod
    def from_mask(cls, mask: Tensor) -> SequenceMap:
        """Return the map of `mask` [B, L] (True: a real token; padding may be anywhere)."""
        batch, length = mask.shape
        order = (~mask).long().argsort(dim=1, stable=True)  # [B, L], real tokens first
        first = torch.arange(batch, device=mask.device)[:, None] * length  # [B, 1]
        return cls(source=order + first, target=order.argsort(dim=1) + first, counts=mask.sum(1))

    @classmethod
    def from_documents(cls, mask: Tensor, position_ids: Tensor) -> SequenceMap:
        """Return a map of documents, which start where the batch's sequences do or `position_ids` [B, L] is 0."""
        batch, length = mask.shape
        starts = mask & ((position_ids.expand(batch, length) == 0) | (mask.cumsum(1) == 1))
        real = mask.flatten().nonzero()[:, 0]  # [N], flat columns of real tokens
        if len(real) == 0:
            return cls.from_mask(mask)
        document = starts.flatten()[real].cumsum(0) - 1  # [N]
        first = starts.flatten()[real].nonzero()[:, 0]  # [R]
        column = torch.arange(len(real), device=mask.device) - first[document]  # [N]
        counts = torch.bincount(document)  # [R]
        source = real.new_zeros(len(counts), int(counts.max()))  # [R, M]
        source[document, column] = real
        target = real.new_zeros(batch * length)
        target[real] = document * source.shape[1] + column
        return cls(source=source, target=target.view(batch, length), counts=counts)

    def gather(self, batch: Tensor) -> Tensor:
        """Map [B, L, ...] to [R, M, ...]."""
        return batch.flatten(0, 1)[self.source]

    def restore(self, sequences: Tensor) -> Tensor:
        """Map [R, M, ...] to [B, L, ...]; padding columns hold arbitrary finite values."""
        return sequences.flatten(0, 1)[self.target]
