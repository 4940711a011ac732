"""What slots read; masks and positions of completions packed after their sequences; checks of backbones.

A sequence is [tokens 0..T-1 | completion 0, slots 0..L-1 | completion 1, ...]. `documents` [B, T] numbers the document
of each token, 0 for padding; it may be an ordinary attention mask.
"""

from __future__ import annotations

from inspect import signature

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...configuration.fields import field, refuse
from ...configuration.ptp import PTPConfig
from ...generation.backbone.wrapped_models import own_cache_of
from ...generation.tensors.masks import check_attention

GREEDY = -1.0
"""A value in place of a uniform that requests the most likely token."""


def uniform_features(u: Tensor, kind: str, dim: int) -> Tensor:
    """Return the features of uniforms, [..., dim] float32, as networks read them.

    Args:
        u: [...] in [0, 1], float32 (float64 for more digits).
        kind: `"bits"`: the 32 bits of u as a float32, most significant first (PTP paper, Eq. 14); `"arithmetic"`:
            1{frac(u 2^(i-1)) < 1/2} for i = 1..dim, the complements of its binary digits; `"threshold"`:
            1{u <= i / dim}; `"scalar"`: u itself; `"interpolate"`: weights of three anchors at 0, 1/2 and 1.
        dim: Number of features: 32 for `"bits"`, 1 for `"scalar"`, 3 for `"interpolate"`.
    """
    if kind == "bits":
        shifts = torch.arange(31, -1, -1, device=u.device, dtype=torch.int32)  # [32]
        return ((u.float().contiguous().view(torch.int32)[..., None] >> shifts) & 1).float()  # [..., 32]
    if kind == "scalar":  # [..., 1]
        return u.float()[..., None]
    steps = torch.arange(1, dim + 1, device=u.device, dtype=torch.float64)  # [dim]
    if kind == "arithmetic":
        return ((u.double()[..., None] * 2 ** (steps - 1)).frac() < 0.5).float()  # [..., dim]
    if kind == "threshold":  # [..., dim]
        return (u.double()[..., None] <= steps / dim).float()
    # "interpolate": hat functions around the anchors at 0, 1/2 and 1
    return (1 - (2 * u.double()[..., None] - (steps - 1)).abs()).clamp(min=0).float()


class _WideLinear(nn.Linear):
    """A linear layer that computes in float32 at least: in bfloat16, features would lose their digits."""

    def forward(self, features: Tensor) -> Tensor:
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        return nn.functional.linear(features.to(dtype), self.weight.to(dtype), bias).to(self.weight.dtype)


class _GreedyEmbedding(nn.Embedding):
    """The embedding that requests the most likely token, for uniforms that are `GREEDY`."""

    def forward(self, uniforms: Tensor, embeds: Tensor) -> Tensor:
        return torch.where((uniforms < 0)[..., None], self.weight[0], embeds)  # [B, A, H]


class UniformEmbedding(nn.Module):
    """Embeds uniforms [B, A], which stay float32 until they are features: a projection to [B, A, hidden_size]."""

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
        with torch.autocast(uniforms.device.type, enabled=False):
            embeds = self.projection(uniform_features(uniforms, self.kind, self.dim))  # [B, A, H]
            return embeds if self.greedy is None else self.greedy(uniforms, embeds)


class Sampler(nn.Sequential):
    """MLP([e(x_{i-1}); z_i]), [..., d]: what the unembedding reads for x_i, of a slot's state and the token before."""

    def __init__(self, hidden_size: int) -> None:
        first, second = (nn.Linear(width, hidden_size) for width in (2 * hidden_size, hidden_size))
        norms = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        super().__init__(first, nn.SiLU(), norms[0], second, nn.SiLU(), norms[1])

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        both = torch.broadcast_tensors(before, states)
        inputs = torch.cat([part.to(self[0].weight.dtype) for part in both], dim=-1)  # [..., 2 d]
        return super().forward(inputs).to(states.dtype)


class SlotPartsMixin(nn.Module):
    """The modules other than the adapters, by the variant of a configuration."""

    uniform_embedding: UniformEmbedding | None
    mask_embedding: nn.Embedding | None
    sampler: Sampler | None

    def add_slot_parts(self, config: PTPConfig, hidden_size: int) -> None:
        self.uniform_embedding = UniformEmbedding(config, hidden_size) if config.reads_uniforms else None
        self.mask_embedding = None if config.reads_uniforms else nn.Embedding(config.num_slots, hidden_size)
        self.sampler = Sampler(hidden_size) if config.has_sampler else None

    def slot_parts(self) -> dict[str, nn.Module]:
        parts = {name: getattr(self, name) for name in ("uniform_embedding", "mask_embedding", "sampler")}
        return {name: part for name, part in parts.items() if part is not None}


def check_backbone(backbone: PreTrainedModel, reads_logits: bool = False) -> None:
    """Refuse a model that cannot carry auxiliary positions, or whose logits, which drafts are read off, are changed."""
    config, takes = backbone.config, signature(backbone.get_decoder().forward).parameters
    kinds, window = set(field(config, "layer_types") or []), field(config, "sliding_window")
    slides = window and field(config, "use_sliding_window") is not False and kinds != {"full_attention"}
    others, needed = kinds - {"full_attention"}, "auxiliary positions need full attention in every layer"
    reasons = [
        (slides, f"sliding_window={window}; {needed}"),
        (others, f"layers of {others}; {needed}"),
        (own_cache_of(backbone), "its attention has its own cache and takes no dense masks"),
        (backbone._is_stateful, "a recurrent state cannot be cropped, so that nothing can be verified"),
        ("position_ids" not in takes, "its forward takes no position_ids"),
    ]
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling") if reads_logits else ():
        value = field(config, name)
        reasons.append((value not in (None, 1.0), f"{name}={value}; logits must be lm_head's own"))
    refuse((refused, f"{config.model_type}: {reason}") for refused, reason in reasons)
    check_attention(config, "auxiliary positions")


def packed_mask(documents: Tensor, starts: Tensor, slots: int) -> Tensor:
    """Return what tokens [B, T] and the L `slots` of completions at columns `starts` [B, C] see of each other, bool.

    Tokens see the tokens of their document up to themselves; slot k of a completion that starts at column s sees the
    tokens of the same document before s, and the slots 0..k of its own completion.
    """
    batch, tokens = len(documents), token_mask(documents)[:, 0]
    own = torch.ones(slots, slots, dtype=torch.bool, device=documents.device).tril()  # [L, L]
    blocks = torch.block_diag(*[own] * starts.shape[1]).expand(batch, -1, -1)  # [B, C L, C L]
    context = context_mask(documents, starts).repeat_interleave(slots, dim=1)  # [B, C L, T]
    upper = torch.nn.functional.pad(tokens, (0, blocks.shape[2]), value=False)  # [B, T, T + C L]
    return torch.cat([upper, torch.cat([context, blocks], dim=2)], dim=1)[:, None]  # [B, 1, T + C L, T + C L]


def token_mask(documents: Tensor) -> Tensor:
    """Return the causal mask within documents, [B, 1, T, T] bool."""
    order = torch.arange(documents.shape[1], device=documents.device)  # [T]
    same = (documents[:, :, None] == documents[:, None]) & (documents[:, None] > 0)  # [B, T, T]
    return ((order[:, None] >= order) & same)[:, None]


def context_mask(documents: Tensor, starts: Tensor) -> Tensor:
    """Return the columns of the same document before each start, [B, C, T] bool."""
    order = torch.arange(documents.shape[1], device=documents.device)
    own = documents.gather(1, starts)[..., None]  # [B, C, 1]
    return (order < starts[..., None]) & (documents[:, None] == own) & (own > 0)  # [B, C, T]


def stepwise_mask(documents: Tensor, starts: Tensor, step: int) -> Tensor:
    """Return the mask [B, 1, C, T + (k + 1) C] of slot k = `step` of all completions, after those before."""
    own = torch.eye(starts.shape[1], dtype=torch.bool, device=starts.device).repeat(1, step + 1)  # [C, (k + 1) C]
    own = own.expand(len(starts), -1, -1)
    return torch.cat([context_mask(documents, starts), own], dim=2)[:, None]


def token_positions(documents: Tensor) -> Tensor:
    """Return the position of every token in its document, [B, T] int64; 0 for padding."""
    return (token_mask(documents)[:, 0].sum(-1) - 1).clamp(min=0)


def packed_positions(
    documents: Tensor, starts: Tensor, slots: int, offset: int | Tensor, own: Tensor | None = None
) -> Tensor:
    """Return the positions [B, T + C L] int64 that go with `packed_mask`; `own` [B, T] replaces those of the tokens.

    `offset`, a number or [B, 1, 1], is how far slot 0 is after the start: -1 for one-hot slots, 0 for categorical ones.
    """
    own = token_positions(documents) if own is None else own
    order = torch.arange(slots, device=documents.device) + offset  # [L], or [B, 1, L]
    after = (own.gather(1, starts)[..., None] + order).flatten(1)  # [B, C L]
    return torch.cat([own, after], dim=1).clamp(min=0)
