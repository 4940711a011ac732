"""Reports of what was measured of one head, and of the machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ..results import DecodingResult, MeasuredResults
from ..utils import replace_text


@dataclass(frozen=True)
class HeadReport:
    """Measurements of a head on its backbone.

    Attributes:
        head_type: Family of the head.
        window: n.
        rank: r (1 for FF).
        parameters: Number of the head's parameters.
        measured: Its measurements, those of single prompts first.
    """

    head_type: str
    window: int
    rank: int
    parameters: int
    measured: MeasuredResults

    @property
    def name(self) -> str:
        """Family, and rank if it has one."""
        return self.head_type if self.rank == 1 else f"{self.head_type} {self.rank}"

    @property
    def single(self) -> list[DecodingResult]:
        """The results of one prompt at a time."""
        return [row for row in self.measured.results if row.batch_size == 1]

    @classmethod
    def of(cls, model: Any, measured: MeasuredResults) -> HeadReport:
        """Return the report of a model with a head and of its measurements."""
        parameters = sum(parameter.numel() for parameter in model.head.parameters())
        config = model.config.mtp_head
        return cls(config.head_type, model.window, config.rank, parameters, measured)


def write_reports(path: Path, reports: Sequence[HeadReport], **more: object) -> Path:
    """Write reports as JSON, by family."""
    figures = {"heads": {report.head_type: asdict(report) for report in reports}} | more
    return replace_text(path, json.dumps(figures, indent=1, allow_nan=False) + "\n")


def read_reports(path: Path) -> list[HeadReport]:
    """Read what `write_reports` wrote.

    Raises:
        ValueError: Incomplete results.
    """
    heads = json.loads(path.read_text(encoding="utf-8"))["heads"].values()
    return [HeadReport(**fields | {"measured": MeasuredResults.from_fields(fields["measured"])}) for fields in heads]


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
