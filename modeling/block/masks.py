"""What the rows of a block see: of the block itself, and of the context before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ...configuration.block import BlockDrafterConfig
from ...generation.tensors.masks import cached_arange, model_mask


def window_of(config: BlockDrafterConfig, kind: str) -> int | None:
    """Return how far back rows of a kind of layer see, themselves included; None: as far as there are columns."""
    return config.sliding_window if kind == "sliding_attention" else None


def seen_rows(config: BlockDrafterConfig, kind: str, device: torch.device) -> Tensor:
    """Return which rows of its block each row sees in layers of a kind, [S, S] bool."""
    rows, window = cached_arange(config.block_size, device), window_of(config, kind)
    distance = rows[:, None] - rows  # [S, S]
    is_causal = config.sliding_causal if kind == "sliding_attention" else config.causal
    seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def sees_all(config: BlockDrafterConfig) -> bool:
    """Return whether every row sees all of its block and its context in every layer."""
    return {*(config.layer_types or ())} == {"full_attention"} and not config.causal


def block_masks(
    config: BlockDrafterConfig, width: int, real: Tensor | None, rows: Tensor, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """Return the masks of one block behind a context, by kind of layer.

    Args:
        config: The drafter's.
        width: C, columns of the context.
        real: [B, C] bool, which of them are no padding; None: all.
        rows: [B, S, d] of the block.
        dtype: Of the masks, where they are added to scores.
    """
    kinds = [*dict.fromkeys(config.layer_types or ())]
    if real is None and sees_all(config):
        return dict.fromkeys(kinds)
    batch, size, device = len(rows), config.block_size, rows.device
    column = cached_arange(width, device) if real is None else real.to(device).long().cumsum(1) - 1  # [C] or [B, C]
    ends = column.new_tensor(width).expand(batch) if real is None else column[:, -1] + 1  # [B]
    masks: dict[str, Tensor | None] = {}
    for kind in kinds:
        window = window_of(config, kind) or width + size + 1
        ahead = ends[:, None, None] + cached_arange(size, device)[:, None] - column.expand(batch, -1)[:, None]
        before = ahead < window  # [B, S, C]
        before = before if real is None else before & real.to(device)[:, None]
        within = seen_rows(config, kind, device).expand(batch, -1, -1)  # [B, S, S]
        masks[kind] = model_mask(torch.cat([before, within], -1), config, dtype)
    return masks
