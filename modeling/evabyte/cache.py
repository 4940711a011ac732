"""The EVA cache: an open window of raw keys and values, and chunk summaries of every window before it.

A sequence in a layer's buffer is laid out as [summaries | raw tokens], the raw part starting with the first token of a
window. Windows are summarised ("folded") lazily, by the next forward: until then a rollback is a change of length.

Of the new tokens of a forward, which have the raw slots `offset .. offset + length - 1`, a query at slot t sees

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
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ...configuration.evabyte import EvaByteConfig
from ...generation.call.sequences import NewTokens
from ...generation.tensors.masks import cached_arange, cached_range

if TYPE_CHECKING:
    from ...generation.contract import DraftTree

States = tuple[Tensor, Tensor]
"""Keys and values, or what else comes in pairs."""
Summarise = Callable[[Tensor, Tensor], States]
_CAPACITY_STEP = 64


@dataclass
class EvaBlock:
    """Geometry of one forward of `length` new tokens (M) per sequence, for every layer."""

    length: int
    window: int  # W, tokens per window
    chunk: int  # C, tokens per summary
    offsets: list[int]  # raw tokens in the cache before the block, per sequence
    summaries: list[int]  # chunk summaries in the cache before the raw tokens, per sequence
    fold: list[int]  # whole windows of each sequence to summarise before the block is written
    folds: list[int]  # the same, after the block was attended to
    device: torch.device
    on_device: Callable[[], States]  # offsets and summaries [R], where sequences differ
    tree: DraftTree | None = None  # which of the new tokens descend from which; None: each from the one before
    mask: Tensor | None = None  # additive; None where plain causal attention is right

    @cached_property
    def is_fresh(self) -> bool:
        """Whether no sequence has a past."""
        return not any(self.offsets) and not any(self.summaries)

    @property
    def is_long(self) -> bool:
        """Whether attention runs window by window rather than over one dense mask."""
        return self.length > self.window and self.tree is None

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all sequences have the same geometry, so that slices replace gathers."""
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
    def _lengths(self) -> States:
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
        return result.scatter(2, self._slots()[:, None, :, None].expand_as(states), states)  # [R, H, total, d]

    def take(self, outputs: Tensor) -> Tensor:
        """Return the inverse of `at_slots`, for outputs [R, total, ...]: [R, M, ...]."""
        return outputs.gather(1, self._slots()[:, :, None, None].expand(len(outputs), -1, *outputs.shape[2:]))

    def with_mask(self, dtype: torch.dtype, explicit: bool) -> EvaBlock:
        """Build the mask; `explicit` requires one even where `is_causal` would do (eager attention)."""
        if self.is_long:
            self.mask = additive(self._visible_by_window(), dtype)
        elif self.tree is not None:
            self.mask = additive(self._visible_in_tree(self.tree), dtype)[:, None]  # [R, 1, M, S]
        elif (explicit or not self.is_fresh) and (self.length > 1 or not self.is_uniform or self.provisional):
            self.mask = additive(self._visible(), dtype)[:, None]  # [R or 1, 1, M, S]
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


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what attention adds for visibility of any shape."""
    return visible.to(dtype).log_()  # 0 where visible, -inf elsewhere


@dataclass
class SequenceMap:
    """A map between the columns of a batch [B, L] and the tokens of sequences [R, M] without padding before them."""

    source: Tensor  # [R, M] int64, flat index into B * L of each token; unused ones point at any column
    target: Tensor  # [B, L] int64, flat index into R * M of each column; padding points at any token
    counts: Tensor  # [R] int64, real tokens per sequence

    @classmethod
    def from_mask(cls, mask: Tensor) -> SequenceMap:
        """Return the map of `mask` [B, L] (True: a real token)."""
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
        return batch.flatten(0, 1)[self.source]

    def restore(self, sequences: Tensor) -> Tensor:
        """Map [R, M, ...] to [B, L, ...]; padding columns hold arbitrary finite values."""
        return sequences.flatten(0, 1)[self.target]


class SequenceLengths:
    """Lengths of the sequences in a cache, shared by its layers; plain integers, so that no layer waits for the device.

    While sequences differ, lengths and starts are mirrored on the device and follow what forwards and rollbacks do
    there, so that a cycle of decoding copies only the counts of its new tokens.
    """

    lengths: list[int]  # true tokens per sequence
    starts: list[int]  # position of each sequence's first raw token, a multiple of the window
    gaps: list[int]  # columns of padding, per sequence
    settled: list[int]  # tokens per sequence that no later `crop` will remove, while past recording is on
    tree_slots: Tensor  # [R or 1, M] int64, slots of the buffers to which the last forward wrote a tree

    def __init__(self, window: int, chunk: int) -> None:
        self.window, self.chunk, self.record_past = window, chunk, False
        self.clear()

    def clear(self) -> None:
        self.lengths, self.starts, self.gaps, self.settled = [], [], [], []
        self._mirror: States | None = None

    def _on_device(self, device: torch.device) -> States:
        """Return the offsets and summaries [R] of the next block."""
        if self._mirror is None:
            both = torch.tensor([self.lengths, self.starts], device=device)  # [2, R]
            self._mirror = both[0], both[1]
        lengths, starts = self._mirror
        return lengths - starts, starts // self.chunk

    def begin(self, counts: list[int], length: int, device: torch.device, tree: DraftTree | None = None) -> EvaBlock:
        """Plan a forward that appends `counts[r]` tokens to sequence r, in `length` columns."""
        if not self.lengths:
            self.lengths, self.starts, self.gaps, self.settled = ([0] * len(counts) for _ in range(4))
        if len(counts) != len(self.lengths):
            raise ValueError(f"the cache holds {len(self.lengths)} sequences, but the input has {len(counts)}")
        old, self.starts = self.starts, [self._border(n) for n in self._foldable()]
        if self.starts != old:
            self._mirror = None
        folds = self.starts
        # a prompt, or a long block without recording, can be rolled back by one window: raw keys would fill the memory
        if length > self.window and not (self.record_past and any(self.lengths)):
            ends = (n + count - self.window for n, count in zip(self.lengths, counts))
            folds = [max(start, self._border(end)) for start, end in zip(self.starts, ends)]
        offsets = [n - start for n, start in zip(self.lengths, self.starts)]
        summaries = [start // self.chunk for start in self.starts]
        fold = [(new - start) // self.window for new, start in zip(self.starts, old)]
        later = [(new - start) // self.window for new, start in zip(folds, self.starts)]
        sizes = length, self.window, self.chunk
        return EvaBlock(*sizes, offsets, summaries, fold, later, device, lambda: self._on_device(device), tree)

    def finish(self, block: EvaBlock, counts: list[int]) -> None:
        """Record the tokens of a forward that all layers have seen."""
        if block.tree is not None:
            self.tree_slots = block.new_slots
        self.lengths = [n + count for n, count in zip(self.lengths, counts)]
        if self._mirror is not None:
            even = len(set(counts)) == 1 and not any(block.folds)
            self._mirror = (self._mirror[0] + counts[0], self._mirror[1]) if even else None
        self.gaps = [gap + block.length - count for gap, count in zip(self.gaps, counts)]
        self.starts = [start + fold * self.window for start, fold in zip(self.starts, block.folds)]

    def keep_last(self, fed: int, kept: NewTokens) -> None:
        """Accept the first `kept.counts[r]` of the last `fed` tokens of sequence r, and roll back the others."""
        mirror = self._mirror
        self.crop([fed - count for count in kept.counts])
        if mirror is not None and len(set(self.lengths)) > 1:
            self._mirror = mirror[0] + (kept.on_device - fed), mirror[1]

    def crop(self, removed: list[int]) -> None:
        """Roll back `removed[r]` tokens of sequence r."""
        for index, (n, start, count) in enumerate(zip(self.lengths, self.starts, removed)):
            if not 0 <= count <= n - start:
                raise ValueError(f"crop: cannot remove {count} tokens of sequence {index}, but 0 to {n - start}")
        self.lengths = [n - count for n, count in zip(self.lengths, removed)]
        self.settled, self._mirror = list(self.lengths), None

    def select(self, indices: list[int]) -> None:
        for name in ("lengths", "starts", "gaps", "settled"):
            setattr(self, name, [getattr(self, name)[index] for index in indices])
        self._mirror = None

    def _border(self, position: int) -> int:
        return position // self.window * self.window

    def _foldable(self) -> list[int]:
        """Return how many tokens of each sequence will never be rolled back."""
        if not self.record_past:
            return self.lengths
        return [max(*each, n - self.window) for n, *each in zip(self.lengths, self.starts, self.settled)]


class EvaCacheLayer(CacheLayerMixin):
    """Buffers of one layer: `keys` and `values` [R, H, capacity, d]."""

    keys: Tensor
    values: Tensor
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, sequences: SequenceLengths) -> None:
        super().__init__()
        self.sequences = sequences

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0].detach(), value_states[:, :, :0].detach()  # [R, H, 0, d]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, block: EvaBlock, summarise: Summarise
    ) -> tuple[Tensor, Tensor]:
        """Fold what the block allows, write its keys and values [R, H, M, d], and return all that it may read."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.keys.is_inference() and not torch.is_inference_mode_enabled():  # it could not be written to in place
            self.keys, self.values = self.keys.clone(), self.values.clone()
        if any(block.fold):
            summaries = [n - f * block.window // block.chunk for n, f in zip(block.summaries, block.fold)]
            raw = [o + f * block.window for o, f in zip(block.offsets, block.fold)]
            self._fold(block, block.fold, summaries, raw, summarise)
        self._reserve(block.used)
        slots = block.new_slots[:, None, :, None].expand_as(key_states)  # [R, H, M, d]
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            buffer.scatter_(2, slots, states.detach().to(buffer.dtype))
        return self.keys[:, :, : block.used], self.values[:, :, : block.used]

    def raw(self, block: EvaBlock, total: int) -> tuple[Tensor, Tensor]:
        """Return the states [R, H, total, d] at `EvaBlock.raw_slots`; unwritten ones hold anything."""
        self._reserve(max(block.summaries) + total)
        if block.is_uniform and block.tree is None:
            start = block.summaries[0]
            return self.keys[:, :, start : start + total], self.values[:, :, start : start + total]
        slots = for_states(block.raw_slots(total), self.keys)  # [R, H, total, d]
        return self.keys.gather(2, slots), self.values.gather(2, slots)

    def move_slots(self, source: Tensor, target: Tensor) -> None:
        for buffer in (self.keys, self.values):
            buffer.scatter_(2, for_states(target, buffer), buffer.gather(2, for_states(source, buffer)))

    def summarise_after(self, block: EvaBlock, summarise: Summarise) -> None:
        """Fold the windows before the last one of a long forward, and free their memory."""
        if not any(block.folds):
            return
        raw = [offset + block.length for offset in block.offsets]
        self._fold(block, block.folds, block.summaries, raw, summarise)
        saved = [f * (block.window - block.window // block.chunk) for f in block.folds]
        needed = max(n + r - s for n, r, s in zip(block.summaries, raw, saved))
        self.keys, self.values = self.keys[:, :, :needed].clone(), self.values[:, :, :needed].clone()

    def get_seq_length(self) -> int:
        return max(map(int.__add__, self.sequences.lengths, self.sequences.gaps), default=0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.keys = self.values = torch.empty(0)
        self.is_initialized = False

    def select(self, indices: Tensor) -> None:
        if self.is_initialized:
            self.keys, self.values = (b.index_select(0, indices.to(b.device)) for b in (self.keys, self.values))

    def _reserve(self, needed: int) -> None:
        capacity = self.keys.shape[2]
        if needed > capacity:
            extra = -(-needed // _CAPACITY_STEP) * _CAPACITY_STEP - capacity
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def _fold(
        self, block: EvaBlock, windows: list[int], summaries: list[int], raw: list[int], summarise: Summarise
    ) -> None:
        for index, count in enumerate(windows):
            if count == 0:
                continue
            start, size = summaries[index], count * block.window
            states = [b[index : index + 1, :, start : start + raw[index]].clone() for b in (self.keys, self.values)]
            folded = summarise(*(each[:, :, :size] for each in states))  # [1, H, S, d] each
            for buffer, each, summary in zip((self.keys, self.values), states, folded):
                shorter = torch.cat([summary.to(each.dtype), each[:, :, size:]], dim=2)  # [1, H, T, d]
                buffer[index, :, start : start + shorter.shape[2]] = shorter[0]


class EvaByteCache(Cache):
    """Cache of an EvaByte model: per sequence the open window raw, earlier windows as one summary per chunk.

    Sequences may have different lengths. `crop` rolls back any number of tokens of the last forward (of its last
    window, where it was the first, or was longer and nothing is recorded); `activate_past_recording` keeps the whole
    block of the last forward, and tokens of forwards since the last `crop` up to a window.

    Memory: with W the window and C the chunk, at most 2 W raw tokens plus the block, and one summary per C tokens.
    """

    layers: list[EvaCacheLayer]
    takes_trees = True
    max_cache_len = -1  # peft asks

    def __init__(self, config: EvaByteConfig) -> None:
        self.sequences = SequenceLengths(config.window_size, config.chunk_size)
        super().__init__(layers=[EvaCacheLayer(self.sequences) for _ in range(config.num_hidden_layers)])

    @property
    def lengths(self) -> list[int]:
        return list(self.sequences.lengths)

    @property
    def batch_size(self) -> int:
        return len(self.sequences.lengths) or -1

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Roll back the last tokens, by 0 or a negative int for all sequences, or a [B] tensor of such numbers.

        Raises:
            ValueError: A positive number, or tokens whose raw keys were folded away (nothing has changed then).
        """
        removed = torch.as_tensor(tokens_to_remove).expand(len(self.lengths)).tolist()
        self.sequences.crop([-count for count in removed])

    def keep_last(self, fed: int, kept: NewTokens, path: Tensor | None = None) -> None:
        """Accept the first `kept.counts[r]` of the last `fed` tokens of sequence r, or of their `path` [R, k + 1]."""
        if path is not None and kept.longest > 1:
            slots, path = self.sequences.tree_slots.expand(len(path), -1), path[:, : kept.longest]
            for layer in self.layers:
                layer.move_slots(slots.gather(1, path), slots[:, : kept.longest])
        self.sequences.keep_last(fed, kept)

    def clear_rejected(self) -> None:
        """Write zeros in the place of all that was rolled back: attention multiplies it by 0, NaN included."""
        sequences = self.sequences
        for row, (n, start) in enumerate(zip(sequences.lengths, sequences.starts)):
            for layer in self.layers:
                for buffer in (layer.keys, layer.values):
                    buffer[row, :, start // sequences.chunk + n - start :] = 0

    def drop_padding(self, mask: Tensor) -> None:
        """Roll back the tokens that plain decoding added to finished sequences; `mask` [B, columns] is 0 there."""
        sequences = self.sequences
        real = mask[:, : self.get_seq_length()].sum(1).tolist()
        surplus = [max(n - own, 0) for n, own in zip(sequences.lengths, real)]
        if any(surplus):
            sequences.crop(surplus)
            sequences.gaps = [gap + extra for gap, extra in zip(sequences.gaps, surplus)]

    def activate_past_recording(self) -> None:
        """Retain raw keys of the last forward and, up to a window, of others since `crop`: all can be rolled back."""
        self.sequences.settled, self.sequences.record_past = self.lengths, True

    def reset(self) -> None:
        super().reset()
        self.sequences.clear()

    def batch_select_indices(self, indices: Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self.sequences.select(indices.tolist())
        for layer in self.layers:
            layer.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.lengths)).repeat_interleave(repeats))


def for_states(slots: Tensor, states: Tensor) -> Tensor:
    """Return slots [R, k] as an index of states [R, H, S, d]."""
    return slots[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])  # [R, H, k, d]
