"""x"""

from __future__ import annotations

import torch


def untied(tensors: dict[str, torch.Tensor], heads: int, blocks: int) -> tuple[bool, dict[str, torch.Tensor]]:
    """Whether the blocks of every head are copies of one, and the tensors without the copies.

    Args:
        tensors: Among them `blocks.{k}.{j}.linear.{weight, bias}`.
        heads: How many k.
        blocks: How many j.
    """
    names = [(f"blocks.{k}.0.linear.{part}", f"blocks.{k}.{j}.linear.{part}")
             for k in range(heads) for j in range(1, blocks) for part in ("weight", "bias")]  # fmt: skip
    copies = {copy for first, copy in names if _equal(tensors.get(first), tensors.get(copy))}
    if not names or len(copies) < len(names):
        return False, tensors
    return True, {name: tensor for name, tensor in tensors.items() if name not in copies}


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first, second)
