"""Functions of `benchmarks/`, which no package holds."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import families_table  # noqa: E402
import gpu  # noqa: E402
import planned  # noqa: E402
import serving_table  # noqa: E402
from analyze import analysis_figure, analyze, drafter_and_data  # noqa: E402

__all__ = ["analysis_figure", "analyze", "drafter_and_data", "families_table", "gpu", "planned", "serving_table"]
