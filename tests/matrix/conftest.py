"""Which cases of the matrix run by day."""

import pytest

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
HABITS = {"test_greedy", "test_sampled", "test_rows_draft_what_they_draft_alone", "test_continuation"}
"""Of the other entries, by day."""
KITS = {"heads-llama", "suffix-mistral"}
"""The entries on which `tokenahead.testing` tries all calls that it knows, by day."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """All habits of one entry for each mechanism run by day, and of the others a few."""
    for item in items:
        name = getattr(item.cls, "name", None) if item.cls is not None else None
        if name is None:
            continue
        by_day = KITS if item.originalname == "test_kit" else MECHANISMS
        if name not in by_day and item.originalname not in HABITS:
            item.add_marker("nightly")
