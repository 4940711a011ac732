"""A cache that never moves, for layers that also have short convolutions, and whose attention reads columns (Inkling).

A convolution reads the last k - 1 inputs before a token's own, which are kept in a small ring: that of column c in slot
c % size. Attention adds what it learned of distances, and may scale scores by the number of columns. Both come from
columns that all sequences share; where these differ, hooks put those of each in their place (`own_columns`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from ...configuration.fields import has_short_convolutions
from ..contract import DraftTree
from ..tensors.masks import cached_arange, cached_range
from ..tensors.wrapped_models import Kwargs
from .cache import CacheLayout, RaggedLayer, Slots, rounded
from .indexed import real_tokens
from .target import RaggedBackbone, layer_class


@LinearAttentionCacheLayerMixin.register
class ConvolvedLayer(RaggedLayer):
    """A `RaggedLayer` with rings of inputs [B, d, C], `inputs_0` ..; without a previous state, it gets every block."""

    record_past, kernel = True, 1

    def __init__(self, layout: CacheLayout, origin: DynamicLayer) -> None:
        super().__init__(layout, origin)
        given = vars(origin)
        self.rings = [f"inputs_{index}" for index in given["conv_states"]]
        self.states = (*self.states, *((name, 2) for name in self.rings))
        self.has_previous_state = dict.fromkeys(given["conv_states"], False)
        for (index, held), name in zip(given["conv_states"].items(), self.rings):
            setattr(self, name, None)
            if held is not None and given["has_previous_state"][index]:
                self.kernel = given["conv_kernel_size"][index]
                ring, kept = self._ring(name, held), min(self.kernel, layout.prompt, held.shape[2])
                _put(ring, layout.slots(-kept, kept, ring.shape[2], held.device), held[..., -kept:])
                given["conv_states"][index] = None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 1, **kwargs: object
    ) -> Tensor:
        """Write a block's inputs [B, d, F], and return them behind the k - 1 inputs before them."""
        layout, name, count = self.layout, self.rings[state_idx], conv_states.shape[2]
        self.kernel = conv_kernel_size
        layout.reserve(count)
        if layout.block_offset < 0 and (layout.mask is not None or min(layout.lengths) + layout.block_offset < 0):
            conv_states = conv_states * real_tokens(layout, count)[:, None].to(conv_states.device)  # [B, d, F]
        ring, device, before = self._ring(name, conv_states), conv_states.device, conv_kernel_size - 1
        size = ring.shape[2]
        earlier = _at(ring, layout.slots(layout.block_offset - before, before, size, device))  # [B, d, k - 1]
        whole, kept = torch.cat([earlier, conv_states], dim=2), min(count, size)  # [B, d, k - 1 + F]
        newest = layout.slots(layout.block_offset + count - kept, kept, size, device)
        _put(ring, newest, conv_states[..., count - kept :])
        return whole

    def _ring(self, name: str, like: Tensor) -> Tensor:
        """Return a ring, with room for what blocks may read and write until the next rollback, [B, d, C]."""
        layout, size = self.layout, rounded(self.kernel + self.layout.span)
        ring: Tensor | None = getattr(self, name)
        if ring is not None and ring.shape[2] >= size:
            return ring
        room = like.new_zeros(*like.shape[:2], size)  # [B, d, size]
        if ring is not None:  # blocks have become longer
            old = ring.shape[2]
            first = max(layout.block_offset, 0) - old
            held = _at(ring, layout.slots(first, old, old, ring.device))
            _put(room, layout.slots(first, old, size, ring.device), held)
        setattr(self, name, room)
        return room

    def get_seq_length(self) -> int:
        """Return where a block's positions begin; before all that scores are scaled by, where sequences differ."""
        return super().get_seq_length() if self.layout.is_even else -self.layout.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, Any]:
        """Return how many columns attention gets, and what is to be added to 0, 1, ... for their numbers."""
        columns = self.columns(query_length)  # [1 or B, W]
        if self.layout.is_maskless or len(columns) > 1:  # they are 0, 1, ..., or each sequence has its own
            return columns.shape[1], 0
        return columns.shape[1], columns[0] - cached_arange(columns.shape[1], columns.device)

    def columns(self, count: int) -> Tensor:
        """Return the columns that attention gets in a forward of F tokens, [1 or B, W]."""
        layout = self.layout
        layout.reserve(count)
        size = layout.size(self.is_sliding)
        if count > size:  # attention gets the block
            columns = layout.ends[:, None] + cached_range(layout.block_offset, count, layout.ends.device)  # [B, F]
        else:
            columns = layout.columns(layout.width(count, size), size, count)  # [1 or B, W]
        return columns[:1] if layout.is_even else columns

    def restore(self, columns: int) -> DynamicLayer:
        layer = super().restore(columns)
        given = vars(layer)
        for index, name in enumerate(self.rings):
            if (ring := getattr(self, name)) is not None:
                kept = cached_range(columns - self.kernel, self.kernel, ring.device)  # [k], the last columns
                given["conv_states"][index] = ring.index_select(2, kept % ring.shape[2])
        given["record_past"] = False
        return layer


def _at(ring: Tensor, slots: Slots) -> Tensor:
    """Return the inputs [B, d, n] in some slots."""
    return ring.movedim(2, 1)[slots].movedim(1, 2)  # [B, C, d] in between


def _put(ring: Tensor, slots: Slots, inputs: Tensor) -> None:
    ring.movedim(2, 1)[slots] = inputs.movedim(2, 1).to(ring.dtype)


def module_layers(config: PreTrainedConfig) -> type[RaggedLayer] | None:
    """Return the class of layers that modules of a model read; None: any."""
    return ConvolvedLayer if has_short_convolutions(config) else layer_class(config)


class ConvolvedBackbone(RaggedBackbone):
    """A model on a cache of `ConvolvedLayer`."""

    takes_trees = False
    layer_type = ConvolvedLayer

    def __init__(self, *args: Any, limit: int, span: int) -> None:
        super().__init__(*args, limit=limit, span=span)
        self.replay = None  # convolutions remember their inputs, and no states

    def _call(self, block: Tensor, positions: Tensor, tree: DraftTree | None, last: int | None, options: Kwargs) -> Any:
        with own_columns(self.model.get_decoder(), self.cache):
            return super()._call(block, positions, tree, last, options)


@contextmanager
def own_columns(part: nn.Module, cache: Cache) -> Iterator[None]:
    """Let attention in a part of a model take distances from the columns of each sequence of a `ConvolvedLayer`."""
    hooks = []
    if any(isinstance(layer, ConvolvedLayer) and not layer.layout.is_even for layer in cache.layers):
        distances: dict[tuple[bool, int], Tensor] = {}
        for attention in (module for module in part.modules() if "rel_logits_proj" in dict(module.named_children())):
            hooks += _hooks(attention, cache, distances)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hooks(attention: Any, cache: Cache, distances: dict[tuple[bool, int], Tensor]) -> list[Any]:
    """Return hooks of one attention, which change calls of this thread; equal layers share the distances."""
    layer, own, config = cast(ConvolvedLayer, cache.layers[attention.layer_idx]), get_ident(), attention.config
    is_scaled = not attention.is_sliding and config.log_scaling_n_floor is not None

    def columns(count: int) -> Tensor:
        return layer.layout.ends[:, None] + cached_range(layer.layout.block_offset, count, layer.layout.ends.device)

    def scaled(states: Tensor, token_dim: int) -> Tensor:
        if not is_scaled:
            return states
        counts = (columns(states.shape[token_dim]) + 1).to(states.device).float()  # [B, F]
        factor = 1 + config.log_scaling_alpha * (counts / config.log_scaling_n_floor).clamp(min=1).log()  # [B, F]
        shape = [len(factor), *(-1 if dim == token_dim else 1 for dim in range(1, states.dim()))]
        return (states.float() * factor.view(shape)).to(states.dtype)

    def queries(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return scaled(output, 1) if get_ident() == own else output

    def bias(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if get_ident() != own:
            return output
        count = output.shape[2]
        if (key := (layer.is_sliding, count)) not in distances:
            distances[key] = columns(count)[..., None] - layer.columns(count)[:, None]  # [B, F, W]
        away, extent = distances[key][:, None].to(output.device), module.rel_extent  # [B, 1, F, W]
        learned = (args[0] @ module.proj).transpose(1, 2)  # [B, H, F, extent]
        found = learned.gather(-1, away.clamp(0, extent - 1).expand_as(output))  # [B, H, F, W]
        return scaled(found.masked_fill((away < 0) | (away >= extent), 0), 2)

    hooks = [attention.rel_logits_proj.register_forward_hook(bias)]
    return hooks + ([attention.q_norm.register_forward_hook(queries)] if is_scaled else [])
