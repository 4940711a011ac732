"""Measurements for the demo, cards, benchmarks and commands. Names are loaded when they are used."""

from ..utils import lazy_names

_HOMES = {
    "Comparison": "summary",
    "Completion": "summary",
    "DecodingMode": "decoding",
    "DraftMeasures": "drafts",
    "ExpectedCalls": "expected",
    "GREEDY": "decoding",
    "MODES": "decoding",
    "Measurement": "summary",
    "compare_decoding": "summary",
    "drafted_flags": "decoding",
    "environment": ".results",
    "hardware": ".results",
    "rank_accuracies": "drafts",
    "repeated_share": "decoding",
    "sampled": "decoding",
}
__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
