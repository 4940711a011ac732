"""Columns of a batch, chosen row by row. A leaf."""

from __future__ import annotations

import torch


def at_columns(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`values[b, columns[b]]` for values [B, T, ...] and columns [B, ...]."""
    rows = torch.arange(len(values), device=values.device).view(-1, *[1] * (columns.dim() - 1))
    return values[rows, columns]
