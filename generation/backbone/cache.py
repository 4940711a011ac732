"""A cache that never moves: every sequence of a batch has its own end among the columns.

    columns    0 .. L-1          the prompt, padding included
               ends[b] ..        the next token of sequence b goes to column ends[b]
    block      ends[b] + i       the inputs of a forward; the next block overwrites rejected drafts

    columns of the cache     before           + block of 4, new tokens 4 and 2   the next block begins at
    sequence 0               . a b c          . a b c d e f g                    8
    sequence 1               r s t u          r s t u v w x y                    6: x and y are seen by nobody

A forward writes its own columns, and attention (`grouped_attention`) gets a view of the first ones; a mask, made on the
device, defines what each position sees. A rollback adds to `ends`, and moves nothing; of a tree, the columns of the
accepted path are put in a row first. A layer with an attention window is a ring: column c is in slot c % size, and
there is room for the window and a block, so that nothing is overwritten that is still visible.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..call.sequences import NewTokens
from ..contract import CacheView, DraftTree
from ..tensors.masks import PACKED, blocks_of, cached_arange, cached_range, model_mask

_STEP, _ALIGNED, _ROOM = 64, 16, 4096
"""Widths that are allocated, and that attention reads, are multiples; a cache begins with room for so many tokens."""
STATES = ("keys", 2), ("values", 2), ("indexer_keys", 1)  # by token, and their dimension of columns; the last is rare
_WITHOUT_COLUMNS = {"linear_attention", "conv", "moe", "mlp"}  # kinds of layers whose tokens are real, all of them
_NEAR = "sliding", "chunked", "compressed"  # parts of the names of kinds whose masks are local
_MASKS_OF = {
    "hybrid": ("full_attention", "linear_attention"),
    "hybrid_sliding": ("sliding_attention", "linear_attention"),
}
"""The masks that layers with states beside attention read."""
Slots = tuple[Tensor, Tensor] | tuple[slice, slice]
KeysAndValues = tuple[Tensor, Tensor]


class Place(NamedTuple):
    """Where the layers of one kind put a block; they share it."""

    size: int  # columns that they allocate
    stored: int  # tokens of the block that they store: a ring keeps the end of a first block that is longer
    slots: Slots  # of these tokens
    width: int  # columns that attention gets


class CacheLayout:
    """The ends of the sequences of a batch, [B] int64, which all layers of a cache share; `lengths` are on the host.

    Args:
        mask: [B, L] bool, the real tokens among the columns of the prompt.
        is_padded: Whether any of them is padding.
        limit: The longest sequence, prompt included.
        span: The most columns that are read before and after `ends` until the next rollback, as far as it is known.
        counts: [B] int64, real tokens before `ends`; None: those of the prompt.
    """

    def __init__(self, mask: Tensor, is_padded: bool, limit: int, span: int, counts: Tensor | None = None) -> None:
        batch, self.prompt = mask.shape
        self.mask = mask if is_padded and self.prompt else None
        if counts is None and self.mask is not None:
            counts = self.mask.sum(1)  # [B]
        self.padding = None if counts is None else self.prompt - counts  # [B]
        self.lengths, self.ends = [self.prompt] * batch, torch.full((batch,), self.prompt, device=mask.device)
        self.is_even = True
        self.capacity = rounded(max(min(limit, self.prompt + _ROOM), self.prompt) + span)
        self.span, self.window, self.written = span, 0, self.prompt
        self.block_offset = 0  # where the next block begins, relative to `ends`; negative: columns are read again
        self.is_maskless = False  # attention gets no mask, and the columns up to the block's end
        self.kinds: set[str] | None = None  # of masks that layers read, as far as one was made
        self._slots: dict[tuple[int, int, int, torch.device], Slots] = {}
        self._places: dict[tuple[int, int, bool, bool, torch.device], Place] = {}

    @property
    def counts(self) -> Tensor:
        """Real tokens of every sequence, [B] int64."""
        return self.ends if self.padding is None else self.ends - self.padding

    def needs_mask(self, count: int) -> bool:
        """Return whether a chain needs a mask: where the model would make one itself, ours repeats no keys."""
        begins = max(self.lengths) + self.block_offset
        return self.mask is not None or self.window > 0 or not self.is_even or (count > 1 and begins > 0)

    def install_layers(self, cache: Cache, kind: type[RaggedLayer] | None = None) -> None:
        """Replace the layers of a cache, one after the other, by layers with the same content that never move."""
        kind = kind or RaggedLayer
        near = [vars(layer) for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
        self.window = max((max(held["sliding_window"], held.get("compress_rate", 0)) for held in near), default=0)
        for index, layer in enumerate(cache.layers):
            if isinstance(layer, DynamicLayer):
                cache.layers[index] = kind(self, layer)
        if (new := cache.layer_class_to_replicate) is not None:  # layers are made when they are first written to
            cache.layer_class_to_replicate = cast(Any, lambda: kind(self, cast(DynamicLayer, new())))

    def select(self, cache: Cache, chosen: list[int]) -> None:
        """Continue with some of the sequences alone; the cache is copied."""
        index = torch.tensor(chosen, device=self.ends.device)  # [b]
        self.ends, self.lengths = self.ends[index], [self.lengths[each] for each in chosen]
        self.mask = None if self.mask is None else self.mask[index]
        self.padding = None if self.padding is None else self.padding[index]
        self.is_even, self._slots, self._places = len(set(self.lengths)) == 1, {}, {}
        for layer in (each for each in cache.layers if isinstance(each, RaggedLayer)):
            for name, _ in layer.states:
                if (held := getattr(layer, name)) is not None:
                    setattr(layer, name, held[index.to(held.device)])  # of every state sequences are dimension 0

    def keep(self, new: NewTokens) -> None:
        """Leave the first `new.counts[b]` columns of those read after the end of sequence b."""
        self.ends = self.ends + (new.longest if new.is_even else new.on_device.to(self.ends.device))
        self.lengths = [length + count for length, count in zip(self.lengths, new.counts)]
        self.is_even = len(set(self.lengths)) == 1
        self.block_offset, self._slots, self._places = 0, {}, {}

    def keep_path(self, cache: Cache, path: Tensor) -> None:
        """Put the columns `path` [B, k] of the last block in a row, from `ends` on."""
        first = self.ends[:, None]  # [B, 1]
        for layer in cache.layers:
            if isinstance(layer, RaggedLayer):
                layer.compact_accepted_path(first + path, first + cached_arange(path.shape[1], path.device))

    def size(self, is_ring: bool) -> int:
        """Return how many columns layers allocate."""
        return min(self.capacity, rounded(self.window + self.span)) if is_ring else self.capacity

    def width(self, count: int, size: int) -> int:
        """Return how many columns attention gets in a forward of `count` tokens."""
        end = max(self.lengths) + self.block_offset + count
        return end if self.is_maskless else min(size, -(-end // _ALIGNED) * _ALIGNED)

    def slots(self, first: int, count: int, size: int, device: torch.device) -> Slots:
        """Return the slots of columns from `first` after the ends on: an index of sequences and columns, or slices."""
        key = (first, count, size, device)
        if key not in self._slots:
            start = max(self.lengths) + first
            wraps = start + count > size or min(self.lengths) + first < 0
            if self.is_even and not wraps:
                self._slots[key] = slice(None), slice(start, start + count)
            else:
                columns = self.ends[:, None] + cached_range(first, count, self.ends.device)  # [B, count]
                columns = columns % size if wraps else columns
                self._slots[key] = cached_arange(len(columns), device)[:, None], columns.to(device)
        return self._slots[key]

    def place(self, count: int, is_ring: bool, device: torch.device) -> Place:
        """Return where layers on a device, with a window (`is_ring`) or without one, put a block of `count` tokens."""
        key = (self.block_offset, count, is_ring, self.is_maskless, device)
        if (known := self._places.get(key)) is None:
            self.reserve(count)
            size = self.size(is_ring)
            stored = min(count, size)
            slots = self.slots(self.block_offset + count - stored, stored, size, device)
            self._places[key] = known = Place(size, stored, slots, self.width(count, size))
        return known

    def next_rows(
        self, count: int, windows: Mapping[str, int | None], seen: Tensor | None = None, depths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor | None]]:
        """Return the positions [B, F] of a drafter's next rows, and masks [B, 1, F, W] or None by kind of its layers.

        Rows see what is before them in their `windows`; of a tree of rows at `depths` [1, N] those that `seen` says.
        """
        self.is_maskless = seen is None and not self.needs_mask(count)
        masks: dict[str, Tensor | None] = dict.fromkeys(windows)
        for kind, window in () if self.is_maskless else windows.items():
            masks[kind] = self.visible(count, window, new=seen, depths=depths if window else None)[:, None]
        return self.positions(count) if depths is None else self.counts[:, None] + depths[:, -count:], masks

    def positions(self, count: int) -> Tensor:
        """Return the positions of the next `count` tokens, [B, F] int64: the real tokens before each."""
        offset = self.block_offset if count == 1 else cached_range(self.block_offset, count, self.ends.device)
        return (self.counts[:, None] + offset).clamp_(min=0)

    def block_columns(self, count: int) -> Tensor:
        """Return the columns of the next block, [B, F] int64."""
        return self.ends[:, None] + cached_range(self.block_offset, count, self.ends.device)

    def real_tokens(self, count: int) -> Tensor:
        """Return which positions of the next block are tokens, [B, F] bool."""
        columns = self.block_columns(count)
        if self.mask is None:
            return columns >= 0
        inside = self.mask.gather(1, columns.clamp(0, self.prompt - 1)) & (columns >= 0)  # [B, F]
        return inside | (columns >= self.prompt)

    def has_wrapped(self, size: int) -> bool:
        """Return whether some of the columns so far share a slot among `size`."""
        return self.written > size

    def columns(self, count: int, size: int) -> Tensor:
        """Return the columns that a block of `count` reads, by slot, [1 or B, W] int64; negative where none is yet."""
        if count > size:  # of a block that is longer than a ring, attention gets the block
            return self.block_columns(count)
        slots = cached_arange(self.width(count, size), self.ends.device)[None]  # [1, W]
        if not self.has_wrapped(size):
            return slots
        last = self.ends[:, None] + (self.block_offset + count - 1)  # [B, 1]
        return last - (last - slots) % size  # [B, W], the newest column up to `last` in the slot

    def visible(
        self,
        count: int,
        window: int | None = None,
        chunk: int | None = None,
        new: Tensor | None = None,
        depths: Tensor | None = None,
    ) -> Tensor:
        """Return which columns the F = `count` positions of the next block see, [B, F, W] bool.

        Args:
            count: F.
            window: How far back a position sees, itself included; None: as far as there are columns.
            chunk: The size of chunks, in place of a window; a position sees the columns of its own chunk.
            new: [1 or B, F, N] bool, which of the last N columns, up to its end, the block sees; None: a chain.
            depths: [1 or B, N] int64, their positions relative to `ends`; read with `new`, and a window or chunks.
        """
        self.is_maskless = False
        self.reserve(count)
        size = self.size(bool(window or chunk) and self.window > 0)
        block = cached_range(self.block_offset, count, self.ends.device)  # [F], columns relative to `ends`
        columns = self.columns(count, size)
        away = columns - self.ends[:, None]  # [B, W], relative to `ends`
        if new is None:
            seen, depth, own = away[:, None] <= block[:, None], away, block[None]  # [B, F, W], [B, W], [1, F]
        else:
            node = away - (self.block_offset + count - new.shape[-1])  # [B, W], number among the last N columns
            among = node.clamp(0, new.shape[-1] - 1)  # [B, W], for gather: numbers outside are masked below
            seen = new.expand(len(node), -1, -1).gather(2, among[:, None].expand(-1, count, -1))  # [B, F, W]
            seen = (seen & (node < new.shape[-1])[:, None]) | (node < 0)[:, None]  # all before the N
            if depths is not None:
                own = depths[:, -count:]  # [1 or B, F]
                depth = torch.where(node < 0, away, depths.expand(len(node), -1).gather(1, among))  # [B, W]
        if self.mask is not None:
            inside = columns.clamp(0, self.mask.shape[1] - 1).expand(len(away), -1)  # [B, W], as columns of the mask
            seen = seen & ((columns >= self.mask.shape[1]) | self.mask.gather(1, inside))[:, None]  # without padding
        if self.has_wrapped(size):
            seen = seen & (columns >= 0)[:, None]  # without slots that hold nothing yet
        if chunk:
            first = self.ends if self.mask is None else self.ends - (self.mask.cumsum(1) == 0).sum(1)
            seen = seen & ((first[:, None] + own) // chunk)[..., None].eq(((first[:, None] + depth) // chunk)[:, None])
        elif window:
            seen = seen & (own[..., None] - depth[:, None] < window)  # [B, F, W]
        if self.block_offset < 0 and self.mask is not None:  # padding sees itself, so that softmax gives numbers
            seen = seen | (away[:, None] == block[:, None])
        if min(self.lengths) + self.block_offset < 0:
            seen = seen | (self.ends[:, None] + block < 0)[..., None]  # nor have rows before column 0 an empty softmax
        return seen

    def begin(self, count: int) -> None:
        """Note the slots of the next block, where sizes are fixed."""

    def reserve(self, count: int) -> None:
        """Allocate columns for a block; layers grow when they are next written to."""
        end, span = max(self.lengths) + self.block_offset + count, max(self.span, self.block_offset + count)
        if end > self.capacity or span > self.span:
            self._places = {}  # sizes change
        if end > self.capacity:
            self.capacity = rounded(max(end, self.capacity + self.capacity // 2))
        self.span, self.written = span, max(self.written, end)


def block_mask(
    layout: CacheLayout,
    count: int,
    config: PreTrainedConfig,
    dtype: torch.dtype | None = None,
    tree: DraftTree | None = None,
) -> Any:
    """Return the mask [B, 1, F, W] of a block of F tokens (see `model_mask`), by kind of layer where there are several.

    Positions see all real columns, their ancestors in a tree (None: a chain) and themselves. None: no mask is needed.
    Without a dtype, masks are for layers outside a model, which choose theirs from a dict.
    """
    auxiliary = None if tree is None else tree.auxiliary
    new = None if tree is None or tree.is_chain else tree.mask()  # [B, F, F]
    new = new if auxiliary is None else auxiliary.mask[None]
    layout.is_maskless = new is None and not layout.needs_mask(count)
    if layout.is_maskless:
        return None
    if layout.kinds is None:
        read = getattr(config, "layer_types", None) or ()
        layout.kinds = {kind for each in read for kind in _MASKS_OF.get(each, (each,))}
    kinds = layout.kinds
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    chunk = config.attention_chunk_size if "chunked_attention" in kinds else None
    near = {kind for kind in kinds or {"sliding_attention"} if any(name in kind for name in _NEAR)}
    near = near if chunk or window else set()
    masks: dict[str, Tensor | None] = dict.fromkeys(kinds & _WITHOUT_COLUMNS)
    if dtype is None or not near or kinds - near:
        full = model_mask(layout.visible(count, new=new), config, dtype)
        masks |= dict.fromkeys({"full_attention", *kinds} - near - _WITHOUT_COLUMNS, full)
    if near:
        depths = None if new is None or tree is None else tree.positions()
        seen = layout.visible(count, None if chunk else window, chunk, new, depths)
        masks |= dict.fromkeys(near, model_mask(seen, config, dtype))
    if dtype is None or (near and len(masks) > 1):
        return masks
    return next(mask for mask in masks.values() if mask is not None)


class RaggedLayer(CacheLayerMixin):
    """Keys and values [B, H, C, D] of a layer, and keys [B, C, D] of an indexer where it has one, taken from `origin`.

    `states` are all that it holds by sequence; `own` those that return to its origin as they are.
    """

    def __init__(self, layout: CacheLayout, origin: DynamicLayer) -> None:
        super().__init__()
        self.layout, self.origin = layout, origin
        self.is_sliding = isinstance(origin, DynamicSlidingWindowLayer)
        self.indexer_keys: Tensor | None = None
        self.own = self.states = STATES if isinstance(origin, DynamicIndexedLayer) else STATES[:2]
        size = layout.size(self.is_sliding)
        for name, dim in self.own:
            states = getattr(origin, name, None)
            if states is not None and states.numel():
                setattr(self, name, laid_out(states, layout.prompt - states.shape[dim], dim, size))
                setattr(origin, name, None)

    def _written(self, name: str, dim: int, states: Tensor, place: Place | None = None) -> Tensor:
        """Write the block's states to their columns, and return a view of the columns that attention gets."""
        count, held = states.shape[dim], getattr(self, name)
        size, stored, slots, width = place or self.layout.place(count, self.is_sliding, states.device)
        if held is None or held.shape[dim] < size or held.dtype != states.dtype:
            held = self._laid_out(held, dim, size, states)
            setattr(self, name, held)
        new = states if stored == count else states.narrow(dim, count - stored, stored)
        if isinstance(slots[1], slice):
            held.narrow(dim, slots[1].start, stored).copy_(new)
        else:
            held.movedim(dim, 1)[slots] = new.to(held.dtype).movedim(dim, 1)  # [B, C, ...] at [B, count]
        return states if stored < count else held.narrow(dim, 0, width)

    def _laid_out(self, held: Tensor | None, dim: int, size: int, states: Tensor) -> Tensor:
        """Return what a layer holds in at least `size` slots."""
        if held is None:
            return laid_out(states.narrow(dim, 0, 0), 0, dim, size)
        held = self._grown(held, dim, size) if held.shape[dim] < size else held
        # under autocast, blocks may have another dtype than the prompt: the wider one, as `cat` would
        return held.to(torch.promote_types(held.dtype, states.dtype))

    def _grown(self, held: Tensor, dim: int, size: int) -> Tensor:
        """Return a layer's columns in more slots; a ring's move to others."""
        layout, old = self.layout, held.shape[dim]
        if not self.is_sliding:
            return laid_out(held, 0, dim, size)
        last = layout.ends[:, None] + (max(layout.block_offset, 0) - 1)  # [B, 1]
        slots = cached_arange(old, layout.ends.device)  # [C]
        columns = last - (last - slots) % old  # [B, C], what each slot holds
        columns = torch.where(columns < 0, slots, columns).to(held.device)  # its own number where it holds nothing
        grown = laid_out(held.narrow(dim, 0, 0), 0, dim, size)
        sequence = cached_arange(len(columns), held.device)[:, None]  # [B, 1]
        grown.movedim(dim, 1)[sequence, columns % size] = held.movedim(dim, 1)  # [B, C, ...]
        return grown

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> KeysAndValues:
        """Write a block [B, H, F, D], and return views of the columns that attention gets."""
        place = self.layout.place(key_states.shape[2], self.is_sliding, key_states.device)
        return self._written("keys", 2, key_states, place), self._written("values", 2, value_states, place)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write the indexer's keys of a block [B, F, D], and return a view of the columns that attention gets."""
        return self._written("indexer_keys", 1, indexer_key_states)

    def compact_accepted_path(self, source: Tensor, target: Tensor) -> None:
        """Copy the columns `source` [B, k] to `target` [B, k]."""
        for name, dim in self.states:
            if (held := getattr(self, name)) is not None:
                columns, size = held.movedim(dim, 1), held.shape[dim]  # [B, C, ...]
                sequence = cached_arange(len(source), held.device)[:, None]  # [B, 1]
                columns[sequence, target.to(held.device) % size] = columns[sequence, source.to(held.device) % size]

    def clear_after_ends(self) -> None:
        """Write zeros to all columns after the ends: attention weighs what nobody sees by 0, and 0 times NaN is NaN."""
        ends = self.layout.ends[:, None]  # [B, 1]
        for name, dim in self.own:
            if (held := getattr(self, name)) is not None:
                columns, size = held.movedim(dim, 1), held.shape[dim]  # [B, C, ...]
                slots = cached_range(0, size, ends.device)
                wraps = self.layout.has_wrapped(size)
                after = (slots - ends) % size < self.layout.span if wraps else slots >= ends  # [B, C]
                columns.masked_fill_(after.to(held.device).view(*after.shape, *[1] * (columns.dim() - 2)), 0)

    def restore(self, columns: int) -> DynamicLayer:
        """Return the layer of transformers with the first columns, and of a ring those of its window."""
        layer = self.origin
        first = max(columns - layer.sliding_window + 1, 0) if isinstance(layer, DynamicSlidingWindowLayer) else 0
        for name, dim in self.own:
            if (held := getattr(self, name)) is not None:
                slots = cached_range(first, columns - first, held.device) % held.shape[dim]  # in the order of columns
                setattr(layer, name, held.index_select(dim, slots))
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length, layer.record_past = columns, False
        return layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def get_seq_length(self) -> int:
        """Return the columns before the next block of the longest sequence."""
        return max(self.layout.lengths) + self.layout.block_offset

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns attention gets, and the first; read where no mask is given."""
        return self.layout.width(query_length, self.layout.size(self.is_sliding)), 0

    def get_max_length(self) -> int:
        return -1  # it grows

    def verified(self, window: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values [B, H, W, D] of the last `window` (None: all) verified tokens, and a mask [B, W]."""
        layout, width = self.layout, max(self.layout.lengths)
        seen = None
        if layout.needs_mask(1) or window is not None:
            layout.block_offset = -1  # what the last token sees
            seen, width = layout.visible(1, window)[:, 0], layout.width(1, layout.size(self.is_sliding))  # [B, W]
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        return keys[:, :, :width], values[:, :, :width], seen


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what transformers' "sdpa" does, without a copy of keys and values for a `model_mask`."""
    is_usual = kwargs.get("position_bias") is None
    if (packed := getattr(attention_mask, PACKED, None) if is_usual else None) is None:
        if attention_mask is None or not is_usual or (blocks := blocks_of(attention_mask)) is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        parts = []
        for start, stop, mask in blocks:
            q, k, v = (each[:, :, start:stop] for each in (query, key, value))
            parts.append(sdpa_attention_forward(module, q, k, v, mask, dropout, scaling, **kwargs)[0])
        return torch.cat(parts, 1), None  # [1, R, H, d] each
    assert attention_mask is not None
    groups, (batch, heads, queries, _) = query.shape[1] // key.shape[1], query.shape
    if (mask := packed.get((groups, query.dtype))) is None:  # additive, [B, 1, F or groups * F, W]
        added = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(~attention_mask, -torch.inf)
        packed[groups, query.dtype] = mask = added if queries == 1 else added.repeat(1, 1, groups, 1)
    if groups == 1:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
    beside = query.reshape(batch, heads // groups, groups * queries, -1)  # [B, H / groups, groups * F, d]
    output = scaled_dot_product_attention(beside, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None  # [B, F, H, d]


AttentionInterface.register("sdpa", grouped_attention)


def rounded(width: int) -> int:
    """Return a width as it is allocated: few different ones, so that shapes repeat."""
    return -(-width // _STEP) * _STEP


def laid_out(states: Tensor, first: int, dim: int, size: int) -> Tensor:
    """Return a tensor of `size` slots, which holds columns from `first` on: column c in slot c % size."""
    count = states.shape[dim]
    slots = states.new_zeros(*states.shape[:dim], size, *states.shape[dim + 1 :])  # [..., size, ...]
    if first + count <= size:
        slots.narrow(dim, first, count).copy_(states)
    else:
        slots.index_copy_(dim, cached_range(first, count, states.device) % size, states)
    return slots


def drafter_layout(view: CacheView, size: int, limit: int, span: int, name: str) -> CacheLayout:
    """Return the layout of a drafter's cache, which begins with the last `size` columns of the prompt.

    It is of a fixed size where the backbone's is, and `name` begins the names of what the view then holds.
    """
    fixed = view.fixed_layout(size, limit, span, name)
    mask = view.mask[:, view.mask.shape[1] - size :]
    return CacheLayout(mask, view.is_padded, limit, span, view.counts) if fixed is None else fixed


def of_accepted(state: Tensor, new: Tensor) -> Tensor:
    """Return hidden states [B, F, D] of a block with zeros after the first `new` [B]: no rejected draft leaves NaN."""
    is_other = cached_arange(state.shape[1], state.device) >= new.to(state.device)[:, None]  # [B, F]
    return state.masked_fill(is_other[..., None], 0)
