"""Everything that is measured, in one place: for the demo, cards, benchmarks, the box. Names load when used."""

from ..lazy import lazy_names

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
    "rank_accuracies": "ranks",
    "read_reports": "reports",
    "repeated_share": "figures",
    "sampled": "modes",
    "write_reports": "reports",
}
__all__ = list(_HOMES)
# imported only when asked for: the metrics need `evaluate`, the other figures do not
__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
