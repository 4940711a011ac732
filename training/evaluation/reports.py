"""Reports of what was measured of one head, of the machine, and the number of threads with which it is fastest."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


_MOST = 8  # on matrices as small as the demo's, further threads would only wait for one another
_WORTHWHILE = 0.95  # more threads must take less than this share of the time that fewer took


@contextmanager
def threads_as_before() -> Iterator[None]:
    """Restore the number of threads at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_fastest_threads(work: Callable[[], object], most: int) -> int:
    """Set the number of threads with which `work` is fastest, trying 1, 2, 4, ... while each is faster.

    Returns:
        The number of threads.
    """
    torch.set_num_threads(1)
    work()  # the first call also sets things up, and is not measured
    count, best = 1, _seconds(work)
    while count < min(most, _MOST):
        more = min(2 * count, most, _MOST)
        torch.set_num_threads(more)
        seconds = _seconds(work)
        if seconds > _WORTHWHILE * best:
            break
        count, best = more, seconds
    torch.set_num_threads(count)
    return count


def _seconds(work: Callable[[], object]) -> float:
    """Return the shorter time of two calls."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def describe_threads() -> str:
    """Return the number of threads in use, in words."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"
