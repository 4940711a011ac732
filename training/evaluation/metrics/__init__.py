"""The figures as metrics of the `evaluate` library: each file is one metric, which loads without a network."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ...extras import needs_extra

if TYPE_CHECKING:
    from evaluate import Metric

METRICS = ("acceptance_by_position", "bits_per_byte", "expected_acceptance", "repetition", "tokens_per_call")
"""Names of the metrics, and of their files."""


def load_metric(name: str) -> Metric:
    """A metric of this package, as `evaluate.load(metric_path(name))` gives it, too.

    Args:
        name: One of `METRICS`.

    Raises:
        ValueError: Another name.
        MissingExtraError: `evaluate` is not installed.

    Example:
        >>> load_metric("tokens_per_call").compute(predictions=[[2, 0, 3]])
        {'tokens_per_call': 2.25, 'lowest': 2.25, 'highest': 2.25}
    """
    _check(name)
    with needs_extra("train", f"the metric {name!r}"):
        module = import_module(f".{name}", __name__)
    return getattr(module, "".join(map(str.capitalize, name.split("_"))))()


def metric_path(name: str) -> str:
    """The file of a metric, for `evaluate.load`.

    Raises:
        ValueError: Not one of `METRICS`.
    """
    _check(name)
    return str(Path(__file__).with_name(f"{name}.py"))


def _check(name: str) -> None:
    if name not in METRICS:
        raise ValueError(f"name={name!r} is no metric of tokenahead; choose one of {', '.join(METRICS)}")
