"""Measurements for the demo, cards, benchmarks and commands. Names are loaded when they are used."""

from ..utils import lazy_names

_NAMES = {
    ".results": ("environment", "hardware"),
    "bench": ("Bench", "Protocol"),
    "decoding": ("DecodingMode", "GREEDY", "MODES", "repeated_share", "sampled"),
    "drafts": ("DraftMeasures", "rank_accuracies"),
    "expected": ("ExpectedCalls",),
    "methods": ("drafting_method", "plain_method"),
    "prompts": ("Prompt", "PromptEncoder"),
    "summary": ("completions_of", "results_of"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
