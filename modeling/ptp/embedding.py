"""Inputs of slots: embeddings of uniforms and of requests for the most likely token, or masks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...configuration.ptp import PTPConfig
from ...generation.tensors.uniforms import uniform_features

SLOT_PARTS = ("uniform_embedding", "mask_embedding", "sampler")
"""Names of the modules other than the adapters; each variant has some of them."""
GREEDY = -1.0
"""A value in place of a uniform that requests the most likely token."""


class _WideLinear(nn.Linear):
    """A linear layer that computes in float32 at least: in bfloat16, features would lose their digits."""

    def forward(self, features: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(features.to(dtype), self.weight.to(dtype), bias).to(self.weight.dtype)


class _GreedyEmbedding(nn.Embedding):
    """The one embedding that requests the most likely token; its forward reads it, so that weights may be offloaded."""

    def forward(self, uniforms: Tensor, embeds: Tensor) -> Tensor:
        """Return `embeds` [B, A, H], replaced where uniforms [B, A] are `GREEDY`."""
        return torch.where((uniforms < 0)[..., None], self.weight[0], embeds)  # [B, A, H]


class UniformEmbedding(nn.Module):
    """Embeds uniforms: features, then a projection to `hidden_size`."""

    def __init__(self, config: PTPConfig, hidden_size: int) -> None:
        super().__init__()
        self.kind, self.dim = config.features, config.feature_dim
        if config.projection == "linear":
            self.projection: nn.Module = _WideLinear(self.dim, hidden_size, bias=config.projection_bias)
        else:
            self.projection = nn.Sequential(
                _WideLinear(self.dim, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
            )
        self.greedy = _GreedyEmbedding(1, hidden_size) if config.greedy else None

    def forward(self, uniforms: Tensor) -> Tensor:
        """Embed the slots of a batch, [B, A, H] in the dtype of the weights.

        `uniforms` [B, A] stay float32 until they are features; `GREEDY` requests the most likely token.
        """
        with torch.autocast(uniforms.device.type, enabled=False):
            embeds = self.projection(uniform_features(uniforms, self.kind, self.dim))  # [B, A, H]
            return embeds if self.greedy is None else self.greedy(uniforms, embeds)


def slot_parts(config: PTPConfig, hidden_size: int) -> dict[str, nn.Module | None]:
    """Return new modules by the names of `SLOT_PARTS`; None where a variant has none."""
    return {
        "uniform_embedding": UniformEmbedding(config, hidden_size) if config.reads_uniforms else None,
        "mask_embedding": None if config.reads_uniforms else nn.Embedding(config.num_slots, hidden_size),
        "sampler": Sampler(hidden_size) if config.has_sampler else None,
    }


class Sampler(nn.Sequential):
    """MLP([e(x_{i-1}); z_i]): two times Linear, SiLU, LayerNorm, the first from 2 d to d.

    The unembedding of its output is the distribution of x_i, so that the distributions of a group of slots are
    sequential.

    Args:
        hidden_size: d.
    """

    def __init__(self, hidden_size: int) -> None:
        blocks = [
            (nn.Linear(width, hidden_size), nn.SiLU(), nn.LayerNorm(hidden_size))
            for width in (2 * hidden_size, hidden_size)
        ]
        super().__init__(*(layer for block in blocks for layer in block))

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        """Return the states [..., d] that the unembedding reads, in the dtype of `states` [..., d].

        `before` [..., d] are embeddings of the tokens before those that the slots predict; broadcast.
        """
        both = torch.broadcast_tensors(before, states)
        inputs = torch.cat([part.to(self[0].weight.dtype) for part in both], dim=-1)  # [..., 2 d]
        return super().forward(inputs).to(states.dtype)
