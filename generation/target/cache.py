"""Cache layers with an attention window, of which a block is fed, verified and taken back.

Such a layer needs the last W - 1 columns for its next token, and forgets what is older. A block pushes columns out that
are wanted again when its drafts are rejected; so while a block is verified the layer holds W - 1 columns and the
block's, and nothing older. Sequences that keep fewer tokens are first moved to the right, then the layer is restricted
again: the W - 1 columns that end with a sequence's own last token are still there, whatever the row kept.

    W = 4, columns held           restricted     + block of 3, kept 3 and 1      repacked         restricted
    row 0                         a b c          a b c d e f                     a b c d e f      d e f
    row 1                         r s t          r s t u - -                     . . r s t u      s t u

Chunked attention has layers of the same class.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from ...modeling.indices import cached_arange


def crop(cache: Cache, columns: int) -> None:
    """Takes the last `-columns` columns from all layers that have columns: a recurrent state has none."""
    for layer in cache.layers:
        crop_layer(layer, columns)


def crop_layer(layer: Any, columns: int) -> None:
    """`crop` of one layer; with an attention window it holds all that it held before (see `windows.release`)."""
    is_bounded = isinstance(layer, DynamicSlidingWindowLayer)
    if is_bounded or isinstance(layer, LinearAttentionAndFullAttentionLayer):
        DynamicLayer.crop(layer, columns)
    elif isinstance(layer, DynamicLayer):
        layer.crop(columns)
    if is_bounded and layer.is_initialized:
        layer.cumulative_length += columns


def drop_first(cache: Cache, columns: int) -> None:
    """Leaves the last `columns` columns, and of layers with an attention window those of them that they hold."""
    for layer, name, dim in _states_with_columns(cache):
        states = getattr(layer, name)
        width = min(columns, states.shape[dim])
        setattr(layer, name, states.narrow(dim, states.shape[dim] - width, width))
    for layer in window_layers(cache):
        layer.cumulative_length = columns


def compact(cache: Cache, columns: torch.Tensor, fed: int) -> None:
    """Leaves of the last `fed` columns of a cache `columns[b]` [B, k] in sequence b, in that order."""
    for layer, name, dim in _states_with_columns(cache):
        states = getattr(layer, name)
        start = states.shape[dim] - fed
        old, new = states.split([start, fed], dim=dim)
        setattr(layer, name, torch.cat([old, shifted(new, columns, dim)], dim=dim))
    for layer in window_layers(cache):
        layer.cumulative_length += columns.shape[1] - fed


def shift_cache(cache: Cache, shifts: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Moves the columns of sequence b by `shifts[b]` [B] to the right, in every layer; returns the mask [B, W]
    moved."""
    source = shift_source(shifts, mask.shape[1])
    for layer, name, dim in _states_with_columns(cache):
        states = getattr(layer, name)
        setattr(layer, name, shifted(states, source[:, : states.shape[dim]], dim))
    return shift_mask(mask, source)


def _states_with_columns(cache: Cache) -> list[tuple[Any, str, int]]:
    """Layers, names and the dimension of columns of all that a cache holds of single tokens."""
    names = (("keys", 2), ("values", 2), ("indexer_keys", 1))
    return [
        (layer, name, dim)
        for layer in cache.layers
        for name, dim in names
        if getattr(layer, name, None) is not None and getattr(layer, name).numel()
    ]


def shift_source(shifts: torch.Tensor, width: int) -> torch.Tensor:
    """Where every column comes from when sequence b moves by `shifts[b]` [B] to the right, [B, W]; may lie outside."""
    return cached_arange(width, shifts.device) - shifts[:, None]


def shifted(states: torch.Tensor, source: torch.Tensor, dim: int) -> torch.Tensor:
    """States whose columns stand in `dim`, taken from `source` [B, k]; what enters at an end is arbitrary."""
    index = source.to(states.device).clamp(0, states.shape[dim] - 1)
    shape = [states.shape[0]] + [1] * (states.dim() - 1)
    shape[dim] = source.shape[1]
    return states.gather(dim, index.view(shape).expand(*states.shape[:dim], -1, *states.shape[dim + 1 :]))


def shift_mask(mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A mask [B, W] taken from `source` [B, W]; what enters at the left end is no token."""
    return mask.gather(1, source.clamp(0, source.shape[1] - 1)) & (source >= 0)


def window_layers(cache: Cache) -> list[DynamicSlidingWindowLayer]:
    """The layers that forget columns, those apart that share another layer's keys and hold none."""
    return [layer for layer in cache.layers if type(layer) is DynamicSlidingWindowLayer and layer.is_initialized]


def hold(cache: Cache) -> None:
    """From now on nothing is forgotten, until `release`."""
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.activate_past_recording()


def restrict(cache: Cache, spare: int = 0) -> None:
    """Leaves the last W - 1 columns, and so many to spare."""
    for layer in window_layers(cache):
        if layer.keys is None or layer.values is None:
            continue
        first = max(layer.keys.shape[-2] - (layer.sliding_window - 1) - spare, 0)
        layer.keys, layer.values = layer.keys[..., first:, :], layer.values[..., first:, :]


def release(cache: Cache) -> None:
    """Leaves the last W - 1 columns; from now on older ones are forgotten at once, as in plain decoding."""
    restrict(cache)
    for layer in window_layers(cache):
        layer.record_past = False


def held_columns(cache: Cache) -> int | None:
    """How many of the cached columns are seen by a block, in layers with an attention window; None: there are none."""
    return next((layer.get_mask_sizes(0)[0] for layer in window_layers(cache)), None)
