"""Targets of backbones that take no dense masks, or whose cache cannot be rolled back: all sequences share one layout.

After verification every sequence's tokens are right-aligned again, and its left padding grows: distances between
columns stay distances between tokens.

    columns of the cache     before           + block of 4, new tokens 4 and 2   repacked
    sequence 0               . a b c          . a b c d e f g                    . a b c d e f g
    sequence 1               r s t u          r s t u v w - -                    . . r s t u v w

A layer with an attention window W holds its last W - 1 columns, and those of a block until it is verified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionAndFullAttentionLayer

from ...configuration.cache_names import CACHE
from ..call.sequences import NewTokens
from ..tensors.masks import cached_arange, cached_range
from .cache import STATES
from .target import DynamicCacheBackbone


class RealignedBackbone(DynamicCacheBackbone):
    """A model on transformers' caches, which are repacked; it takes chains."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts = self.mask.sum(1)
        self.moved: Tensor | None = None
        self.count = 0

    def extend(self, block: Tensor, **options: Any) -> Any:
        numbers = self.counts[:, None] + cached_range(self.count, block.shape[1], block.device)  # [B, F]
        self.count += block.shape[1]
        keep_all_columns(self.cache)
        return self.model(
            block,
            **{CACHE: self.cache},
            use_cache=True,
            attention_mask=torch.nn.functional.pad(self.mask, (0, self.count), value=True) if self.is_padded else None,
            **(self.continuation.inputs(numbers, self.last_position) | options),
        )

    def keep(self, new: NewTokens, path: Tensor | None = None) -> None:
        self.new_tokens = new
        if self.replay is not None:
            self.replay.keep(new.counts)
        crop(self.cache, new.longest - self.count)
        self.mask, self.count = torch.nn.functional.pad(self.mask, (0, new.longest), value=True), 0
        self.counts = self.counts + (new.longest if new.is_even else new.on_device.to(self.counts.device))
        if not new.is_even:
            shifts = new.longest - new.on_device.to(self.counts.device)  # [B]
            self.moved = shifts if self.moved is None else self.moved + shifts
            self.is_padded, self.mask = True, shift_cache(self.cache, shifts, self.mask)
        keep_window_columns(self.cache)

    def align(self, columns: int) -> None:
        """Drop the first columns, padding in all sequences by now: a layer with a window needs the last ones."""
        if self.moved is not None:
            surplus = self.mask.shape[1] - columns
            drop_first(self.cache, columns)
            shift_cache(self.cache, surplus - self.moved, self.mask[:, surplus:])


class LockstepBackbone(RealignedBackbone):
    """A model on a cache without rollback, such as a static one: one token at a time, also of sequences that ended."""

    supports_rollback = False

    def keep(self, new: NewTokens, path: Tensor | None = None) -> None:
        self.new_tokens, self.counts, self.count = new, self.counts + 1, 0
        self.mask = torch.nn.functional.pad(self.mask, (0, 1), value=True)
        keep_window_columns(self.cache)

    def align(self, columns: int) -> None:
        pass


def crop(cache: Cache, columns: int) -> None:
    """Remove the last `-columns` columns from all layers that have columns: a recurrent state has none."""
    for layer in cache.layers:
        is_bounded = isinstance(layer, DynamicSlidingWindowLayer)
        if is_bounded or isinstance(layer, LinearAttentionAndFullAttentionLayer):
            DynamicLayer.crop(layer, columns)
        elif isinstance(layer, DynamicLayer):
            layer.crop(columns)
        if is_bounded and layer.is_initialized:
            layer.cumulative_length += columns


def drop_first(cache: Cache, columns: int) -> None:
    """Leave the last `columns` columns, and of layers with an attention window those of them that they hold."""
    for layer, name, dim in _states_with_columns(cache):
        states = getattr(layer, name)
        width = min(columns, states.shape[dim])
        setattr(layer, name, states.narrow(dim, states.shape[dim] - width, width))
    for layer in window_layers(cache):
        layer.cumulative_length = columns


def shift_cache(cache: Cache, shifts: Tensor, mask: Tensor) -> Tensor:
    """Move the columns of sequence b by `shifts[b]` [B] to the right, in every layer, and those of the mask [B, W]."""
    source = cached_arange(mask.shape[1], shifts.device) - shifts[:, None]  # [B, W], the column that moves there
    for layer, name, dim in _states_with_columns(cache):
        states = getattr(layer, name)
        index = source[:, : states.shape[dim]].to(states.device).clamp(0, states.shape[dim] - 1)  # [B, w]
        shape = [len(states), *[1] * (dim - 1), -1, *[1] * (states.dim() - dim - 1)]
        setattr(layer, name, states.gather(dim, index.view(shape).expand(*states.shape)))
    return mask.gather(1, source.clamp(0, source.shape[1] - 1)) & (source >= 0)  # [B, W]


def _states_with_columns(cache: Cache) -> list[tuple[Any, str, int]]:
    """Return layer, name and dimension of columns of all states of single tokens in a cache."""
    found = ((layer, name, dim, getattr(layer, name, None)) for layer in cache.layers for name, dim in STATES)
    return [(layer, name, dim) for layer, name, dim, held in found if held is not None and held.numel()]


def window_layers(cache: Cache) -> list[DynamicSlidingWindowLayer]:
    """Return the layers that forget columns, without those that share another layer's keys and hold none."""
    return [layer for layer in cache.layers if type(layer) is DynamicSlidingWindowLayer and layer.is_initialized]


def keep_all_columns(cache: Cache) -> None:
    """Let no layer forget anything, until `keep_window_columns`."""
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.activate_past_recording()


def keep_window_columns(cache: Cache, more: int = 0) -> None:
    """Leave the last W - 1 columns, and some more; from now on older ones are forgotten, as in plain decoding."""
    for layer in window_layers(cache):
        if layer.keys is not None and layer.values is not None:
            first = max(layer.keys.shape[-2] - (layer.sliding_window - 1) - more, 0)
            layer.keys, layer.values = layer.keys[..., first:, :], layer.values[..., first:, :]
        layer.record_past = False
