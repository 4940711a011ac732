"""Index tensors that are made once: a decoding cycle must not make them from Python numbers."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=256)
def cached_arange(length: int, device: torch.device) -> torch.Tensor:
    """Return 0, 1, .., length - 1, made once; never write to it."""
    with torch.inference_mode(False):  # it may serve a later call that is not in inference mode
        return torch.arange(length, device=device)


def cached_range(start: int, length: int, device: torch.device) -> torch.Tensor:
    """Return start, start + 1, .., start + length - 1, a slice of a longer `cached_arange`."""
    first = max(start, 0)
    found = cached_arange(1 << (first + length).bit_length(), device)[first : first + length]
    return found if start >= 0 else found + start


@lru_cache(maxsize=4096)
def numbers(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return some numbers as a tensor, copied to the device once; never write to it."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.long, device=device)


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the tensor on a device and, where one is given, in a dtype; itself where it is that already."""
    dtype = dtype or tensor.dtype
    return tensor if tensor.device == device and tensor.dtype == dtype else tensor.to(device, dtype)


def selected_positions(states: torch.Tensor, logits_to_keep: int | torch.Tensor) -> torch.Tensor:
    """Return the states of the positions in `logits_to_keep`; older transformers lack a function for it.

    Args:
        states: [B, T, d].
        logits_to_keep: The last so many positions (0: all); or positions [K] of every sequence, or [B, K] of each; or a
            choice [B, T] bool.

    Returns:
        [B, K, d]; [N, d] for a choice of N.
    """
    if isinstance(logits_to_keep, int):
        return states[:, -logits_to_keep:] if logits_to_keep else states
    if logits_to_keep.dtype == torch.bool and logits_to_keep.dim() == 2:
        return states[logits_to_keep]
    if logits_to_keep.dim() == 2:
        return torch.take_along_dim(states, logits_to_keep[..., None], dim=1)
    return states[:, logits_to_keep]
