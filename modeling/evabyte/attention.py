"""EVA attention: the open window byte by byte, earlier windows as one learned summary per chunk (EvaByte).

The geometry comes from `EvaBlock`, and the past from `EvaCacheLayer`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from ...configuration import EvaByteConfig
from .cache import EvaCacheLayer, States
from .geometry import EvaBlock


class EvaAttention(nn.Module):
    """One EVA attention layer.

    With s = 1/sqrt(d), a chunk's rotated keys k_i and values v_i become (per head, one landmark per chunk)

        k_bar = sum_i softmax_i(mu . k_i) k_i        v_bar = sum_i softmax_i(s (phi . k_i - |k_i|^2 / 2)) v_i

    and a query takes one softmax over s q . k for the tokens of its own window up to itself and s q . k_bar for all
    chunks of earlier windows.

    Args:
        config: Configuration of the model.
        layer_idx: Index of the layer.
    """

    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config: EvaByteConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.head_dim
        self.scaling = self.head_dim**-0.5
        self.chunk_size = config.chunk_size
        width = config.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        landmark = (1, config.num_attention_heads, 1, 1, self.head_dim)
        self.adaptive_mu_k = nn.Parameter(torch.empty(landmark))
        self.adaptive_phi = nn.Parameter(torch.empty(landmark))

    def forward(
        self, hidden_states: Tensor, rotary: States, block: EvaBlock, cache: EvaCacheLayer | None = None
    ) -> Tensor:
        """Attend from the new tokens: [R, M, D] to [R, M, D], every row starting in column 0.

        `rotary` is cos and sin, [R or 1, M, d]; this layer's cache, if any, is updated.
        """
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        query, key, value = (
            p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        return self.o_proj(self._attend(query, key, value, block, cache).flatten(2))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, block: EvaBlock, cache: EvaCacheLayer | None
    ) -> Tensor:
        """Return [R, M, H, d] from rotated queries, keys and values [R, H, M, d]."""
        memory = (key, value)
        if cache is not None:
            stored = cache.update(key, value, block, self.summarise)
            memory = memory if block.is_fresh else stored
        windows = self._attend_windows if block.is_long else self._attend_block
        output = windows(query, memory, block, cache)
        if cache is not None:
            cache.settle(block, self.summarise)
        return output

    def summarise(self, keys: Tensor, values: Tensor) -> States:
        """Return summaries [..., H, T / C, d] of rotated keys and values [..., H, T, d]; C divides T."""
        keys, values = (x.unflatten(-2, (-1, self.chunk_size)) for x in (keys, values))
        mu, phi = self.adaptive_mu_k[0], self.adaptive_phi[0]
        key_logits = (keys * mu).sum(-1).float()
        value_logits = self.scaling * ((keys * phi).sum(-1) - keys.square().sum(-1) / 2).float()
        key_weights, value_weights = (x.softmax(-1)[..., None] for x in (key_logits, value_logits))
        return (key_weights.to(keys.dtype) * keys).sum(-2), (value_weights.to(values.dtype) * values).sum(-2)

    def _attend_block(self, query: Tensor, memory: States, block: EvaBlock, cache: EvaCacheLayer | None) -> Tensor:
        """Return the output of dense attention over [cached summaries | raw tokens | provisional summaries]."""
        keys, values = memory
        if cache is not None and block.provisional:
            more_keys, more_values = self.summarise(*cache.raw(block, block.provisional * block.window))
            keys, values = torch.cat([keys, more_keys], dim=2), torch.cat([values, more_values], dim=2)
        return self._attention(query, keys, values, block.mask)

    def _attend_windows(self, query: Tensor, memory: States, block: EvaBlock, cache: EvaCacheLayer | None) -> Tensor:
        """Attend window by window, each to itself and to summaries, so that no L x L scores are made."""
        count, window = block.provisional + 1, block.window
        if cache is None or block.is_fresh:
            raw = tuple(block.place(states, count * window) for states in memory)
            past = tuple(states[:, :, :0] for states in memory)
        else:
            raw = cache.raw(block, count * window)
            past = tuple(states[:, :, : max(block.summaries)] for states in memory)
        new = self.summarise(*(states[:, :, : (count - 1) * window] for states in raw))
        keys, values = (_per_window(*parts, count) for parts in zip(past, new, raw))
        query = block.place(query, count * window).unflatten(2, (count, window)).transpose(1, 2).flatten(0, 1)
        output = self._attention(query, keys, values, block.mask)
        return block.take(output.unflatten(0, (-1, count)).flatten(1, 2))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        name = self.config._attn_implementation or "eager"
        function = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        return function(self, query, key, value, mask, scaling=self.scaling, dropout=0.0)[0]


def _per_window(past: Tensor, new: Tensor, raw: Tensor, count: int) -> Tensor:
    """Return the keys (or values) of every window: [R * windows, H, cached + new summaries + W, d]."""
    summaries = torch.cat([past, new], dim=2)[:, None].expand(-1, count, -1, -1, -1)
    windows = raw.unflatten(2, (count, -1)).transpose(1, 2)
    return torch.cat([summaries, windows], dim=3).flatten(0, 1)
