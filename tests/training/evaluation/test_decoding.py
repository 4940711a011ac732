"""Decoding with and without drafts on the same prompts."""

from types import SimpleNamespace

import pytest

from tests.training.conftest import small_model
from tokenahead import EvaByteTokenizer
from tokenahead.training.evaluation import MODES
from tokenahead.training.evaluation import bench as bench_module
from tokenahead.training.evaluation.bench import Bench, Protocol
from tokenahead.training.evaluation.decoding import GREEDY, sampled
from tokenahead.training.evaluation.methods import drafting_method, plain_method
from tokenahead.training.evaluation.prompts import Prompt, PromptEncoder
from tokenahead.training.evaluation.summary import completions_of, results_of

PROMPTS = ["def f(x):\n", "class Words:\n    pass\n"]


@pytest.fixture
def model():
    return small_model().eval()


def compare(drafters, prompts, modes, new_tokens, on_unit=lambda done, count: None, batch_size=1, **options):
    """Results and completions of every drafter and way of decoding."""
    first, *_ = drafters.values()
    methods = [plain_method(first), *(drafting_method(*named) for named in drafters.items())]
    protocol = Protocol(modes, (batch_size,), new_tokens, **options)
    bench = Bench(methods, PromptEncoder(EvaByteTokenizer(), chats=False), protocol, control=False)
    bench.run([Prompt(str(number), (text,)) for number, text in enumerate(prompts)], on_unit)
    rows = {(row.method, row.decoding): row for row in results_of(bench)}
    return {
        name: [
            SimpleNamespace(mode=mode, result=rows[name, mode.name], completions=[*completions_of(bench, name, mode)])
            for mode in modes
        ]
        for name in drafters
    }


def compare_decoding(model, prompts, mode, new_tokens, **options):
    return compare({"it": model}, prompts, [mode], new_tokens, **options)["it"][0]


def test_greedy_runs_are_compared_token_by_token(model):
    comparison = compare_decoding(model, PROMPTS, GREEDY, 20)
    result = comparison.result
    assert result.identical is True and not result.do_sample
    assert result.new_tokens == result.plain_new_tokens == 40
    for prompt, completion in zip(PROMPTS, comparison.completions, strict=True):
        inputs = EvaByteTokenizer()(prompt, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=20, return_dict_in_generate=True)
        assert completion.ids == output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        assert sum(completion.drafted) == sum(output.speculation.accepted)
        assert len(completion.drafted) == 20
    assert len(comparison.result.accepted_by_position) == 3


def tampering(monkeypatch, change):
    """Change what is decoded with drafts."""
    decode = bench_module.decode

    def tampered(method, *args):
        run = decode(method, *args)
        if method.name != "plain":
            change(run.ids[0])
        return run

    monkeypatch.setattr(bench_module, "decode", tampered)


def test_an_early_end_is_a_difference_too(model, monkeypatch):
    tampering(monkeypatch, lambda ids: ids.__delitem__(slice(7, None)))
    result = compare_decoding(model, PROMPTS[:1], GREEDY, 12).result
    assert result.identical is False and (result.differing, result.near_ties) == (1, 0)


def test_samples_are_drawn_from_the_whole_distribution_and_not_compared(model, monkeypatch):
    seen = []
    generate = model.generate

    def spy(**kwargs):
        seen.append({key: kwargs.get(key) for key in ("do_sample", "temperature", "top_k", "use_mtp")})
        return generate(**kwargs)

    monkeypatch.setattr(model, "generate", spy)
    comparison = compare_decoding(model, PROMPTS, sampled(0.7), 8)
    assert comparison.result.identical is None
    assert {entry["use_mtp"] for entry in seen} == {None, False}
    assert all((entry["do_sample"], entry["temperature"], entry["top_k"]) == (True, 0.7, 0) for entry in seen)


def test_every_way_sees_the_same_prompts_wherever_the_time_ends(model, monkeypatch):
    other = small_model(1).eval()
    other.model.load_state_dict(model.model.state_dict())
    other.lm_head.load_state_dict(model.lm_head.state_dict())
    clock = iter(range(0, 10_000, 10))  # every look at the clock takes ten seconds
    monkeypatch.setattr(bench_module.time, "monotonic", lambda: next(clock))
    done = []
    drafters, note = {"one": model, "other": other}, lambda *numbers: done.append(numbers)
    found = compare(drafters, PROMPTS * 4, MODES, 12, note, seconds=55)
    assert done[0] == (0, 24) and done[-1] == (3, 24)  # a unit takes twenty seconds; one of every way is measured
    assert list(found) == ["one", "other"]
    for comparisons in found.values():
        assert [c.mode.name for c in comparisons] == [mode.name for mode in MODES]
        assert all(len(c.completions) == len(c.result.per_prompt) == 1 for c in comparisons)
        assert comparisons[0].result.identical is True
    assert found["one"][0].result.plain_seconds == found["other"][0].result.plain_seconds


def test_a_batch_gives_the_texts_of_its_rows_and_counts_a_call_for_every_row(model):
    alone = compare_decoding(model, PROMPTS, GREEDY, 12)
    together = compare_decoding(model, PROMPTS, GREEDY, 12, batch_size=2)
    assert [c.ids for c in together.completions] == [c.ids for c in alone.completions]
    assert together.result.name == "it, greedy, batch 2" and together.result.batch_size == 2
    assert together.result.per_prompt == alone.result.per_prompt
    assert together.result.backbone_calls == alone.result.backbone_calls
    assert together.result.identical is True
