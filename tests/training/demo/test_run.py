"""The demo from end to end on a model and a text of a few kilobytes, and Ctrl-C at every stage."""

import io
import json

import pytest
import torch
from rich.console import Console
from transformers import TrainerCallback

from tests.internals import (
    ByteWindows,
    Measuring,
    Stage,
    bits_per_byte,
    load_corpus,
    read_reports,
    run_demo,
    threads_as_before,
)
from tests.internals import demo_run as demo
from tests.training.conftest import micro_config, write_source
from tokenahead import EvaByteForMTPC, EvaByteTokenizer
from tokenahead.model_cards import MeasuredResults

STAGES = (
    Stage("backbone and heads", "all", share=0.7, length=48, rows=4, rates=(1.0, 0.0)),
    Stage("heads alone", "heads", share=0.3, length=64, rows=2, rates=(1.0, 0.0)),
)


class Start:
    """Runs the demo into `folder`; what it printed is `output`."""

    def __init__(self, folder, corpus) -> None:
        self.folder, self.corpus, self.output = folder, corpus, io.StringIO()

    def __call__(self, **options) -> MeasuredResults:
        defaults = dict(
            minutes=0.015,
            output=self.folder,
            config=micro_config(),
            stages=STAGES,
            measuring=Measuring(prompts=2, new_bytes=16, windows=5, window_length=40),
            corpus=self.corpus,
            console=Console(file=self.output, width=100, color_system=None),
        )
        return run_demo(**(defaults | options))

    @property
    def printed(self) -> str:
        return " ".join(self.output.getvalue().split())

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def start(tmp_path, source):
    return Start(tmp_path / "out", load_corpus(source, held_out=0.3))


class InterruptAt(TrainerCallback):
    """Ctrl-C at the end of a step of a stage."""

    def __init__(self, stage: int, step: int) -> None:
        self.stage, self.step, self.begun = stage, step, 0

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun += 1

    def on_step_end(self, args, state, control, **kwargs):
        if (self.begun, state.global_step) == (self.stage, self.step):
            raise KeyboardInterrupt


class Watch(TrainerCallback):
    """Copies the weights when each stage begins, and counts its steps."""

    def __init__(self) -> None:
        self.weights, self.steps = [], []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append({name: value.clone() for name, value in model.state_dict().items()})

    def on_train_end(self, args, state, control, **kwargs):
        self.steps.append(state.global_step)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole run: what it returned, the directory, what was printed, and its weights on the way."""
    root, watch = tmp_path_factory.mktemp("demo"), Watch()
    write_source(root / "source")
    start = Start(root / "out", load_corpus(root / "source", held_out=0.3))
    with threads_as_before():
        torch.set_num_threads(1)
        start.results, start.watch = start(callbacks=[watch]), watch
    return start


def test_the_demo_measures_what_it_saved(finished):
    results = finished.results
    assert results == MeasuredResults.from_json(finished.folder / "results.json")
    assert [(row.name, row.identical) for row in results.results] == [
        ("greedy", True),
        ("sampled, T=0.7", None),
        ("sampled, T=1", None),
    ]
    assert all(row.new_tokens == row.plain_new_tokens == 32 for row in results.results)
    model = EvaByteForMTPC.from_pretrained(finished.folder)
    bits = bits_per_byte(model, ByteWindows(finished.corpus.held_out, 40), limit=5)
    assert results.bits_per_byte == pytest.approx(bits[0], rel=1e-4)
    assert model.config.use_cache


def test_the_demo_says_what_it_does_and_leaves_a_whole_folder(finished):
    for shown in ("8 files of Python source", "heads alone", "bits per byte", "A toy", " law ", "prompt 2"):
        assert shown in finished.printed
    assert {"model.safetensors", "tokenizer_config.json", "acceptance.png", "demo.json"} <= finished.names()
    card = (finished.folder / "README.md").read_text()
    assert "acceptance.png" in card and finished.results.command in card
    assert json.loads((finished.folder / "demo.json").read_text())["steps"] == sum(finished.watch.steps[:2])
    assert sorted(path.name for path in finished.folder.parent.iterdir()) == ["out", "source"]


def test_the_first_stage_teaches_everything_and_the_second_the_drafting_heads(finished):
    new, between = finished.watch.weights[:2]
    last = EvaByteForMTPC.from_pretrained(finished.folder, dtype=torch.float32).state_dict()
    assert min(finished.watch.steps[:2]) > 0
    assert not any(torch.equal(new[name], between[name]) for name in new)
    assert {name for name in new if not torch.equal(between[name], last[name])} == {"lm_head.weight"}
    assert torch.equal(between["lm_head.weight"][:320], last["lm_head.weight"][:320])


def test_the_demo_compares_the_head_families_on_one_backbone(finished):
    rows = read_reports(finished.folder / "heads.json")
    assert [row.head_type for row in rows] == ["ff", "cp", "hmm", "btree"] and len(finished.watch.steps) == 6
    assert [row.rank for row in rows] == [1, 8, 8, 8] and rows[1].parameters > rows[0].parameters
    for row in rows:
        greedy, drawn = row.measured.results
        assert greedy.identical and drawn.new_tokens in (8, 2 * 8) and row.measured.extra["Window NLL (nats)"] > 0
    main = EvaByteForMTPC.from_pretrained(finished.folder).state_dict()
    for row in rows:
        model = EvaByteForMTPC.from_pretrained(finished.folder / "heads" / row.head_type)
        assert model.config.mtp_head.head_type == row.head_type
        assert sum(parameter.numel() for parameter in model.head.parameters()) == row.parameters
        weights = model.model.state_dict()
        assert all(torch.equal(weights[name], main[f"model.{name}"]) for name in weights)
    assert (finished.folder / "heads.png").read_bytes()[:4] == b"\x89PNG"
    assert "Heads, window 4, equal training time" in finished.printed and "btree 8" in finished.printed


@pytest.mark.parametrize(("stage", "step"), [(1, 2), (2, 1)])
def test_ctrl_c_in_training_saves_what_there_is_and_says_where(start, stage, step):
    watch, threads = Watch(), torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        start(callbacks=[watch, InterruptAt(stage, step)])
    count = sum(watch.steps) + step
    assert f"Stopped in the training, after step {count}." in start.printed and f"in {start.folder}" in start.printed
    saved, begun = EvaByteForMTPC.from_pretrained(start.folder, dtype=torch.float32), watch.weights[0]
    assert not torch.equal(saved.lm_head.weight, begun["lm_head.weight"])
    inputs = EvaByteTokenizer.from_pretrained(start.folder)("def ", return_tensors="pt")
    output = saved.generate(**inputs, max_new_tokens=8, return_dict_in_generate=True)
    assert output.speculation.backbone_calls > 0
    assert {"README.md", "results.json"}.isdisjoint(start.names())
    assert torch.get_num_threads() == threads


def test_ctrl_c_before_the_first_step_saves_nothing_and_says_so(start):
    class InterruptFirst(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(callbacks=[InterruptFirst()])
    assert "nothing was saved" in start.printed and not start.folder.exists()


def test_ctrl_c_while_measuring_keeps_the_model(start, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo.Measurement, "compare", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert "measuring it was not finished" in start.printed
    assert EvaByteForMTPC.from_pretrained(start.folder).window == 4


def test_an_earlier_demo_is_replaced_and_its_figures_go(start):
    start.folder.mkdir()
    for name in ("demo.json", "results.json", "acceptance.png", "notes.txt"):
        (start.folder / name).write_text("old")
    with pytest.raises(KeyboardInterrupt):
        start(callbacks=[InterruptAt(1, 1)])
    assert {"results.json", "acceptance.png", "README.md"}.isdisjoint(start.names()) and "notes.txt" in start.names()
    assert json.loads((start.folder / "demo.json").read_text())["steps"] == 1


def test_words_in_the_readme_survive(start):
    start.folder.mkdir()
    (start.folder / "demo.json").write_text("{}")
    (start.folder / "README.md").write_text("my own words")
    start()
    assert (start.folder / "README.md").read_text() == "my own words"
    assert "No card was written" in start.printed and "results.json" in start.names()


def test_what_cannot_work_is_refused_before_any_training(start):
    watch = Watch()
    start.folder.mkdir()
    (start.folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="--overwrite"):
        start(callbacks=[watch])
    with pytest.raises(ValueError, match="minutes=0"):
        start(minutes=0, callbacks=[watch])
    assert not watch.weights


def test_a_foreign_folder_can_be_written_into(start):
    start.folder.mkdir()
    (start.folder / "notes.txt").write_text("mine")
    (start.folder / "README.md").write_text("theirs")
    start(overwrite=True)
    assert {"notes.txt", "model.safetensors", "results.json"} <= start.names()
    assert "theirs" not in (start.folder / "README.md").read_text()
