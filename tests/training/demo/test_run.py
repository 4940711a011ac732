"""The demo from end to end on a box of untrained weights."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from tests.boxes import untrained_box
from tokenahead import EvaByteTokenizer, MTPHeads
from tokenahead import cli as cli_module
from tokenahead.model_cards import MeasuredResults
from tokenahead.training.box import BoxDamagedError
from tokenahead.training.demo import Measurement, box_model, named_model, run_demo
from tokenahead.training.evaluation.bench import Completion, completions_of

FEW = {"seconds": 0.1, "new_tokens": 20}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained_box(tmp_path_factory.mktemp("box"))


@pytest.mark.core
def test_the_demo_shows_outputs_results_and_figures(box: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    threads = torch.get_num_threads()
    measured = run_demo(Measurement(batch_size=2, **FEW), box_model(box, 2), tmp_path / "out", console=console)
    shown = " ".join(console.file.getvalue().split())
    for words in ("drafted and accepted", "greedy, ", "sampled, T=1, ", "batch 2", "--batch-size 2"):
        assert words in shown, words
    assert torch.get_num_threads() == threads
    assert MeasuredResults.from_json(tmp_path / "out" / "results.json") == measured
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"bench.png", "results.json", "frontier.png"}


@pytest.mark.core
def test_results_come_with_their_circumstances(box: Path) -> None:
    measured, bench = Measurement(**FEW).measure(box_model(box, 2))
    names = ["plain", "plain, again", "ff", "btree 2"]
    assert [method.name for method in bench.methods] == names
    modes = "greedy", "sampled, T=0.7", "sampled, T=1"
    assert [(row.method, row.decoding) for row in measured.results] == [
        (name, mode) for mode in modes for name in names
    ]
    assert {row.method: row.draft_length for row in measured.results} == dict.fromkeys(names[:2]) | {
        "ff": 5,
        "btree 2": 3,
    }
    for row in (row for row in measured.results if row.draft_length):
        assert len(row.expected_by_position) == row.draft_length
        if row.decoding == "greedy":
            assert row.identical is True
            assert row.expected_tokens_per_call == pytest.approx(row.tokens_per_verification, abs=1e-4)
    assert {"torch", "transformers", "python", "processor", "threads"} <= set(measured.environment)


@pytest.mark.core
def test_a_damaged_file_is_named_before_anything_is_measured(box: Path, tmp_path: Path) -> None:
    weights = box / "btree.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        with pytest.raises(BoxDamagedError, match=r"btree\.safetensors"):
            run_demo(Measurement(), box_model(box), tmp_path / "out")
    finally:
        weights.write_bytes(before)
    assert not (tmp_path / "out").exists()


def test_someone_elses_directory_is_refused(box: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="--output"):
        run_demo(Measurement(**FEW), box_model(box), tmp_path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Directories of a model with a chat template, and of heads for it."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=320)
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3))
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder / "model")
    tokenizer = EvaByteTokenizer()
    tokenizer.chat_template = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    MTPHeads.from_backbone(model, window=3).save_pretrained(folder / "heads")
    return str(folder / "model"), str(folder / "heads")


def test_ones_own_model_is_shown_with_its_drafter(llama: tuple[str, str], tmp_path: Path) -> None:
    model, heads = llama
    console = Console(file=io.StringIO(), width=100, color_system=None)
    subject = named_model(model, f"heads:{heads}")
    measured = run_demo(Measurement(**FEW), subject, tmp_path / "out", console=console)
    shown = " ".join(console.file.getvalue().split())
    words = "drafts: heads:heads", "drafted and accepted", "greedy, heads:heads", "sampled, T=1, heads:heads"
    for each in (*words, "lighthouse keeper", f"--model {model} --drafter heads:{heads}", "1 prompt,"):
        assert each in shown, each
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"bench.png", "results.json", "frontier.png"}
    assert [(row.method, row.identical) for row in measured.results if row.decoding == "greedy"] == [
        ("plain", None),
        ("plain, again", True),
        ("heads:heads", True),
    ]
    assert (
        measured.command == "tokenahead demo --model model --drafter heads:heads --seconds 0.1 --new-tokens 20 --seed 0"
    )
    assert measured.extra == {"Model": "model", "Chat template": "the tokenizer's chat template"}


def test_prompts_of_a_file_take_the_place_of_the_requests(llama: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "ab", "category": "letters"}\n')
    subject = named_model(llama[0], prompts=tmp_path / "asked.jsonl")
    assert [prompt.turns for prompt in subject.prompts(0)] == [("ab",)]
    assert [method.name for method in subject.methods] == ["plain", "ngram"]
    assert subject.writer.batch(subject.prompts(0), [[]], torch.device("cpu"))["input_ids"][0].tolist()[-1] == 64 + ord(
        ">"
    )
    measured, _ = Measurement(**FEW).measure(subject)
    assert measured.dataset_description == "Prompts of letters: 1 prompt, each completed with at most 20 bytes."


@pytest.mark.nightly
def test_batches_draft_as_much_as_pays_but_trees_keep_their_form(llama: tuple[str, str]) -> None:
    for drafter in ("ngram", 'ngram?draft_tree={"top_k":2}'):
        measured, _ = Measurement(batch_size=2, **FEW).measure(named_model(llama[0], drafter))
        assert len([row for row in measured.results if row.batch_size == 2]) == 6, measured.not_measured


def test_a_model_with_another_drafter_in_the_box() -> None:
    subject = named_model(None, "ngram")
    assert [method.name for method in subject.methods] == ["plain", "ngram"] and subject.arguments == [
        "--drafter",
        "ngram",
    ]


def test_weights_have_the_dtype_that_was_asked_for(box: Path, llama: tuple[str, str]) -> None:
    model, _ = llama
    for subject in (named_model(model, dtype="bfloat16"), box_model(box, dtype="bfloat16")):
        assert {method.model.dtype for method in subject.methods} == {torch.bfloat16}
        assert "bfloat16" in subject.words and subject.arguments[-2:] == ["--dtype", "bfloat16"]
    assert named_model(None, "ngram", dtype="bfloat16").methods[0].model.dtype == torch.bfloat16
    assert "float32" in box_model(box).words and "--dtype" not in box_model(box).arguments


def test_parameters_of_the_backbone_and_of_heads_are_told_apart(box: Path, llama: tuple[str, str]) -> None:
    models = [method.model for method in box_model(box).methods]
    plain, heads = models[0], [sum(each.numel() for each in model.head.parameters()) for model in models[1:]]
    words = box_model(box).words
    assert f"{plain.num_parameters() - heads[0]:,} parameters" in words
    assert all(f"({count:,})" in words for count in heads)
    model, folder = llama
    subject = named_model(model, f"heads:{folder}")
    further = sum(each.numel() for each in subject.methods[1].drafter.parameters())
    count = subject.methods[0].model.num_parameters()
    assert f"({count:,} parameters, float32)" in subject.words and f"({further:,} further parameters)" in subject.words
    assert "further" not in named_model(model).words


@pytest.mark.nightly
def test_the_first_text_that_does_not_repeat_itself_is_shown() -> None:
    """The seed is the command's; the toy's greedy texts mostly loop."""
    subject = box_model()
    measurement = Measurement(seconds=0.1, new_tokens=128, seed=cli_module._parse(["demo"]).seed)
    subject = replace(subject, methods=subject.methods[:2], modes=subject.modes[:1])
    _, bench = measurement.measure(subject)
    assert not next(completions_of(bench, "ff", subject.modes[0])).loops
    assert Completion("", [1, 2] * 40, []).loops and not Completion("", list(range(80)), []).loops
