"""The repair of vLLM's rejection sampler on CPUs, for who calls `register`. Importing this module needs no vLLM.

docs/upstream.md describes the defect, of vLLM 0.32.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch

logger = logging.getLogger(__name__)

_SAMPLER, _EXPAND, _CUT = "vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens", "apply_top_k_top_p"
_PLATFORMS = "vllm.platforms"


def register() -> None:
    """Repair sampled requests with drafts of this process's vLLM, on CPUs and for every drafter.

    To be called before the engine starts, in its process or in the one that forks it; or by vLLM in every process, as
    an entry point of the group `vllm.general_plugins` of a package of yours. Nothing is replaced where vLLM is right.
    """
    if not importlib.import_module(_PLATFORMS).current_platform.is_cpu():
        return
    sampler = importlib.import_module(_SAMPLER)
    original = getattr(sampler, _EXPAND, None)
    if original is None:  # another version, which does it otherwise
        return

    def first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # at the first call, as vLLM installs its kernels for CPUs later than plugins are called
        setattr(sampler, _EXPAND, original)
        repair_sampler(x.device)
        return getattr(sampler, _EXPAND)(x, *args, **kwargs)

    setattr(sampler, _EXPAND, first)


def repair_sampler(device: torch.device) -> None:
    """Replace the wrong functions of vLLM's rejection sampler on CPUs, with a warning.

    The CPU kernel of 0.32 that expands values of requests (`_expand_kernel_impl` in `vllm.utils.cpu_triton_utils`)
    writes into an int64 copy, which is dropped: the sampler reads uninitialised memory for temperatures, `top_k` and
    `top_p`. And in a step without drafts, as after a prompt, `top_k` takes the maximum of an empty tensor.
    """
    sampler = importlib.import_module(_SAMPLER)
    original = getattr(sampler, _EXPAND, None)
    if original is None:  # another version, which does it otherwise
        return
    ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
    values = torch.rand(2, device=device)  # drawn: freed memory may hold the values of an earlier trial
    if torch.equal(original(values, ends, 3), values[[0, 1, 1]]):
        return
    setattr(sampler, _EXPAND, _expand)
    cut = getattr(sampler, _CUT)
    setattr(sampler, _CUT, lambda logits, k, p: cut(logits, k, p) if len(logits) else logits)
    logger.warning("tokenahead: %s.%s loses temperatures on %s; replaced", _SAMPLER, _EXPAND, device)


def _expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return values [requests] as values [tokens], one for every drafted token; names as in vLLM."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
