"""The circumstances of a measurement: versions, processor, threads, load."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers


def environment() -> dict[str, str | int | float]:
    """Return versions, processor, cores, threads, and the load average of the last minute, by name."""
    facts: dict[str, str | int | float] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    if hasattr(os, "getloadavg"):
        facts["load average, 1 min"] = round(os.getloadavg()[0], 2)
    return facts


def hardware() -> str:
    """Return the processor and the number of threads, in words."""
    return f"{processor()}, {describe_threads()}"


def processor() -> str:
    """Return the processor's name, or at least its architecture."""
    named = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name")
    return named or _of_linux() or platform.processor() or platform.machine() or "unknown processor"


def _of_linux() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return ""


def describe_threads() -> str:
    """Return the number of threads in use, in words."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"
