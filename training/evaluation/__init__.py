"""Measurements for the demo, cards, benchmarks and commands. Names are loaded when they are used."""

from ..utils import lazy_names

_HOMES = {
    "Bench": "bench",
    "DraftMeasures": "drafts",
    "ExpectedCalls": "drafts",
    "GREEDY": "decoding",
    "MODES": "decoding",
    "Prompt": "prompts",
    "Protocol": "bench",
    "PromptEncoder": "prompts",
    "drafting_method": "decoding",
    "environment": ".results",
    "hardware": ".results",
    "plain_method": "decoding",
    "rank_accuracies": "drafts",
    "repeated_share": "decoding",
    "results_of": "bench",
    "sampled": "decoding",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
