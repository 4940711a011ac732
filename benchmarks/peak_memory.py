"""The peak memory of a training step, in a process of its own: what the benchmarks of memory share.

Freed memory is returned to the system at once (set before torch starts), so that peaks are those of tensors. The peak
of the resident memory is set back and read through /proc (Linux only).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "65536")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")

import torch

STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


class Memory(NamedTuple):
    """What one process measured, in MiB; `parameters` is a number of parameters.

    Attributes:
        parameters: That are trained.
        kept: Models, gradients and optimiser state: what stays between steps, and the gradients of a step.
        above: The peak of a step above `kept`.
    """

    parameters: int
    kept: float
    above: float


def mebibytes(name: str) -> float:
    """A field of the process's memory: VmRSS (now) or VmHWM (the peak since it was set back)."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def peak_of(module: torch.nn.Module, step: Callable[[], object]) -> Memory:
    """The peak of `step`, which trains `module`: two steps first, so that the optimiser's state exists."""
    for _ in range(2):
        step()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    kept = mebibytes("VmRSS") + 4 * parameters / 2**20  # between steps there are no gradients
    RESET.write_text("5")
    step()
    return Memory(parameters, kept, mebibytes("VmHWM") - kept)


def _work(results: object, measure: Callable[..., Memory], arguments: tuple) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results.put(tuple(measure(*arguments)))


def in_own_process(measure: Callable[..., Memory], *arguments: object) -> Memory:
    """`measure(*arguments)` in a fresh process with one thread."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_work, args=(results, measure, arguments))
    process.start()
    found = results.get()
    process.join()
    return Memory(*found)
