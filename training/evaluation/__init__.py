"""Everything that is measured, in one place: for the demo, cards, benchmarks, the box. Names load when used."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Comparison": "decoding",
    "Completion": "decoding",
    "DecodingMode": "modes",
    "ExpectedAcceptance": "expected",
    "GREEDY": "modes",
    "HeadReport": "reports",
    "MODES": "modes",
    "Measurement": "decoding",
    "TeacherForced": "expected",
    "bits_per_byte": "bits",
    "compare_decoding": "decoding",
    "drafted_flags": "decoding",
    "environment": "machine",
    "hardware": "machine",
    "load_metric": "metrics",
    "read_reports": "reports",
    "repeated_share": "figures",
    "sampled": "modes",
    "write_reports": "reports",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports what is asked for: the metrics need `evaluate`, the other figures do not.

    Raises:
        AttributeError: Nothing of this name is offered here.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
