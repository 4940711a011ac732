"""Masks and positions of completions packed after their sequences; checks of inputs and of backbones.

A sequence is [tokens 0..T-1 | completion 0, slots 0..L-1 | completion 1, ...]. `documents` [B, T] numbers the document
of each token, 0 for padding; it may be an ordinary attention mask.
"""

from __future__ import annotations

from inspect import signature

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...configuration.fields import field, refuse
from ...configuration.ptp import PTPConfig
from ...generation.backbone.wrapped_models import has_own_cache
from ...generation.tensors.masks import check_attention
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
        """Embed uniforms [B, A], which stay float32 until they are features; [B, A, H] in the dtype of the weights."""
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
    """MLP([e(x_{i-1}); z_i]): two times Linear, SiLU, LayerNorm, the first from 2 d to d = `hidden_size`.

    The unembedding of its output is the distribution of x_i, so that those of a group of slots are sequential.
    """

    def __init__(self, hidden_size: int) -> None:
        blocks = [
            (nn.Linear(width, hidden_size), nn.SiLU(), nn.LayerNorm(hidden_size))
            for width in (2 * hidden_size, hidden_size)
        ]
        super().__init__(*(layer for block in blocks for layer in block))

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        """Return what the unembedding reads, [..., d], of slots' `states` and embeddings of the tokens `before`."""
        both = torch.broadcast_tensors(before, states)
        inputs = torch.cat([part.to(self[0].weight.dtype) for part in both], dim=-1)  # [..., 2 d]
        return super().forward(inputs).to(states.dtype)


def check_config(config: PreTrainedConfig, reads_logits: bool = False) -> None:
    """Refuse sliding windows, layers without full attention, and scaled or capped logits that drafts are read off."""
    kinds, window = set(field(config, "layer_types") or []), field(config, "sliding_window")
    slides = window and field(config, "use_sliding_window") is not False and kinds != {"full_attention"}
    name, needed = config.model_type, "auxiliary positions need a backbone with full attention in every layer"
    others = kinds - {"full_attention"}
    refuse([(slides, f"{name}: sliding_window={window}; {needed}"), (others, f"{name}: layers of {others}; {needed}")])
    for change in ("final_logit_softcapping", "logit_scale", "logits_scaling") if reads_logits else ():
        if (value := field(config, change)) not in (None, 1.0):
            raise ValueError(f"{name}: {change}={value}; logits must be lm_head's own")


def check_model(backbone: PreTrainedModel) -> None:
    """Refuse a model with a recurrent state, positions that cannot be chosen, or attention without dense masks."""
    name, takes = backbone.config.model_type, signature(backbone.get_decoder().forward).parameters
    reasons = [
        (has_own_cache(backbone), "its attention has its own cache and takes no dense masks"),
        (backbone._is_stateful, "a recurrent state cannot be cropped; only full attention can be verified"),
        ("position_ids" not in takes, "its forward takes no position_ids, which auxiliary positions need"),
    ]
    refuse((refused, f"{name}: {reason}") for refused, reason in reasons)
    check_attention(backbone.config, "auxiliary positions")


def packed_mask(documents: Tensor, starts: Tensor, slots: int) -> Tensor:
    """Return the visibility between tokens and auxiliary positions, with several completions per sequence.

    Tokens see the tokens of their document up to themselves. Slot k of L of a completion that starts at column s sees
    the tokens of the same document before s, and the slots 0..k of its own completion.

    Args:
        documents: [B, T] int64.
        starts: [B, C] int64, the columns that completions start at.
        slots: L.

    Returns:
        [B, 1, T + C L, T + C L] bool.
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
    """Return the columns that completions continue: those of the same document before each start, [B, C, T] bool."""
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

    `offset`, a number or [B, 1, 1], is the position of slot 0 less that of the token at the start: -1 for one-hot
    slots, whose position is that where the backbone predicts their token, and 0 for categorical ones.
    """
    own = token_positions(documents) if own is None else own
    order = torch.arange(slots, device=documents.device) + offset  # [L], or [B, 1, L]
    after = (own.gather(1, starts)[..., None] + order).flatten(1)  # [B, C L]
    return torch.cat([own, after], dim=1).clamp(min=0)


def has_slots(config: PTPConfig, uniforms: Tensor | None, masks: Tensor | None) -> bool:
    """Return whether a forward has slots; refuse inputs of another variant."""
    name, slots, other = ("uniforms", uniforms, masks) if config.reads_uniforms else ("masks", masks, uniforms)
    if other is not None:
        raise ValueError(f"variant={config.variant!r}: slots are passed as {name}=, and nothing else")
    return slots is not None
