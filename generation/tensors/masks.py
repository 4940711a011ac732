"""Masks of what every position sees, and index tensors that are made once.

transformers' "sdpa" repeats keys and values for every query head where there is a mask. With a `model_mask`, the
queries of a group lie side by side instead (`backbone.cache.grouped_attention`). Where rows are joined without padding,
it is called for one document at a time, or for a few short ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import sdpa_mask

PACKED = "packed_for_groups"  # attribute of a `model_mask`: its forms for grouped queries, made by the first layer


def check_attention(config: PreTrainedConfig, needing: str) -> None:
    """Refuse an implementation of attention without dense masks; `needing` names what needs them in the message."""
    used = config.get_text_config()._attn_implementation
    if used not in ("eager", "sdpa"):
        raise ValueError(f"{config.model_type}: {needing} need attn_implementation='sdpa' or 'eager', not {used!r}")


def model_mask(visible: Tensor, config: PreTrainedConfig, dtype: torch.dtype | None) -> Tensor:
    """Return visibility [B, F, W] bool as the mask [B, 1, F, W] that a model takes; bool without a dtype.

    Only "sdpa" reads truth values; elsewhere the mask is added to the scores, where True would mean 1.
    """
    mask = visible[:, None]  # [B, 1, F, W]
    if dtype is not None and config._attn_implementation != "sdpa":
        return additive_mask(mask, dtype)
    setattr(mask, PACKED, {})
    return mask


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as the finite values that attention adds, so that the softmax over no column is finite."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


# attribute of a mask [1, 1, N, N]: the first token of every block, the one behind its last, and its own mask
_BLOCKS = "blocks_of_documents"
_SHORT = 64  # tokens up to which documents share a block: a call costs as much as what it would leave out


def by_documents(mask: Tensor) -> Tensor:
    """Return a mask [1, 1, N, N] bool, noting where no token sees one before; an accelerator waits here twice."""
    size, visible = mask.shape[-1], mask[0, 0]
    neighbours = torch.stack([~visible.diagonal(-1), visible.diagonal(1)])  # [2, N - 1]
    found = neighbours.nonzero().tolist()
    documents = [0, *(place + 1 for looks_ahead, place in found if not looks_ahead), size]
    edges = [0]
    for start, stop in pairwise(documents):
        if stop - edges[-1] > _SHORT and start > edges[-1]:
            edges.append(start)
    if len(edges) == 1:
        return mask
    ends = [*edges[1:], size]
    sees_first = visible[[end - 1 for end in ends], edges].tolist()  # false behind a window
    plain, starts = not any(looks_ahead for looks_ahead, _ in found), {*documents}
    blocks = []
    for start, end, is_full in zip(edges, ends, sees_first):
        is_causal = plain and is_full and starts.isdisjoint(range(start + 1, end))
        blocks.append((start, end, None if is_causal else mask[:, :, start:end, start:end]))
    setattr(mask, _BLOCKS, blocks)
    return mask


def mask_by_documents(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return transformers' mask for "sdpa", with the blocks of rows that are joined without padding."""
    mask = sdpa_mask(*args, **kwargs)
    if mask is None or kwargs.get("allow_is_causal_skip", True) or kwargs.get("use_vmap"):
        return mask
    is_joined = mask.shape[0] == 1 and mask.shape[-2] == mask.shape[-1] > _SHORT  # one sequence, without a cache
    if not is_joined or kwargs.get("attention_mask") is not None or torch.compiler.is_compiling():
        return mask
    return by_documents(mask)


def blocks_of(mask: Tensor | None) -> list[tuple[int, int, Tensor | None]] | None:
    """Return the blocks that `by_documents` has noted."""
    return getattr(mask, _BLOCKS, None)


AttentionMaskInterface.register("sdpa", mask_by_documents)
P = ParamSpec("P")
R = TypeVar("R")
_READ: list[list[object]] = []  # what is read of all that is made once, of every recording that is going on


def made_once(function: Callable[P, R], newest: int = 256) -> Callable[P, R]:
    """Return a function that makes its newest results once, tensors that nobody writes to; see `constants`."""
    usual = torch.inference_mode(False)(function)  # they may serve a later call that is not in inference mode
    cached = cast(Callable[P, R], lru_cache(maxsize=newest)(usual))

    @wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        result = cached(*args, **kwargs)
        for read in _READ:
            read.append(result)
        return result

    return made


@contextmanager
def constants() -> Iterator[list[object]]:
    """Collect what is read of all that is `made_once`: who reads an address again must keep what is there."""
    read: list[object] = []
    _READ.append(read)
    try:
        yield read
    finally:
        _READ.pop()


@made_once
def cached_arange(length: int, device: torch.device) -> Tensor:
    """Return 0, 1, .., length - 1, made once; never write to it."""
    return torch.arange(length, device=device)


def cached_range(start: int, length: int, device: torch.device) -> Tensor:
    """Return start, start + 1, .., start + length - 1, a slice of a longer `cached_arange`."""
    first = max(start, 0)
    columns = cached_arange(1 << (first + length).bit_length(), device)[first : first + length]
    return columns if start >= 0 else columns + start


@partial(made_once, newest=4096)
def numbers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers as a tensor, copied to the device once; never write to it."""
    return torch.tensor(values, dtype=torch.long, device=device)


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensor on a device and, unless None, in a dtype; itself where nothing changes."""
    dtype = dtype or tensor.dtype
    return tensor if tensor.device == device and tensor.dtype == dtype else tensor.to(device, dtype)


def selected_positions(states: Tensor, logits_to_keep: int | Tensor) -> Tensor:
    """Return the states [B, T, d] of the positions in `logits_to_keep`: [B, K, d], or [N, d] for a choice of N.

    These are a number of last positions (0: all); positions [K], or [B, K] of each sequence; or a choice [B, T] bool.
    """
    if isinstance(logits_to_keep, int):
        return states[:, -logits_to_keep:] if logits_to_keep else states  # [B, K, d]
    if logits_to_keep.dtype == torch.bool and logits_to_keep.dim() == 2:
        return states[logits_to_keep]  # [N, d]
    if logits_to_keep.dim() == 2:
        return torch.take_along_dim(states, logits_to_keep[..., None], dim=1)  # [B, K, d]
    return states[:, logits_to_keep]
