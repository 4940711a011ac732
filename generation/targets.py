"""The backbone as the decoding loop sees it: a forward behind every row's own prefix, and a rollback per row.

Two kinds of caches: one that knows every row's length itself, and transformers' own, whose columns all rows share. In
the latter, rows that keep different numbers of tokens are repacked after verification: every row's tokens are
right-aligned again, and its left padding grows. No hole is left between tokens, so that distances between columns
stay distances between tokens (a sliding window relies on it). Knows neither drafts nor laws.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from .replay import Replay, is_recurrent


class Target(Protocol):
    """What the loop needs of a model with a filled cache."""

    def forward(self, block: torch.Tensor, **options: Any) -> Any:
        """One backbone call on block [B, k] behind every row's prefix."""

    def roll_back(self, kept: list[int], fed: int) -> None:
        """Leaves the first `kept[b]` of the last `fed` tokens in row b."""

    def align(self, columns: int) -> None:
        """Ends the call: lays the cache out as the first `columns` columns of the sequences that are returned."""


class RowLengthTarget:
    """A model whose cache has a length per row: `crop` takes a [B] tensor, and no mask is needed.

    Args:
        model: The backbone.
        cache: Its cache.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache) -> None:
        self.model, self.cache = model, cache

    def forward(self, block: torch.Tensor, **options: Any) -> Any:
        """See `Target`."""
        return self.model(block, past_key_values=self.cache, use_cache=True, return_dict=True, **options)

    def roll_back(self, kept: list[int], fed: int) -> None:
        """See `Target`."""
        self.cache.crop(kept[0] - fed if len(set(kept)) == 1 else torch.tensor(kept) - fed)

    def align(self, columns: int) -> None:
        """Nothing to do: every row starts where it ends."""


class RepackedTarget:
    """A model on transformers' caches.

    Args:
        model: The backbone.
        cache: Its cache, with the prompt in it.
        batch: B.
        mask: [B, columns of the cache], 0 for padding; None where there is none.

    Attributes:
        mask: [B, W] bool, the real tokens among the columns of the cache as it is laid out now.
        is_padded: Whether any column is no real token.
        shifts: Columns by which the last `roll_back` moved each row to the right, [B]; all 0 where it moved none.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, batch: int, mask: torch.Tensor | None = None) -> None:
        self.model, self.cache = model, cache
        width = cache.get_seq_length()
        # `model.device` would be that of weights, which may be offloaded
        device = next(layer.keys.device for layer in cache.layers if getattr(layer, "keys", None) is not None)
        given = torch.ones(batch, width, device=device) if mask is None else mask[:, :width]
        self.mask = given.bool()
        self.counts = self.mask.sum(1)
        self.is_padded = not bool(self.mask.all())
        self.shifts = [0] * batch
        self.moved = [0] * batch
        self.replay = Replay(model.get_decoder(), cache) if is_recurrent(cache) else None

    def forward(self, block: torch.Tensor, **options: Any) -> Any:
        """See `Target`; positions count real tokens."""
        fed = block.shape[1]
        positions = self.counts[:, None] + torch.arange(fed, device=block.device)
        mask = torch.nn.functional.pad(self.mask, (0, fed), value=True) if self.is_padded else None
        inputs = {"attention_mask": mask, "position_ids": positions} | options
        with nullcontext() if self.replay is None else self.replay.record():
            return self.model(block, past_key_values=self.cache, use_cache=True, return_dict=True, **inputs)

    def roll_back(self, kept: list[int], fed: int) -> None:
        """See `Target`."""
        if self.replay is not None:
            self.replay.keep(kept)
        longest = max(kept)
        self.shifts = [longest - count for count in kept]
        crop(self.cache, longest - fed)
        self.mask = torch.nn.functional.pad(self.mask, (0, longest), value=True)
        self.counts = self.counts + torch.tensor(kept, device=self.counts.device)
        if any(self.shifts):
            self.moved = [old + new for old, new in zip(self.moved, self.shifts)]
            self.is_padded = True
            repack(self.cache, self.shifts)
            self.mask = shift_right(self.mask, self.shifts)

    def select(self, columns: torch.Tensor, fed: int) -> None:
        """Leaves of the last `fed` columns of the cache `columns[b]` [B, k] in row b, in that order."""
        kept = columns.shape[1]
        for layer in self.cache.layers:
            for states in (layer.keys, layer.values):
                chosen = columns[:, None, :, None].to(states.device).expand(-1, states.shape[1], -1, states.shape[3])
                states[:, :, -fed : states.shape[2] - fed + kept] = states[:, :, -fed:].gather(2, chosen)
        if fed > kept:
            crop(self.cache, kept - fed)

    def align(self, columns: int) -> None:
        """See `Target`; columns behind a row's end hold arbitrary values, as padding does."""
        if any(self.moved):
            repack(self.cache, [-moved for moved in self.moved])
            crop(self.cache, min(0, columns - self.mask.shape[1]))


def crop(cache: Cache, columns: int) -> None:
    """Takes the last `-columns` columns from all layers that have columns: a recurrent state has none."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionAndFullAttentionLayer):
            DynamicLayer.crop(layer, columns)
        elif isinstance(layer, DynamicLayer):
            layer.crop(columns)


def repack(cache: Cache, shifts: list[int]) -> None:
    """Moves the columns of row b by `shifts[b]` to the right, in every layer; what enters at an end is arbitrary."""
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or not layer.is_initialized or not layer.get_seq_length():
            continue
        layer.keys, layer.values = (
            shift_right(states.transpose(1, 2), shifts).transpose(1, 2) for states in (layer.keys, layer.values)
        )
        if getattr(layer, "indexer_keys", None) is not None:
            layer.indexer_keys = shift_right(layer.indexer_keys, shifts)


def shift_right(columns: torch.Tensor, shifts: list[int]) -> torch.Tensor:
    """Columns [B, W, ...] moved by `shifts[b]` to the right (left where negative); masks get False at the left end."""
    moved = torch.tensor(shifts, device=columns.device)[:, None]
    source = torch.arange(columns.shape[1], device=columns.device) - moved
    rows = torch.arange(columns.shape[0], device=columns.device)[:, None]
    result = columns[rows, source.clamp(0, columns.shape[1] - 1)]
    return result & (source >= 0) if columns.dtype == torch.bool else result


_FULL = (DynamicLayer, DynamicIndexedLayer, DummyLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def is_repackable(cache: Cache | None) -> bool:
    """Whether rows of this cache may keep different numbers of tokens: all its layers hold the whole history."""
    return cache is None or all(type(layer) in _FULL for layer in cache.layers)
