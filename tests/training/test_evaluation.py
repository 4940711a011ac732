"""Measuring: bits per byte, and decoding with and without drafts on the same prompts."""

import math

import pytest
import torch

from tests.training.conftest import small_model
from tokenahead import EvaByteTokenizer
from tokenahead.training import evaluation
from tokenahead.training.data import ByteWindows, load_corpus
from tokenahead.training.evaluation import GREEDY, bits_per_byte, compare_decoding, sampled

PROMPTS = ["def f(x):\n", "class Words:\n    pass\n"]


@pytest.fixture
def model():
    return small_model().eval()


def test_bits_per_byte_are_the_mean_over_all_windows(model, source):
    windows = ByteWindows(load_corpus(source).held_out, 40)
    nats = [model(w["input_ids"][None], labels=w["input_ids"][None]).head_losses for w in windows_of(windows)]
    expected = (torch.stack(nats).mean(0) / math.log(2)).tolist()
    assert bits_per_byte(model, windows, limit=1000, batch_size=3) == pytest.approx(expected, rel=1e-5)


def windows_of(windows: ByteWindows) -> list[dict[str, torch.Tensor]]:
    return [windows[index] for index in range(len(windows))]


def test_a_limit_takes_windows_from_the_whole_text(model, source):
    windows = ByteWindows(load_corpus(source).train, 40)
    every = -(-len(windows) // 5)
    chosen = [windows[index] for index in range(0, len(windows), every)]
    assert 1 < len(chosen) <= 5 and bits_per_byte(model, windows, limit=5) == pytest.approx(
        bits_per_byte(model, SimpleWindows(chosen), limit=1000), rel=1e-5
    )


class SimpleWindows(list):
    """A list in the place of windows."""


def test_greedy_runs_are_compared_token_by_token(model):
    comparison = compare_decoding(model, EvaByteTokenizer(), PROMPTS, GREEDY, 20)
    result = comparison.result
    assert result.identical is True and not result.do_sample
    assert result.new_tokens == result.plain_new_tokens == 40
    for prompt, completion in zip(PROMPTS, comparison.completions, strict=True):
        inputs = EvaByteTokenizer()(prompt, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=20, return_dict_in_generate=True)
        assert completion.ids == output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        assert sum(completion.drafted) == sum(output.speculation.accepted)
        assert len(completion.drafted) == 20
    assert len(comparison.accepted_by_position) == 3


def test_a_difference_is_found_and_explained(model, monkeypatch):
    complete = evaluation._complete

    def tampered(*args, **kwargs):
        run = complete(*args, **kwargs)
        if kwargs.get("use_mtp") is None:
            run.new_ids[5] = 99 if run.new_ids[5] != 99 else 98
        return run

    monkeypatch.setattr(evaluation, "_complete", tampered)
    comparison = compare_decoding(model, EvaByteTokenizer(), PROMPTS, GREEDY, 12)
    assert comparison.result.identical is False
    for completion in comparison.completions:
        assert completion.difference.startswith(f"token 6 is {completion.ids[5]} and not ")
        assert float(completion.difference.split()[-1]) > 0


def test_an_early_end_is_a_difference_too(model, monkeypatch):
    complete = evaluation._complete

    def shortened(*args, **kwargs):
        run = complete(*args, **kwargs)
        if kwargs.get("use_mtp") is None:
            del run.new_ids[7:]
        return run

    monkeypatch.setattr(evaluation, "_complete", shortened)
    comparison = compare_decoding(model, EvaByteTokenizer(), PROMPTS[:1], GREEDY, 12)
    assert comparison.result.identical is False and "after 7 tokens" in comparison.completions[0].difference


def test_samples_are_drawn_from_the_whole_law_and_not_compared(model, monkeypatch):
    seen = []
    generate = model.generate

    def spy(**kwargs):
        seen.append({key: kwargs[key] for key in ("do_sample", "temperature", "top_k", "use_mtp")})
        return generate(**kwargs)

    monkeypatch.setattr(model, "generate", spy)
    comparison = compare_decoding(model, EvaByteTokenizer(), PROMPTS, sampled(0.7), 8)
    assert comparison.result.identical is None
    assert all(completion.difference is None for completion in comparison.completions)
    assert {entry["use_mtp"] for entry in seen} == {None, False}
    assert all((entry["do_sample"], entry["temperature"], entry["top_k"]) == (True, 0.7, 0) for entry in seen)


def test_samples_follow_from_the_seed(model):
    first, again, other = (
        compare_decoding(model, EvaByteTokenizer(), PROMPTS, sampled(1.0), 12, seed=seed) for seed in (1, 1, 2)
    )
    assert [c.ids for c in first.completions] == [c.ids for c in again.completions]
    assert [c.ids for c in first.completions] != [c.ids for c in other.completions]
