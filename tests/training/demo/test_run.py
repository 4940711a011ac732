"""The demo from end to end on a box of untrained weights."""

import json

import pytest
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from tests.boxes import untrained_box
from tokenahead import EvaByteTokenizer, MTPHeads
from tokenahead.model_cards import MeasuredResults
from tokenahead.training import demo as demo_module
from tokenahead.training.box import BoxDamagedError
from tokenahead.training.demo import Measurement, box_model, named_model, requests, run_demo

FEW = {"seconds": 0.1, "new_tokens": 20}
FILES = {"bench.png", "results.json", "frontier.png"}


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    return untrained_box(tmp_path_factory.mktemp("box"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
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


@pytest.fixture
def shown(monkeypatch, capsys):
    """Runs the demo, and returns its results and what it shows."""
    monkeypatch.setattr(demo_module, "Console", lambda **options: Console(width=100, color_system=None, **options))

    def run(measurement, subject, output):
        measured = run_demo(measurement, subject, output)
        return measured, " ".join(capsys.readouterr().out.split())

    return run


@pytest.mark.core
def test_the_demo_shows_outputs_results_and_figures(box, tmp_path, shown):
    threads = torch.get_num_threads()
    measured, text = shown(Measurement(batch_size=2, **FEW), box_model(box, 2), tmp_path / "out")
    for words in ("drafted and accepted", "greedy, ", "sampled, T=1, ", "batch 2"):
        assert words in text, words
    assert torch.get_num_threads() == threads
    assert MeasuredResults.from_json(tmp_path / "out" / "results.json") == measured
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    for row in (row for row in measured.results if row.draft_length):
        assert len(row.expected_by_position) == row.draft_length
        if row.decoding == "greedy":
            assert row.identical is True
            assert row.expected_tokens_per_call == pytest.approx(row.tokens_per_verification, abs=1e-4)


@pytest.mark.core
def test_results_come_with_their_circumstances(box):
    measured, bench = Measurement(**FEW).measure(box_model(box, 2))
    lengths = {"plain": None, "plain, again": None, "ff": 5, "btree 2": 3}
    modes = "greedy", "sampled, T=0.7", "sampled, T=1"
    assert [method.name for method in bench.methods] == [*lengths]
    assert [(row.method, row.decoding) for row in measured.results] == [
        (name, way) for way in modes for name in lengths
    ]
    assert {row.method: row.draft_length for row in measured.results} == lengths
    assert {"torch", "transformers", "python", "processor", "threads"} <= set(measured.environment)


@pytest.mark.core
def test_a_damaged_file_is_named_before_anything_is_measured(box):
    weights = box / "btree.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        with pytest.raises(BoxDamagedError, match=r"btree\.safetensors"):
            box_model(box)
    finally:
        weights.write_bytes(before)


def test_someone_elses_directory_is_refused(box, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="--output"):
        run_demo(Measurement(**FEW), box_model(box), tmp_path)


def test_prompts_follow_from_the_seed(box):
    first, again, other = (box_model(box, 8, seed=seed).prompts for seed in (0, 0, 1))
    assert first == again != other and all(len(each.turns[0]) <= 320 for each in first)


def test_ones_own_model_is_shown_with_its_drafter(llama, tmp_path, shown):
    model, heads = llama
    measured, text = shown(Measurement(**FEW), named_model(model, f"heads:{heads}"), tmp_path / "out")
    words = "drafts: heads:heads", "drafted and accepted", "greedy, heads:heads", "sampled, T=1, heads:heads"
    for each in (*words, "lighthouse keeper", "1 prompts,"):
        assert each in text, each
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES
    exact = {row.method: row.identical for row in measured.results if row.decoding == "greedy"}
    assert exact == {"plain": None, "plain, again": True, "heads:heads": True}
    assert measured.extra == {"Model": "model", "Chat template": "the tokenizer's chat template"}


def test_prompts_of_a_file_take_the_place_of_the_requests(llama, tmp_path):
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "ab", "category": "letters"}) + "\n")
    subject = named_model(llama[0], prompts=tmp_path / "asked.jsonl")
    assert [prompt.turns for prompt in subject.prompts] == [("ab",)]
    assert len(requests()) == 8 and len({each.turns for each in requests(further=True)}) == 24
    assert [method.name for method in subject.methods] == ["plain", "ngram"]
    ids = subject.writer.batch(subject.prompts, [[]], torch.device("cpu"))["input_ids"][0].tolist()
    assert bytes(each - 64 for each in ids[-4:]) == b"<ab>"
    measured, _ = Measurement(**FEW).measure(subject)
    assert measured.dataset_description == "Prompts of letters: 1 prompts, each completed with at most 20 bytes."


def test_weights_have_the_dtype_that_was_asked_for(box, llama):
    for subject in (named_model(llama[0], dtype="bfloat16"), box_model(box, dtype="bfloat16")):
        assert {method.model.dtype for method in subject.methods} == {torch.bfloat16} and "bfloat16" in subject.words
    assert named_model(None, "ngram", dtype="bfloat16").methods[0].model.dtype == torch.bfloat16


def test_parameters_of_the_backbone_and_of_heads_are_told_apart(box, llama):
    subject = box_model(box)
    models = [method.model for method in subject.methods]
    heads = [sum(each.numel() for each in model.head.parameters()) for model in models[1:]]
    assert f"({models[0].num_parameters() - heads[0]:,} parameters, float32)" in subject.words
    assert all(f"({count:,} further parameters)" in subject.words for count in heads)
    assert [*subject.facts.values()] == heads
    model, folder = llama
    subject = named_model(model, f"heads:{folder}")
    further = sum(each.numel() for each in subject.methods[1].drafter.parameters())
    count = subject.methods[0].model.num_parameters()
    assert f"({count:,} parameters, float32)" in subject.words and f"({further:,} further parameters)" in subject.words
    assert "further" not in named_model(model).words
