"""Layers of a cache that never moves which hold more than keys and values, or show them their own way.

- DeepSeek-V4: attention reads windows of `rate` columns, compressed to one entry each once they are full. What entries
  are made of is kept for the last tokens, in rings like the keys. In every forward, each sequence's windows from the
  one that its end lies in are compressed again, as far as its block closes any. The model itself hides entries of
  windows that are not closed, and is told to rotate entries by 0: the layer rotates, by each sequence's own positions.
- Inkling: a convolution reads the last k - 1 inputs before a token's own, which are kept in a small ring. Attention
  adds what it learned of distances, and may scale scores by the number of columns; both come from columns that all
  sequences share, and where these differ, hooks put those of each in their place (`own_columns`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, LinearAttentionCacheLayerMixin

from ...configuration.fields import (
    chooses_blocks,
    compresses_windows,
    has_short_convolutions,
    masks_padding_alone,
    rotates_anew,
)
from ..tensors.masks import cached_arange, cached_range
from .cache import STATES, CacheLayout, KeysAndValues, Place, RaggedLayer, laid_out, rounded

_PARTS = {"kv": 0.0, "gate": -torch.inf}  # what entries are made of, and what stands for it before the first window


class AlignedLayer(RaggedLayer):
    """A `RaggedLayer` that gives attention the columns up to the block's end, right-aligned after zeros (GLM5-next)."""

    fed = 0

    def _written(self, name: str, dim: int, states: Tensor, place: Place | None = None) -> Tensor:
        self.layout.is_maskless, self.fed = True, states.shape[dim]
        held = super()._written(name, dim, states)
        if self.layout.is_even:
            return held
        width, ends = held.shape[dim], self.layout.ends.to(held.device)
        source = cached_arange(width, held.device) - (width - self.layout.block_offset - self.fed - ends)[:, None]
        shape = [len(source), *[1] * (dim - 1), width, *[1] * (held.dim() - dim - 1)]
        aligned = held.gather(dim, source.clamp(min=0).view(shape).expand(held.shape))  # as `held`
        return aligned.masked_fill((source < 0).view(shape), 0)

    def get_seq_length(self) -> int:
        """Return the columns up to the end of the last block: what is asked after it was written."""
        return super().get_seq_length() + self.fed


class PositionedLayer(RaggedLayer):
    """A `RaggedLayer` with the positions [B, 3, C] of columns, if it is the first of its cache (Qwen4-Exp).

    A model puts the positions of a block behind those that it finds, but `target.note_positions` has written them.
    """

    positions: Tensor | None = None
    shown = 0

    def __init__(self, layout: CacheLayout, origin: DynamicLayer) -> None:
        super().__init__(layout, origin)
        self.states = (*self.states, ("positions", 2))
        given = cast(DynamicIndexedLayer, origin).indexer_position_ids
        if given is not None:
            self.positions = laid_out(given.transpose(0, 1), layout.prompt - given.shape[2], 2, layout.size(False))

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions [3, B, W] of the columns that attention gets."""
        return None if self.positions is None else self.positions[..., : self.shown].transpose(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        pass  # `note_positions` has written them

    def note(self, position_ids: Tensor) -> None:
        """Write positions of the next block, [B, F] or [1, 3 or 4, B, F], the last three rotated by."""
        three = (position_ids[-3:] if position_ids.dim() == 3 else position_ids).expand(3, -1, -1)  # [3, B, F]
        self.shown = self._written("positions", 2, three.transpose(0, 1)).shape[2]

    def restore(self, columns: int) -> DynamicLayer:
        layer = cast(DynamicIndexedLayer, super().restore(columns))
        positions = None if self.positions is None else self.positions[..., :columns].transpose(0, 1)
        layer.indexer_position_ids = positions
        return layer


class BlockLayer(RaggedLayer):
    """A `RaggedLayer` with keys of an index of blocks [B, 1, C, D], where its origin has them (MiniMax-M3)."""

    idx_keys: Tensor | None = None

    def __init__(self, layout: CacheLayout, origin: DynamicLayer) -> None:
        super().__init__(layout, origin)
        if "idx_keys" not in vars(origin):
            return
        self.own = self.states = (*self.own, ("idx_keys", 2))
        given = vars(origin)["idx_keys"]
        if given is not None:
            self.idx_keys = laid_out(given, layout.prompt - given.shape[2], 2, layout.size(False))

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Write the index's keys of a block [B, 1, F, D], and return a view of the columns that attention gets."""
        return self._written("idx_keys", 2, idx_k)


class CompressedLayer(RaggedLayer):
    """A `RaggedLayer` with compressed windows, where its origin has them, and its methods; values are the keys then.

    Of each compressor it holds, by its name: `buffer_kv` and `buffer_gate`, rings [B, C, d] of tokens; `compressed_kv`,
    the entries [B, T, d]; and where windows overlap, `overlap_kv` and `overlap_gate` [B, n, rate, d] of windows in a
    row, from window `overlap_from` [B] on.
    """

    rotary: nn.Module
    fed = 0

    def __init__(self, layout: CacheLayout, origin: DynamicLayer) -> None:
        super().__init__(layout, origin)
        given = vars(origin)
        self.compressors = list(given.get("compressed_kv", ()))
        if not self.compressors:
            return
        self.own = self.states = STATES[:1]
        self.values, self.rate = None, int(given["compress_rate"])
        for name in self.compressors:
            for part in _PARTS:
                buffer, overlap = given[f"buffer_{part}"][name], given.get(f"overlap_{part}", {}).get(name)
                size = layout.size(True)
                buffer = None if buffer is None else laid_out(buffer, layout.prompt - buffer.shape[1], 1, size)
                self._hold(f"buffer_{part}_{name}", buffer)
                self._hold(f"overlap_{part}_{name}", None if overlap is None else overlap[:, None])  # [B, 1, rate, d]
                given[f"buffer_{part}"][name] = None
            self._hold(f"compressed_kv_{name}", given["compressed_kv"][name])
            self._hold(f"overlap_from_{name}", layout.ends // self.rate - 1)  # [B]
            given["compressed_kv"][name] = None

    def _hold(self, name: str, states: Tensor | None) -> None:
        setattr(self, name, states)
        self.states = (*self.states, (name, 1))

    def _first(self, like: Tensor) -> Tensor:
        """Return the window that the end of each sequence lies in, [B] int64."""
        return (self.layout.ends // self.rate).to(like.device)

    def _full(self, length: int) -> int:
        """Return how many windows of a sequence are full behind the block."""
        return (length + self.layout.block_offset + self.fed) // self.rate

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> KeysAndValues:
        if not self.compressors:
            return super().update(key_states, value_states)
        keys = self._written("keys", 2, key_states)
        return keys, keys

    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int | Tensor]:
        """Write a block [B, F, d], and return that of the windows to compress [B, n rate, d], and shifts [n] to 0."""
        self.fed, lengths = kv.shape[1], self.layout.lengths
        for part, states in zip(_PARTS, (kv, gate)):
            self._written(f"buffer_{part}_{name}", 1, states)
        count = max(self._full(length) - length // self.rate for length in lengths)
        if not count:
            return kv[:, :0], gate[:, :0], 0
        columns = self.rate * self._first(kv)[:, None] + cached_arange(count * self.rate, kv.device)  # [B, n rate]
        row = cached_arange(len(kv), kv.device)[:, None]  # [B, 1]
        rings = [getattr(self, f"buffer_{part}_{name}") for part in _PARTS]
        kv, gate = (ring[row, columns % ring.shape[1]] for ring in rings)  # [B, n rate, d] each
        return kv, gate, -self.rate * cached_arange(count, kv.device)  # the last one is [n]

    def update_overlap_state(self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int) -> list[Tensor]:
        """Return what the windows before those of a chunk [B, n, rate, d] give to them, two of [B, rate, head_dim]."""
        first, priors = self._first(chunk_kv), []
        index = first - 1 - getattr(self, f"overlap_from_{name}").to(first.device)  # [B]
        row = cached_arange(len(first), first.device)  # [B]
        for (part, nothing), chunk in zip(_PARTS.items(), (chunk_kv, chunk_gate)):
            held, new = getattr(self, f"overlap_{part}_{name}"), chunk[..., :head_dim]  # [B, n, rate, head_dim]
            prior = torch.full_like(new[:, 0], nothing) if held is None else held[row, index]  # [B, rate, head_dim]
            setattr(self, f"overlap_{part}_{name}", torch.cat([prior[:, None], new], dim=1))
            priors.append(prior)
        setattr(self, f"overlap_from_{name}", first - 1)
        return priors

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Write entries [B, n, d] that were rotated by 0, and return those of all windows that any sequence closed."""
        held = getattr(self, f"compressed_kv_{name}")
        if count := compressed.shape[1]:
            size = rounded(self.layout.capacity // self.rate + 2)
            held = compressed[:, :0] if held is None else held
            held = held if held.shape[1] >= size else laid_out(held, 0, 1, size)  # [B, size, d]
            windows = self._first(held)[:, None] + cached_arange(count, held.device)  # [B, n]
            entries = self._rotated(compressed, windows).to(held.dtype)  # [B, n, d]
            held[cached_arange(len(held), held.device)[:, None], windows] = entries
            setattr(self, f"compressed_kv_{name}", held)
        return compressed if held is None else held[:, : max(map(self._full, self.layout.lengths))]

    def _rotated(self, entries: Tensor, windows: Tensor) -> Tensor:
        """Return entries [B, n, d] of windows [B, n], rotated by the position that each begins with."""
        from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

        cos, sin = self.rotary(entries, position_ids=windows * self.rate, layer_type="compress")
        scaled = vars(self.rotary)["compress_attention_scaling"]  # as entries are already
        return apply_rotary_pos_emb(entries[:, None], cos / scaled, sin / scaled)[:, 0]  # [B, 1, n, d] as of one head

    def restore(self, columns: int) -> DynamicLayer:
        layer = super().restore(columns)
        given = vars(layer)
        for name in self.compressors:
            windows, row = columns // self.rate, cached_arange(len(self.layout.lengths), self.layout.ends.device)
            index, entries = windows - 1 - getattr(self, f"overlap_from_{name}"), getattr(self, f"compressed_kv_{name}")
            for part in _PARTS:
                buffer, overlap = (getattr(self, f"{kind}_{part}_{name}") for kind in ("buffer", "overlap"))
                if buffer is not None:
                    kept = cached_range(windows * self.rate, columns % self.rate, buffer.device) % buffer.shape[1]
                    given[f"buffer_{part}"][name] = buffer.index_select(1, kept)
                if overlap is not None:
                    index = index.clamp(0, overlap.shape[1] - 1)
                    given[f"overlap_{part}"][name] = overlap[row.to(overlap.device), index.to(overlap.device)]
            given["compressed_kv"][name] = None if entries is None else entries[:, :windows].clone()
            given["entry_count"][name], given["values"] = windows, layer.keys
        return layer


@LinearAttentionCacheLayerMixin.register
class ConvolvedLayer(RaggedLayer):
    """A `RaggedLayer` with rings of inputs [B, C, d], `inputs_0` ..; without a previous state, it gets every block."""

    record_past, kernel = True, 1

    def __init__(self, layout: CacheLayout, origin: DynamicLayer) -> None:
        super().__init__(layout, origin)
        given = vars(origin)
        self.rings = [f"inputs_{index}" for index in given["conv_states"]]
        self.states = (*self.states, *((name, 1) for name in self.rings))
        self.has_previous_state = dict.fromkeys(given["conv_states"], False)
        for (index, held), name in zip(given["conv_states"].items(), self.rings):
            setattr(self, name, None)
            if held is not None and given["has_previous_state"][index]:
                self.kernel = given["conv_kernel_size"][index]
                ring, kept = self._ring(name, held.mT), min(self.kernel, layout.prompt, held.shape[2])
                ring[layout.slots(-kept, kept, ring.shape[1], held.device)] = held[..., -kept:].mT
                given["conv_states"][index] = None

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 1, **kwargs: object
    ) -> Tensor:
        """Write a block's inputs [B, d, F], and return them behind the k - 1 inputs before them."""
        layout, count = self.layout, conv_states.shape[2]
        self.kernel = conv_kernel_size
        layout.reserve(count)
        if layout.block_offset < 0 and (layout.mask is not None or min(layout.lengths) + layout.block_offset < 0):
            conv_states = conv_states * layout.real_tokens(count)[:, None].to(conv_states.device)  # [B, d, F]
        ring, device = self._ring(self.rings[state_idx], conv_states.mT), conv_states.device  # [B, C, d]
        size, before = ring.shape[1], conv_kernel_size - 1
        earlier = ring[layout.slots(layout.block_offset - before, before, size, device)]  # [B, k - 1, d]
        whole, kept = torch.cat([earlier.mT, conv_states], dim=2), min(count, size)  # [B, d, k - 1 + F]
        newest = layout.slots(layout.block_offset + count - kept, kept, size, device)
        ring[newest] = conv_states[..., count - kept :].mT.to(ring.dtype)
        return whole

    def _ring(self, name: str, like: Tensor) -> Tensor:
        """Return a ring, with room for what blocks may read and write until the next rollback, [B, C, d]."""
        layout, size = self.layout, rounded(self.kernel + self.layout.span)
        ring: Tensor | None = getattr(self, name)
        if ring is not None and ring.shape[1] >= size:
            return ring
        room = like.new_zeros(len(like), size, like.shape[2])
        if ring is not None:  # blocks have become longer
            old, device = ring.shape[1], ring.device
            first = max(layout.block_offset, 0) - old
            room[layout.slots(first, old, size, device)] = ring[layout.slots(first, old, old, device)].to(room.dtype)
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
        columns = layout.columns(count, layout.size(self.is_sliding))
        return columns[:1] if layout.is_even else columns

    def restore(self, columns: int) -> DynamicLayer:
        layer = super().restore(columns)
        given = vars(layer)
        for index, name in enumerate(self.rings):
            if (ring := getattr(self, name)) is not None:
                kept = cached_range(columns - self.kernel, self.kernel, ring.device)  # [k], the last columns
                given["conv_states"][index] = ring.index_select(1, kept % ring.shape[1]).mT.contiguous()
        given["record_past"] = False
        return layer


_LAYERS = (
    (masks_padding_alone, AlignedLayer),
    (rotates_anew, PositionedLayer),
    (chooses_blocks, BlockLayer),
    (compresses_windows, CompressedLayer),
    (has_short_convolutions, ConvolvedLayer),
)


def layer_class(config: PreTrainedConfig) -> type[RaggedLayer] | None:
    """Return the class of layers that a model's attention reads; None: any."""
    return next((kind for is_of, kind in _LAYERS if is_of(config)), None)


@contextmanager
def own_columns(part: nn.Module, cache: Cache) -> Iterator[None]:
    """Let attention in a part of a model take distances from the columns of each sequence of a `ConvolvedLayer`."""
    with ExitStack() as hooks:
        if any(isinstance(layer, ConvolvedLayer) and not layer.layout.is_even for layer in cache.layers):
            distances: dict[tuple[bool, int], Tensor] = {}
            for module in part.modules():
                for hook in _hooks(module, cache, distances) if hasattr(module, "rel_logits_proj") else ():
                    hooks.enter_context(hook)
        yield


def _hooks(attention: Any, cache: Cache, distances: dict[tuple[bool, int], Tensor]) -> list[RemovableHandle]:
    """Return hooks of one attention, which change calls of this thread; equal layers share the distances."""
    layer, own, config = cast(ConvolvedLayer, cache.layers[attention.layer_idx]), get_ident(), attention.config
    is_scaled = not attention.is_sliding and config.log_scaling_n_floor is not None

    def scaled(states: Tensor, token_dim: int) -> Tensor:
        if not is_scaled:
            return states
        counts = (layer.layout.block_columns(states.shape[token_dim]) + 1).to(states.device).float()  # [B, F]
        factor = 1 + config.log_scaling_alpha * (counts / config.log_scaling_n_floor).clamp(min=1).log()  # [B, F]
        shape = [len(factor), *(-1 if dim == token_dim else 1 for dim in range(1, states.dim()))]
        return (states.float() * factor.view(shape)).to(states.dtype)

    def queries(_: nn.Module, args: object, output: Tensor) -> Tensor:
        return scaled(output, 1) if get_ident() == own else output

    def bias(module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if get_ident() != own:
            return output
        count = output.shape[2]
        if (key := (layer.is_sliding, count)) not in distances:
            distances[key] = layer.layout.block_columns(count)[..., None] - layer.columns(count)[:, None]  # [B, F, W]
        away, extent = distances[key][:, None].to(output.device), module.rel_extent  # [B, 1, F, W]
        learned = (args[0] @ module.proj).transpose(1, 2)  # [B, H, F, extent]
        found = learned.gather(-1, away.clamp(0, extent - 1).expand_as(output))  # [B, H, F, W]
        return scaled(found.masked_fill((away < 0) | (away >= extent), 0), 2)

    hooks = [attention.rel_logits_proj.register_forward_hook(bias)]
    return hooks + ([attention.q_norm.register_forward_hook(queries)] if is_scaled else [])
