"""Masks that say of every position what it sees, as backbones of transformers take them."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig


def given_mask(visible: torch.Tensor, config: PreTrainedConfig, dtype: torch.dtype | None) -> torch.Tensor:
    """Return what positions see of columns, [B, F, W] bool, as a model takes it, [B, 1, F, W].

    Only "sdpa" reads truth values; elsewhere the mask is added to the scores, where True would mean 1. Without a dtype
    it stays what it is.
    """
    mask = visible[:, None]
    return mask if dtype is None or config._attn_implementation == "sdpa" else additive_mask(mask, dtype)


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bool mask as the finite values that attention adds: rows that see nothing stay finite."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
