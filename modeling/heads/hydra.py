"""Heads that read the tokens drafted before them (Hydra), perhaps after a decoder layer of their own (Hydra++)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, LlamaConfig, PreTrainedConfig, PreTrainedModel

from ...configuration import MTPHeadConfig
from ..decoder_layers import LayerSource, read_config
from .backbone_parts import BackboneParts, backbone_parts
from .blocks import ConcatBlock, ResidualBlock, repeated
from .layer import DecoderLayers
from .sequential_distribution import SequentialDistribution
from .unembeddings import OwnUnembeddings, SharedUnembedding, next_token_logits
from .window_distribution import FactorisedDistribution, WindowDistribution


class HydraHead(nn.Module):
    """Head k = 1..n-1 predicts x_{t+1+k} from [s; e(x_{t+1}); ..; e(x_{t+k})]; position 1 is the backbone's own
    distribution.

    s is the state at t, or what a decoder layer over all states up to t makes of it (`arch="prefix-mlp"`).

    Args:
        config: Head options: `window`, `num_blocks`, `tied_blocks`, `unembed`, `arch`, `grounded`, `state_offset`.
        hidden_size: d.
        vocab_size: V.
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size, count = config, vocab_size, config.window - 1
        self.prefix = PrefixLayer(config) if config.arch == "prefix-mlp" else None
        self.firsts = nn.ModuleList(
            ConcatBlock((k + 2) * hidden_size, hidden_size) if config.grounded else ResidualBlock(hidden_size)
            for k in range(count)
        )
        later = config.num_blocks - 1
        self.blocks = nn.ModuleList(repeated(later, config.tied_blocks, hidden_size) for _ in range(count))
        own = config.unembed == "own"
        self.unembeddings = OwnUnembeddings(count, hidden_size, vocab_size, bias=True) if own else SharedUnembedding()

    def features(
        self,
        states: Sequence[torch.Tensor],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        backbone: BackboneParts | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """h and s of every position, [B, T, 2 d], from the states that `hidden_layers` names, [B, T, d] each."""
        state = states[0]
        if self.prefix is not None:
            state = self.prefix(state, attention_mask, position_ids, cache)
        return torch.cat([states[-1].to(state.dtype), state], -1)

    def first(self, features: torch.Tensor, backbone: BackboneParts | None) -> torch.Tensor:
        """Logits [..., V] of position 1, the backbone's, at features [..., 2 d]; at [..., d], s is h."""
        return next_token_logits(features[..., : self._width(features)], backbone)

    def state(self, features: torch.Tensor) -> torch.Tensor:
        """s, [..., d]."""
        return features[..., -self._width(features) :]

    def _width(self, features: torch.Tensor) -> int:
        return self.firsts[0].linear.out_features if len(self.firsts) else features.shape[-1]

    def logits(self, k: int, state: torch.Tensor, known: torch.Tensor, backbone: BackboneParts) -> torch.Tensor:
        """Logits [..., V] of head k (from 0) given s [..., d] and the embeddings of k + 1 tokens [..., k + 1, d]."""
        block = self.firsts[k]
        inputs = (
            torch.cat([state.expand(*known.shape[:-2], -1), known.flatten(-2)], -1) if self.config.grounded else state
        )
        states = self.blocks[k](block(inputs.to(block.linear.weight.dtype)))
        return self.unembeddings(states, k, backbone)

    def start_from(self, backbone: PreTrainedModel) -> None:
        """Every unembedding starts as the backbone's."""
        self.unembeddings.start_from(backbone_parts(backbone))


class PrefixLayer(nn.Module):
    """A decoder layer and a norm over the states of all verified tokens.

    Args:
        config: Head options; `backbone_config` is that of a model with one layer.
    """

    def __init__(self, config: MTPHeadConfig) -> None:
        super().__init__()
        source = LayerSource(read_config(config.backbone_config))
        self.layers, self.rotary, self.norm = DecoderLayers(source, 1), source.rotary(), source.norm()

    def forward(
        self,
        states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """[B, T, d] to [B, T, d]; see `DecoderLayers.run`."""
        states = states.to(next(self.layers.parameters()).dtype)
        return self.norm(self.layers.run([states], self.rotary, attention_mask, position_ids, cache)[0])


def hidden_layers(config: MTPHeadConfig) -> list[int]:
    """The states that Hydra heads read: one, and the last."""
    return [-1 - config.state_offset, -1]


def attends(config: MTPHeadConfig) -> bool:
    """Whether there is a decoder layer before the heads."""
    return config.arch == "prefix-mlp"


def layer_config(config: MTPHeadConfig, text: PreTrainedConfig) -> dict[str, Any] | None:
    """Config of that layer, of the backbone's sizes."""
    if not attends(config):
        return None
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return prefix_config(text.hidden_size, inner, heads, keys, getattr(text, "rms_norm_eps", 1e-6))


def prefix_config(hidden_size: int, intermediate_size: int, heads: int, key_heads: int, eps: float) -> dict[str, Any]:
    """Config of a one-layer Llama; its rope base is 10000 for every backbone."""
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=hidden_size // heads,
        rms_norm_eps=eps,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    )
    return config.to_dict()


def hydra_distribution(
    head: HydraHead,
    config: MTPHeadConfig,
    features: torch.Tensor,
    backbone: BackboneParts | None,
    start: int = 0,
    stop: int | None = None,
) -> WindowDistribution:
    """The distribution of the next n tokens given features [..., 2 d] or [..., d], in float32 (float64 kept).

    Conditionals are computed when they are asked for, so that `start` and `stop` (`HeadFamily.distribution`) change
    nothing.
    """
    state = head.state(features)
    known = state[..., None, :][..., :0, :]

    def next_logits(prefix: torch.Tensor) -> torch.Tensor:
        count = prefix.shape[-2]
        return head.first(features, backbone) if count == 0 else head.logits(count - 1, state, prefix, backbone)

    if config.grounded:
        return SequentialDistribution(next_logits, backbone.embed, config.window, known)
    logits = [next_logits(known), *(head.logits(k, state, known, backbone) for k in range(config.window - 1))]
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    return FactorisedDistribution(torch.stack([part.to(dtype) for part in logits], -2).unsqueeze(-2))
