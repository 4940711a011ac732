"""Functions of `benchmarks/`, which no package holds."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import defaults  # noqa: E402
import drafters_table  # noqa: E402
import families_table  # noqa: E402
import gpu  # noqa: E402
import long_answers  # noqa: E402
import other_loops  # noqa: E402
import planned  # noqa: E402
import serving  # noqa: E402
import spec_bench  # noqa: E402
import training_tables  # noqa: E402
from analyze import analyze, drafter_and_data  # noqa: E402

__all__ = [
    "ROOT",
    "analyze",
    "defaults",
    "drafter_and_data",
    "drafters_table",
    "families_table",
    "gpu",
    "long_answers",
    "other_loops",
    "planned",
    "serving",
    "spec_bench",
    "training_tables",
]
