"""A cache that never moves, for attention that reads windows of tokens, compressed to one entry each (DeepSeek-V4).

A window has `rate` columns and begins in a multiple of them; it is compressed once it is full. What entries are made of
is kept for the last tokens, in rings like the keys. In every forward, each sequence's windows from the one that its
end lies in are compressed again, as far as its block closes any: what rejected drafts left is overwritten. Entries of
windows that are not closed are hidden by the model itself, which rotates entries by positions that all sequences
share: it is told to rotate by 0, and the layer rotates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from ..contract import DraftTree, each_state
from ..tensors.masks import cached_arange, cached_range
from ..tensors.wrapped_models import Kwargs
from .cache import STATES, CacheLayout, RaggedLayer, laid_out, rounded
from .target import RaggedBackbone

_PARTS = {"kv": 0.0, "gate": -torch.inf}
"""What entries are made of, and what stands for it before the first window."""


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

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
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


class CompressedBackbone(RaggedBackbone):
    """A model on a cache of `CompressedLayer`.

    Compressors without an index (`heavy`) count windows in columns, padding among them; single tokens see all entries.
    In a block they hide entries by positions, so that with padding they get columns instead.
    """

    takes_trees = False
    layer_type = CompressedLayer

    def __init__(self, *args: Any, limit: int, span: int) -> None:
        super().__init__(*args, limit=limit, span=span)
        self.heavy: list[nn.Module] = []
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, CompressedLayer) and layer.compressors:
                compressor = self.model.get_decoder().get_submodule(f"layers.{index}.self_attn.compressor")
                layer.rotary = compressor.get_submodule("rotary_emb")
                self.heavy += [compressor] if layer.compressors == ["compressor"] else []

    def _call(self, block: Tensor, depths: Tensor, tree: DraftTree | None, last: int | None, options: Kwargs) -> Any:
        if block.shape[1] > 1 or self.layout.is_even:
            with self._given_columns(depths) if self.is_padded else nullcontext():
                return super()._call(block, depths, tree, last, options)
        # a token alone sees all entries, those of sequences that are ahead: of two, each sees its own
        options = options | {"logits_to_keep": 0}
        outputs = self._call(pad(block, (0, 1)), torch.cat([depths, depths + 1], dim=-1), None, last, options)
        outputs.logits = outputs.logits[:, :1]
        outputs.hidden_states = each_state(outputs.hidden_states, lambda state: state[:, :1])
        return outputs

    @contextmanager
    def _given_columns(self, depths: Tensor) -> Iterator[None]:
        columns, own = self.layout.ends[:, None] + depths, get_ident()  # [B, F]

        def changed(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*args[:2], columns.to(args[2].device), *args[3:]) if get_ident() == own else args

        hooks = [compressor.register_forward_pre_hook(changed) for compressor in self.heavy]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
