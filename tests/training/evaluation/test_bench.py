"""`tokenahead bench`: every method compared with plain decoding, what is refused, and what an interruption leaves."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.every_model import llama, moved_heads
from tests.training.conftest import small_model
from tokenahead import EagleHead, EvaByteTokenizer, cli
from tokenahead.generation.call.sequences import acceptance_by_position
from tokenahead.model_cards import MeasuredResults
from tokenahead.training.evaluation import bench as bench_module
from tokenahead.training.evaluation.bench import (
    BLEU,
    EXACT,
    Bench,
    Protocol,
    completions_of,
    quality_of,
    result_of,
    results_of,
)
from tokenahead.training.evaluation.decoding import (
    GREEDY,
    MODES,
    Row,
    drafting_method,
    methods_of,
    named_method,
    plain_method,
    repeated_share,
    sampled,
)
from tokenahead.training.evaluation.lossless import block_error
from tokenahead.training.evaluation.prompts import Prompt, PromptEncoder, groups_of, read_prompts

ROWS = [
    {"question_id": 81, "category": "writing", "turns": ["def f(x):", "and g?"]},
    {"question_id": 82, "category": "code", "turns": ["import os"]},
    {"question_id": 83, "category": "code", "turns": ["class A:"]},
]
TEXTS = ["def f(x):\n", "class Words:\n    pass\n"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    backbone = llama(vocab_size=320, max_position_embeddings=512)
    backbone.save_pretrained(root / "base")
    EvaByteTokenizer().save_pretrained(root / "base")
    moved_heads(backbone).save_pretrained(root / "heads", remote_code=None)
    torch.manual_seed(0)
    EagleHead.from_backbone(backbone).save_pretrained(root / "eagle", remote_code=None)
    moved_heads(llama(vocab_size=64)).save_pretrained(root / "other", remote_code=None)
    write(root / "prompts.jsonl", ROWS)
    return root


def run(folders, out, *words) -> int:
    given = ["--model", folders / "base", "--prompts", folders / "prompts.jsonl", "--new-tokens", "12"]
    with pytest.raises(SystemExit) as ended:
        cli.main(list(map(str, ["bench", *given, "--output", out, *words])))
    return ended.value.code or 0


def results_in(out) -> MeasuredResults:
    return MeasuredResults.from_json(out / "results.json")


def bench_of(model, methods, modes=(GREEDY,), prompts=TEXTS, new_tokens=12, **options) -> Bench:
    """A bench of single turns that has run."""
    asked = [Prompt(str(number), (text,) if isinstance(text, str) else text) for number, text in enumerate(prompts)]
    protocol = Protocol(modes, new_tokens=new_tokens, **options)
    bench = Bench([plain_method(model), *methods], PromptEncoder(EvaByteTokenizer(), chats=False), protocol)
    bench.run(asked)
    return bench


def test_every_method_is_measured_beside_plain_decoding(folders, tmp_path, capsys):
    own = [f"heads:{folders / 'heads'}", f"eagle:{folders / 'eagle'}?num_assistant_tokens=3"]
    theirs = ["transformers:prompt_lookup", f"transformers:assistant:{folders / 'base'}", "transformers:use_mtp"]
    methods = ["plain", f"smaller=assistant:{folders / 'base'}", *own, *theirs, f"heads:{folders / 'other'}", "own"]
    words = "--batch-size", "1", "2", "--methods", *methods
    assert run(folders, tmp_path / "out", *words) == 0
    measured = results_in(tmp_path / "out")
    rows = {(row.method, row.decoding, row.batch_size): row for row in measured.results}
    names = {"plain", "plain, again", "smaller", "heads:heads", "eagle:eagle?num_assistant_tokens=3"}
    foreign = {"transformers:prompt_lookup", "transformers:assistant:base"}
    assert {name for name, *setting in rows if setting == ["greedy", 1]} == names | foreign
    assert {name for name, *setting in rows if setting == ["greedy", 2]} == names
    for (name, _, size), row in rows.items():
        assert row.is_lossless and (row.differing == 0 or name == "plain"), name
        assert len(row.per_prompt) == (4 if size == 1 else 2 if row.texts == 2 else len(row.per_prompt))
        assert row.prompt_ms > 0 and row.cache_bytes > 0 and row.call_ms > 0
    assert rows["smaller", "greedy", 1].tokens_per_verification > 4
    eagle = rows["eagle:eagle?num_assistant_tokens=3", "greedy", 1]
    assert eagle.draft_length == 3 and eagle.expected_tokens_per_call == pytest.approx(eagle.tokens_per_verification)
    heads = rows["heads:heads", "greedy", 2]
    assert heads.expected_tokens_per_call == pytest.approx(heads.tokens_per_verification)
    refused = measured.not_measured
    assert "64" in refused["heads:other"] and "LlamaForCausalLM" in refused["own"]
    assert "num_mtp_layers" in refused["transformers:use_mtp, greedy, batch 1"]
    assert "batch" in refused["transformers:prompt_lookup, greedy, batch 2"]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"bench.png", "frontier.png", "lines.jsonl", "results.json", "settings.json"}
    shown = " ".join(capsys.readouterr().out.split())
    assert "greedy, batch 1" in shown and "n/a: own" in shown
    assert run(folders, tmp_path / "out", *words) == 0  # nothing is left to measure
    assert results_in(tmp_path / "out").not_measured == refused


@pytest.mark.core
def test_a_run_goes_on_where_it_ended(folders, tmp_path, monkeypatch, capsys):
    out, words = tmp_path / "out", ("--methods", "ngram")
    file = out / bench_module.LINES
    measure = Bench._measure

    def killed(self, *unit):
        if self.lines:
            raise KeyboardInterrupt
        return measure(self, *unit)

    monkeypatch.setattr(Bench, "_measure", killed)
    assert run(folders, out, *words) == 130
    assert results_in(out).results
    monkeypatch.undo()
    before = file.read_text()
    assert [len(json.loads(line)) for line in before.splitlines()] == [6]  # three methods, two turns
    file.write_text(before + before.splitlines()[0][:40])  # killed while it wrote
    assert run(folders, out, *words) == 0
    after = file.read_text()
    assert after.startswith(before) and [len(json.loads(line)) for line in after.splitlines()] == [6, 3, 3]
    assert run(folders, out, *words) == 0 and file.read_text() == after
    for changed, named in ((("--seed", "1"), "seed=0"), (("--methods", "ngram", "own"), "methods=")):
        capsys.readouterr()
        assert run(folders, out, *words, *changed) == 1
        assert named in capsys.readouterr().err


def test_a_broken_line_is_named_and_left_out_where_it_is_asked(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [
        '{"question": "1 + 1?", "answer": "2"}',
        "{",
        '"a"',
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
    ]
    file.write_text("\n".join([*rows, '{"turns": []}', '{"prompt": 3}', '{"messages": ["u"]}', ""]))
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(file)
    prompts, broken = read_prompts(file, skip_broken=True)
    assert [prompt.turns for prompt in prompts] == [("1 + 1?",), ("a",), ("u",)]
    assert prompts[2].before == ({"role": "system", "content": "s"},) and prompts[2].name == "4"
    assert [words.split(":")[0] for words in broken] == ["line 2", "line 5", "line 6", "line 7"]


def test_prompts_of_a_data_set(tmp_path):
    (tmp_path / "data" / "main").mkdir(parents=True)
    write(tmp_path / "data" / "main" / "test.jsonl", ROWS)
    assert read_prompts(f"{tmp_path}/data/main:test") == read_prompts(write(tmp_path / "same.jsonl", ROWS))
    for source, named in ((f"{tmp_path}/data/main", "NAME:SPLIT"), (f"{tmp_path}/none:test", "none")):
        with pytest.raises(FileNotFoundError, match=named):
            read_prompts(source)


def test_categories_take_turns_and_batches_are_whole():
    prompts = [Prompt(f"{category}{i}", ("x",), category) for category in "ab" for i in range(5)]
    names = [[prompt.name for prompt in group] for group in groups_of(prompts, 1, per_category=2)]
    assert names == [["a0"], ["b0"], ["a1"], ["b1"]]
    names = [[prompt.name for prompt in group] for group in groups_of(prompts, 4)]
    assert names == [["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"]]
    assert [len(group) for group in groups_of(prompts[:3], 4)] == [3]
    assert [[prompt.name for prompt in group] for group in groups_of(prompts, 5 - 3)][-1] == ["a4", "b4"]


def test_a_second_turn_is_asked_after_the_plain_answer():
    writer, tokenizer, prompt = PromptEncoder(EvaByteTokenizer()), EvaByteTokenizer(), Prompt("1", ("a", "b"))
    text = tokenizer.decode(writer.batch([prompt], [["ANSWER"]], "cpu")["input_ids"][0])
    assert text.index("a") < text.index("ANSWER") < text.rindex("b") and "chat template" in writer.template
    raw = PromptEncoder(tokenizer, chats=False).batch([prompt], [["ANSWER"]], "cpu")
    assert tokenizer.decode(raw["input_ids"][0], skip_special_tokens=True) == "a\nANSWER\nb"


def test_no_memory_and_a_failure_leave_the_other_methods():
    model, calls = llama(vocab_size=320), []
    methods, _ = methods_of(["ngram", "second=ngram"], model)

    def full(**kwargs):
        calls.append(1)
        raise torch.OutOfMemoryError("out of memory") if len(calls) > 1 else ValueError("no such thing")

    broken = SimpleNamespace(name="broken", generate=full, model=model, drafter=None, source=None)
    for reason in ("no such thing", "no memory for a batch of 1"):
        bench = bench_of(model, [*methods[1:], broken], prompts=TEXTS[:1])
        assert bench.refused == {("broken", "greedy", 1): reason}
        assert [row.method for row in results_of(bench)] == ["plain", "plain, again", "ngram", "second"]


def tampering(monkeypatch, name, change):
    """Change what a method writes."""
    decode = bench_module.decode

    def tampered(method, *args):
        found = decode(method, *args)
        if method.name == name:
            change(found.ids[0])
        return found

    monkeypatch.setattr(bench_module, "decode", tampered)


def test_a_wrong_token_is_no_near_tie_and_fails(folders, tmp_path, monkeypatch, capsys):
    tampering(monkeypatch, "ngram", lambda ids: ids.__setitem__(5, 99 if ids[5] != 99 else 98))
    assert run(folders, tmp_path / "out", "--methods", "ngram") == 1
    row = results_in(tmp_path / "out").results[-1]
    assert (row.method, row.differing, row.near_ties, row.is_lossless) == ("ngram", 4, 0, False)
    out = " ".join(capsys.readouterr().out.split())
    assert "Greedy texts, ngram, greedy: equal 0, near-ties 0, different 4 NOT LOSSLESS" in out
    assert "Greedy texts, plain, again, greedy: equal 4, near-ties 0, different 0" in out


def test_a_token_of_equal_logits_is_a_near_tie_and_passes(folders, tmp_path, monkeypatch, capsys):
    """Of every two tokens with the same logits plain decoding takes the first."""
    model = llama(vocab_size=320, max_position_embeddings=512)
    with torch.no_grad():
        model.lm_head.weight[160:] = model.lm_head.weight[:160]
    model.save_pretrained(base := tmp_path / "twins")
    EvaByteTokenizer().save_pretrained(base)
    tampering(monkeypatch, "ngram", lambda ids: ids.__setitem__(5, ids[5] + 160))
    assert run(folders, tmp_path / "out", "--model", base, "--methods", "ngram", "--decoding", "greedy") == 0
    assert "Greedy texts, ngram, greedy: equal 0, near-ties 4, different 0\n" in capsys.readouterr().out


def test_the_error_between_a_block_and_single_tokens():
    ids = torch.arange(64, 94)
    exact, rounded = (
        block_error(llama(vocab_size=320).to(dtype), ids[:6], ids[6:]) for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact < 1e-5 < rounded < 0.5
    run, plain = pair(list(range(41)), [3] * 10, 20.0)
    for gap, is_tie in ((1.9 * rounded, True), (2.1 * rounded, False), (None, False)):
        run.differences = [{"index": 1, "gap": gap, "error": rounded}, None]
        row = result_of("x", GREEDY, 1, [(run, plain)], rounded)
        assert (row.texts, row.differing, row.near_ties, row.is_lossless) == (2, 1, is_tie, is_tie)


def test_looping_texts_are_counted_and_in_no_speed_up():
    model = llama(vocab_size=320)
    with torch.no_grad():  # the next byte is always the same one
        model.lm_head.weight.zero_()
    row = results_of(bench_of(model, methods_of(["ngram"], model)[0][1:], new_tokens=40))[-1]
    assert row.looping == 2 and not row.speed_ups and row.micro_speed_up is None and row.only_loops
    assert row.looping_share == row.repeated_share == 1 and row.tokens_per_verification is None
    assert row.accepted_by_position == row.expected_by_position == [] and row.processor_seconds > 0


def pair(ids, accepted, seconds, plain_ids=None, category="a"):
    """A run and plain decoding of a prompt, whose own call takes a second of each."""
    calls = [len(accepted) + 1]
    facts = dict(ids=[ids], calls=calls, forwards=calls[0], prompt_seconds=1.0, processor_seconds=1.0)
    run = Row(**facts, category=category, seconds=1.0 + seconds, accepted=[accepted], drafted=[[3] * len(accepted)])
    plain = Row(**facts | dict(ids=[plain_ids or ids], calls=[len(ids)], forwards=len(ids)), seconds=1.0 + len(ids))
    return run, plain


def test_all_figures_leave_out_the_same_texts():
    text, loop = list(range(41)), [7] * 41
    steady = [pair(text, [3] * 10, 20.0), pair(text, [1] * 20, 40.0)]
    looping = [pair(loop, [3] * 10, 5.0), pair(text, [3] * 10, 5.0, plain_ids=loop, category="b")]
    want = result_of("x", GREEDY, 1, steady, 0.0)
    row = result_of("x", GREEDY, 1, [looping[0], *steady, looping[1]], 0.0)
    assert want.tokens_per_verification == pytest.approx(80 / 30) and want.looping_share == 0
    assert (row.looping, row.looping_share, want.looping) == (2, 0.5, 0)
    apart = {"looping", "looping_share", "repeated_share"}
    assert {name: value for name, value in vars(row).items() if name not in apart} == {
        name: value for name, value in vars(want).items() if name not in apart
    }
    assert row.category_tokens_per_call == {"a": pytest.approx(80 / 30)}


def test_figures_of_one_run_leave_out_the_prompts_call():
    run, plain = pair(list(range(41)), [3] * 10, 20.0)
    assert run.speed == 2.0 and plain.speed == pytest.approx(40 / 41)
    row = result_of("x", GREEDY, 1, [(run, plain)], 0.0)
    assert row.speed_ups == pytest.approx([2.05] * 3)  # 41 seconds beside 20
    assert row.whole_speed_ups == pytest.approx([2.0] * 3)  # 42 beside 21
    assert row.micro_speed_up == pytest.approx(40 / 20 * 41 / 40) and row.call_ms == pytest.approx(2000)
    run.accepted = []  # drafts that nobody counted: all calls but the prompt's verify
    assert result_of("x", GREEDY, 1, [(run, plain)], 0.0).tokens_per_verification == pytest.approx(4.0)


def test_forced_answers_end_no_earlier(folders, tmp_path):
    """Half of all bytes end an answer here, so that none is as long as it may be."""
    model = llama(vocab_size=320, max_position_embeddings=512)
    model.generation_config.eos_token_id = list(range(0, 320, 2))
    model.save_pretrained(base := tmp_path / "base")
    EvaByteTokenizer().save_pretrained(base)
    lengths = []
    for name, forced in (("free", []), ("forced", ["--force-length"])):
        words = ["--model", base, "--methods", "ngram", "--decoding", "T=1"]
        assert run(folders, tmp_path / name, *words, *forced) == 0
        lines = (tmp_path / name / "lines.jsonl").read_text().splitlines()
        lengths.append({len(ids) for line in lines for row in json.loads(line) for ids in row["ids"]})
    assert max(lengths[0]) < 12 and lengths[1] == {12}
    assert "none ended earlier" in results_in(tmp_path / "forced").dataset_description


def test_turns_are_drawn_apart_and_samples_follow_from_the_seed():
    texts = []
    for seed in (0, 0, 1):
        bench = bench_of(llama(vocab_size=320), [], [sampled(1.0)], [("abc", "abc")], seed=seed)
        texts.append([line.ids for line in bench.lines if line.method == "plain"])
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]


def test_no_drafter_has_read_the_answer_in_another_unit(folders):
    """Text that was written greedily is read before it is written again, in another batch or sampled."""
    drafted = []
    for sizes in ((1, 2), (2,)):
        model = llama(vocab_size=320)
        methods, refused = methods_of(["suffix", f"cascade:{folders / 'heads'}"], model)
        bench = bench_of(model, methods[1:], prompts=[("abcd", "ab"), ("efgh", "gh")], batch_sizes=sizes)
        assert not refused and not bench.refused
        lines = [line for line in bench.lines if line.batch_size == 2 and line.method == "suffix"]
        drafted.append([line.drafted for line in lines])
        for restore in bench.restore_points:
            restore()
        assert not any(map(any, (methods[1].drafter.table.texts(), methods[2].drafter.drafters[0].table.texts())))
    assert drafted[0] == drafted[1] and any(map(len, drafted[0]))


def test_what_cannot_be_measured_is_said_first_and_leaves_no_settings(folders, tmp_path, capsys):
    """Where nothing that was asked for is measured, the directory takes the corrected command."""
    out, nobody = tmp_path / "out", f"eagle:{tmp_path / 'gone'}"
    for method, named in ((nobody, "eagle:gone"), ("ngram?num_asistant_tokens=2", "num_asistant_tokens")):
        assert run(folders, out, "--methods", method) == 1
        captured = capsys.readouterr()
        assert "--methods: none was measured" in captured.err and named in captured.err
        assert not out.exists() or not any(out.iterdir())
    assert run(folders, out, "--methods", "ngram?num_assistant_tokens=2", nobody) == 0
    assert "left out: eagle:gone" in capsys.readouterr().out.partition("tokens per call")[0]
    (file := tmp_path / "results").write_text("mine")
    assert run(folders, file, "--methods", "ngram") == 1
    assert str(file) in capsys.readouterr().err and file.read_text() == "mine"


def test_a_config_with_a_wrong_value_is_a_drafter_that_does_not_fit(folders, tmp_path):
    shutil.copytree(folders / "heads", tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    (tmp_path / "heads" / "config.json").write_text(json.dumps(config | {"head_type": "hydr"}))
    methods, refused = methods_of([f"heads:{tmp_path / 'heads'}"], llama(vocab_size=320))
    assert len(methods) == 1 and "head_type='hydr'" in refused["heads:heads"]
    with pytest.raises(ValueError, match=rf"^--drafter heads:{tmp_path / 'heads'}: .*head_type='hydr'"):
        named_method(f"heads:{tmp_path / 'heads'}", llama(vocab_size=320))


def test_names_that_are_no_method_are_refused():
    for spec in ("nothing", "heads", "ngram:x", "transformers:heads:x"):
        with pytest.raises(ValueError, match="assistant:SOURCE"):
            methods_of([spec], llama())
    with pytest.raises(ValueError, match="NAME=ngram"):
        methods_of(["ngram", "ngram"], llama())


def test_answers_are_scored_by_their_references(folders, tmp_path, capsys):
    rows = [
        {"question": "2 + 3?", "answer": "It is 5.\n#### 5"},
        {"category": "translation", "turns": ["Ein Haus", "Zwei"], "reference": ["a house", "two houses"]},
    ]
    given = "--prompts", write(tmp_path / "scored.jsonl", rows), "--methods", "ngram", "--quality"
    assert run(folders, tmp_path / "out", *given) == 0
    plain, again, drafted = results_in(tmp_path / "out").results
    assert plain.quality == again.quality == drafted.quality and set(plain.quality) == {EXACT, BLEU}
    assert "BLEU" in capsys.readouterr().out
    assert run(folders, tmp_path / "other", "--methods", "ngram", "--quality") == 1
    assert "--quality: no prompt" in capsys.readouterr().err


def test_scores_of_answers():
    numbers = [("so 3 and 1,200", "#### 1200"), ("7.0 it is", "#### 7"), ("none", "#### 1"), ("-2", "#### 2")]
    assert quality_of(numbers) == {EXACT: 50.0}
    text = "The house stands on a hill by the sea."
    assert quality_of([*numbers[:1], (text, text)]) == {EXACT: 100.0, BLEU: pytest.approx(100)}
    assert 0 < quality_of([(text, "The house stands on a mountain by the sea.")])[BLEU] < 100
    assert quality_of([]) == {}


@pytest.fixture
def model():
    return small_model().eval()


def test_a_batch_gives_the_texts_of_its_rows_and_counts_a_call_for_every_row(model):
    bench = bench_of(model, [drafting_method("it", model)], batch_sizes=(1, 2))
    alone, together = (row for row in results_of(bench) if row.method == "it")
    assert together.name == "it, greedy, batch 2" and together.batch_size == 2
    for row in (alone, together):
        assert row.identical is True and not row.do_sample and row.new_tokens == row.plain_new_tokens == 24
        assert len(row.accepted_by_position) == 3
    assert together.per_prompt == alone.per_prompt and together.backbone_calls == alone.backbone_calls
    first, *batched, second = completions_of(bench, "it", GREEDY)  # settings advance alike
    assert batched == [first, second]
    for prompt, completion in zip(TEXTS, batched, strict=True):
        inputs = EvaByteTokenizer()(prompt, return_tensors="pt")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=12, return_dict_in_generate=True)
        assert completion.prompt == prompt and len(completion.drafted) == 12
        assert completion.ids == output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        assert sum(completion.drafted) == sum(output.speculation.accepted)


def test_an_early_end_is_a_difference_too(model, monkeypatch):
    tampering(monkeypatch, "it", lambda ids: ids.__delitem__(slice(7, None)))
    result = results_of(bench_of(model, [drafting_method("it", model)], prompts=TEXTS[:1]))[-1]
    assert result.identical is False and (result.differing, result.near_ties) == (1, 0)


def test_samples_are_drawn_from_the_whole_distribution_and_not_compared(model, monkeypatch):
    seen, generate = [], model.generate

    def spy(**kwargs):
        seen.append({key: kwargs.get(key) for key in ("do_sample", "temperature", "top_k", "use_mtp")})
        return generate(**kwargs)

    monkeypatch.setattr(model, "generate", spy)
    result = results_of(bench_of(model, [drafting_method("it", model)], [sampled(0.7)], new_tokens=8))[-1]
    assert result.identical is None
    assert {entry["use_mtp"] for entry in seen} == {None, False}
    assert all((entry["do_sample"], entry["temperature"], entry["top_k"]) == (True, 0.7, 0) for entry in seen)


def test_every_way_sees_the_same_prompts_wherever_the_time_ends(model, monkeypatch):
    clock = iter(range(0, 10_000, 10))  # every look at the clock takes ten seconds
    monkeypatch.setattr(bench_module.time, "monotonic", lambda: next(clock))
    methods = [drafting_method("one", model), drafting_method("other", small_model().eval())]
    bench = bench_of(model, methods, MODES, TEXTS * 4, seconds=55)
    rows = results_of(bench)  # a unit takes twenty seconds; one of every way is measured
    assert [(row.method, row.decoding) for row in rows] == [
        (name, mode.name) for mode in MODES for name in ("plain", "plain, again", "one", "other")
    ]
    assert all(len(row.per_prompt) == 1 for row in rows) and rows[2].identical is True
    assert rows[2].plain_seconds == rows[3].plain_seconds


def test_acceptance_by_position_falls_whatever_the_lengths_of_drafts():
    assert acceptance_by_position([2, 0, 1], 3) == [2 / 3, 1 / 3, 0.0]
    assert acceptance_by_position([], 0) == []


def test_repeated_text_is_found():
    assert repeated_share(list(range(100))) == repeated_share([]) == 0.0
    assert repeated_share([1, 2, 3, 4] * 20) == 1.0
    assert repeated_share(list(range(50)) + list(range(20)), gram=16) == pytest.approx(40 / 70)
    for loop in ([7], [1, 2], [1, 2, 3, 4, 5, 6, 7, 8]):  # shorter than a passage
        assert repeated_share((loop * 16)[:16]) == 1.0
        assert repeated_share([*range(20, 52), *(loop * 16)[:16]]) == pytest.approx(16 / 48)
        assert repeated_share([*range(20, 52), *loop, *loop]) == (16 / 48 if len(loop) == 8 else 0.0)
