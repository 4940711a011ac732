"""Which cases of the matrix run by day."""

import pytest

from tests.matrix.life_cycle import LifeCycleConformance

MECHANISMS = {
    "heads-llama",  # a chain
    "ngram-tree-llama",  # a tree
    "eagle-llama",  # a tree that grows, and a cache of the drafter's own
    "evabyte-btree",  # a backbone with a cache of its own
    "suffix-mistral",  # a memory of texts
    "ptp-categorical",  # parallel drafts
    "cascade-qwen3",
    "assistant-llama",
}
ALL = {"test_greedy"}
"""What every entry does by day."""
FEW = {
    "test_what_decodes_plainly", "test_in_pipeline", "test_streamers", "test_chunked_prefill",
    "test_several_sequences", "test_hidden_states", *vars(LifeCycleConformance),
}  # fmt: skip
"""Habits that meet the loop or the model alone: of two entries by day, a head and an assistant."""
SOME = {
    "test_kit", "test_adaptive", "test_draft_length", "test_saved", "test_scores", "test_confidence_threshold",
    "test_assisted_loop_of_transformers",
}  # fmt: skip
"""Habits of one head, one look-up and one model by day."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Other habits run by day for one entry of each mechanism."""
    for item in items:
        name = getattr(item.cls, "name", None) if item.cls is not None else None
        if name is None or item.originalname in ALL:
            continue
        by_day = {"heads-llama", "assistant-llama"} if item.originalname in FEW else MECHANISMS
        if item.originalname in SOME or "[token]" in item.name:
            by_day = {"heads-llama", "suffix-mistral", "evabyte-btree"}
        if name not in by_day:
            item.add_marker("nightly")
