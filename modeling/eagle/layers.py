"""The layers of an EAGLE head: transformers' Llama blocks, and the one place where each version differs from them.

Version 1 (EAGLE-1, EAGLE-2, HASS) merges embedding and feature before a block without input norm. Version 3 hands both,
normed, to the first block's attention. The embedding comes first in either. Knows neither backbone, directories nor
losses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from ...configuration import EagleHeadConfig


def build_layers(config: EagleHeadConfig) -> nn.ModuleList:
    """All layers of a head; only the first one of its kind is special."""
    first = FusingLayer(config) if config.version == 3 else MergedLayer(config)
    return nn.ModuleList([first, *(EagleLayer(config, index) for index in range(1, config.num_hidden_layers))])


def build_attention(config: EagleHeadConfig, index: int, width: int) -> nn.Module:
    """Llama's or (with `qk_norm`) Qwen3's attention that reads states [.., width]; its output has no bias."""
    attention = (Qwen3Attention if config.qk_norm else LlamaAttention)(config, index)
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = getattr(attention, name).out_features
        setattr(attention, name, nn.Linear(width, rows, bias=config.attention_bias))
    attention.o_proj = nn.Linear(attention.o_proj.in_features, config.hidden_size, bias=False)
    return attention


class EagleLayer(LlamaDecoderLayer):
    """A Llama layer with the head's attention.

    Args:
        config: The head's.
        index: The layer's place, in the cache too.
        width: Of what its attention reads; None: d.
    """

    def __init__(self, config: EagleHeadConfig, index: int, width: int | None = None) -> None:
        super().__init__(config, index)
        self.self_attn = build_attention(config, index, width or config.hidden_size)


class MergedLayer(EagleLayer):
    """The first layer of version 1: its attention reads fc [e(x_{t+1}); f_t] as it is."""

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__(config, 0)
        self.input_layernorm = nn.Identity()


class FusingLayer(EagleLayer):
    """The first layer of version 3: its attention reads [norm(e(x_{t+1})); norm(g_t)], 2 d wide."""

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__(config, 0, 2 * config.hidden_size)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, features: torch.Tensor, embeddings: torch.Tensor, **options: Any) -> torch.Tensor:
        """From g [B, R, d] and e [B, R, d] to [B, R, d]; `options` are the attention's."""
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        hidden = (normed if self.norm_before_residual else features) + self.self_attn(both, **options)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
