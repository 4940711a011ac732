"""Speculative and plain greedy decoding write one text, for any combination of options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from tests.conftest import explores
from tests.matrix.models import Entry, entry
from tests.models import left_padded

MODELS = [
    "evabyte-ff",
    "evabyte-btree",
    "heads-llama",
    "heads-gemma3",
    "heads-gpt2",
    "eagle-llama",
    "deepseek-modules",
    "ptp-one_hot",
    "ptp-categorical",
    "ptp-mask",
    "ngram-tree-llama",
    "assistant-llama",
]
EXAMPLES = 40
DICT = dict(return_dict_in_generate=True, output_scores=True)


class LastTokens(StoppingCriteria):
    """Ends a row behind certain tokens."""

    def __init__(self, ends: set[int]) -> None:
        self.ends = ends

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([int(row[-1]) in self.ends for row in input_ids])


class ByLength(LogitsProcessor):
    """Prefers tokens by row and length."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        liked = (torch.arange(len(input_ids))[:, None] + input_ids.shape[1]) % 4
        return scores + (torch.arange(scores.shape[1]) % 4 == liked) * 1.5


def prompts(size: int) -> st.SearchStrategy:
    """One to four rows of several lengths; id 0 is padding, which some backbones embed as zeros."""
    return st.lists(st.lists(st.integers(1, size - 1), min_size=1, max_size=14), min_size=1, max_size=4)


def targets(size: int) -> st.SearchStrategy:
    """Options that say what the text is; `ends_at` and `stops_at` are positions whose tokens end a row."""
    tokens, places = st.integers(0, size - 1), st.lists(st.integers(0, 19), min_size=1, max_size=2)
    optional = {
        "repetition_penalty": st.sampled_from([0.8, 1.3, 2.0]),
        "no_repeat_ngram_size": st.integers(2, 3),
        "suppress_tokens": st.lists(tokens, min_size=1, max_size=3),
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=3),
        "logits_processor": st.builds(lambda: LogitsProcessorList([ByLength()])),
        "prefill_chunk_size": st.integers(1, 9),
        "min_new_tokens": st.integers(1, 8),
        "ends_at": places,
        "stops_at": places,
    }
    return st.fixed_dictionaries({"max_new_tokens": st.integers(1, 20)}, optional=optional)


def drafts(name: str) -> st.SearchStrategy:
    """Options that say how it is speculated, which the text does not depend on."""
    optional = {
        "num_assistant_tokens": st.integers(1, 6),
        "num_assistant_tokens_schedule": st.sampled_from(["constant", "adaptive"]),
        "assistant_confidence_threshold": st.sampled_from([0.2, 0.6]),
        "certain": st.fixed_dictionaries({"do_sample": st.just(True), "top_k": st.just(1)}),
        "verification": st.sampled_from(["block", "token"] + ["coupled"] * name.startswith("ptp")),
        "split": st.integers(1, 19),
    }
    if name.startswith("ptp"):
        optional["slot_budget"] = st.integers(2, 12) | st.sampled_from(["linear", "quadratic"])
    if name.startswith("ngram"):
        optional["draft_tree"] = st.fixed_dictionaries({"top_k": st.integers(1, 4)})
    if name.startswith("evabyte"):
        optional["draft_tree"] = st.fixed_dictionaries({"top_k": st.integers(1, 4), "total_tokens": st.integers(3, 16)})
    return st.fixed_dictionaries({}, optional=optional)


def with_ends(entry: Entry, inputs: dict[str, torch.Tensor], asked: dict[str, Any]) -> dict[str, Any]:
    """Options of `generate`: ends are tokens that the text does hold."""
    options = {name: value for name, value in asked.items() if name not in ("ends_at", "stops_at")}
    if "min_new_tokens" in asked or "stops_at" in asked:  # transformers fills up ended rows only where there is an eos
        options["eos_token_id"] = entry.vocabulary - 1
    if "ends_at" in asked or "stops_at" in asked:
        text = entry.plain(inputs, **options)[:, inputs["input_ids"].shape[1] :].flatten().tolist()
        ends, stops = ([text[place % len(text)] for place in asked.get(name, [])] for name in ("ends_at", "stops_at"))
        options |= {"eos_token_id": ends} if ends else {}
        options |= {"stopping_criteria": StoppingCriteriaList([LastTokens(set(stops))])} if stops else {}
    return options


def in_two_calls(entry: Entry, inputs: dict[str, torch.Tensor], split: int, options: dict[str, Any]) -> Any:
    """The same text, the second part of it from the cache that the first call returned."""
    count = options["max_new_tokens"]
    first = entry.generate(inputs, **(options | {"max_new_tokens": split}), **DICT)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, split), value=1)
    longer = {"input_ids": first.sequences, "attention_mask": mask, "past_key_values": first.past_key_values}
    return entry.generate(longer, **(options | {"max_new_tokens": count - split}), **DICT)


def compare(entry: Entry, rows: list[list[int]], asked: dict[str, Any], how: dict[str, Any]) -> None:
    """One text, and one score per step."""
    inputs = left_padded([torch.tensor(row) for row in rows])
    options = with_ends(entry, inputs, asked)
    expected = entry.plain(inputs, **options, **DICT)
    split, how = how.get("split", 99), {name: value for name, value in how.items() if name != "split"}
    how |= how.pop("certain", {})
    if split < options["max_new_tokens"] and "eos_token_id" not in options:
        out = in_two_calls(entry, inputs, split, options | how)
    else:
        out = entry.generate(inputs, **options, **how, **DICT)
    assert torch.equal(out.sequences, expected.sequences)
    if "do_sample" not in how and "eos_token_id" not in options:
        steps = expected.scores[-len(out.scores) :]
        torch.testing.assert_close(out.scores, steps, atol=5e-4, rtol=1e-3)


@pytest.mark.by_day("evabyte-btree", "ptp-categorical")
@pytest.mark.parametrize(("number", "name"), list(enumerate(MODELS)), ids=MODELS)
def test_one_text(number, name, request):
    model = entry(name)

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(prompts(model.vocabulary), targets(model.vocabulary), drafts(name))
    def check(rows: list[list[int]], asked: dict[str, Any], how: dict[str, Any]) -> None:
        compare(model, rows, asked, how)

    check() if explores(request.config) else seed(number)(check)()
