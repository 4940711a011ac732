"""`tokenahead card` of a bench with several methods: whose figures are a model's own, and what else a card states."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard

from tests.every_model import llama, moved_heads
from tests.model_cards.test_card import table_row
from tests.test_cli import run
from tokenahead import EagleHead, EvaByteTokenizer
from tokenahead.model_cards import MeasuredResults
from tokenahead.model_cards.card import describe, make_card
from tokenahead.training.requests import CardRequest


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Directories of two EAGLE heads and of heads, and a bench of all of them."""
    root = tmp_path_factory.mktemp("compared")
    torch.manual_seed(0)
    backbone = llama(vocab_size=320, num_hidden_layers=8, max_position_embeddings=512)
    backbone.save_pretrained(root / "base")
    EvaByteTokenizer().save_pretrained(root / "base")
    for name in ("a/head", "b/head"):
        head = EagleHead.from_backbone(backbone, version=1)
        head.export(root / name, "official") if name == "a/head" else head.save_pretrained(root / name)
        head.detach()
    moved_heads(backbone).save_pretrained(root / "heads")
    (root / "prompts.txt").write_text("def f(\n")
    methods = [f"ours=eagle:{root}/a/head", f"ours, 2=eagle:{root}/a/head?num_assistant_tokens=2"]
    methods += [f"released=eagle:{root}/b/head", f"heads:{root}/heads", "ngram", f"cascade:{root}/a/head"]
    words = ["--prompts", root / "prompts.txt", "--raw", "--new-tokens", 8, "--decoding", "T=1", "--no-expected"]
    assert run("bench", "--model", root / "base", *words, "--methods", *methods, "--output", root / "bench") == 0
    return root


def card_of(root, folder, tmp_path, **options):
    results = options.pop("results", root / "bench" / "results.json")
    return ModelCard.load(make_card(CardRequest(str(folder), results=results, output=tmp_path, **options)))


def methods_in(card):
    entries = [entry for entry in card.data.eval_results or () if entry.metric_type == "tokens_per_call"]
    return {re.sub(", (greedy|sampled, T=1)$", "", entry.metric_name.split(", ", 1)[1]) for entry in entries}


@pytest.mark.parametrize(
    ("folder", "own", "others"),
    [
        ("a/head", {"ours", "ours, 2"}, {"released", "heads:heads", "ngram", "cascade:head"}),
        ("heads", {"heads:heads"}, {"ours", "ours, 2", "released", "ngram", "cascade:head"}),
    ],
)
def test_only_rows_of_the_directory_are_its_figures(folder, own, others, root, tmp_path):
    card = card_of(root, root / folder, tmp_path)
    assert methods_in(card) == own
    first, second = card.text.split("### Other Methods")
    for name in own:
        assert f"| {name}, sampled, T=1 |" in first and f"| {name}, sampled, T=1 |" not in second
    for name in others:
        assert f"| {name}, sampled, T=1 |" in second and f"| {name}, sampled, T=1 |" not in first
    assert "plain, again" not in card.content


def test_a_directory_that_was_moved_is_known_by_its_weights(root, tmp_path):
    moved = shutil.copytree(root / "a/head", tmp_path / "renamed")
    assert methods_in(card_of(root, moved, tmp_path)) == {"ours", "ours, 2"}


def test_a_model_without_rows_has_no_figures(root, tmp_path):
    head = EagleHead.from_pretrained(root / "a/head")
    with torch.no_grad():
        head.fc.weight.add_(1.0)
    head.save_pretrained(tmp_path / "head")  # trained since, under the same name
    card = card_of(root, tmp_path / "head", tmp_path)
    assert not card.data.eval_results and "Nothing has been measured" in card.text
    assert table_row(card, "ours, sampled, T=1") and "prompts.txt" in card.text and str(root) not in card.content
    chosen = card_of(root, tmp_path / "head", tmp_path, methods=["released"], overwrite=True)
    assert methods_in(chosen) == {"released"}
    with pytest.raises(ValueError, match="--methods our.*released"):
        card_of(root, tmp_path / "head", tmp_path, methods=["our"], overwrite=True)


def test_results_of_one_method_are_the_models(root, results, tmp_path):
    file = results.to_json(tmp_path / "results.json")
    assert len(methods_in(card_of(root, root / "heads", tmp_path, results=file))) == 2
    rows = [dataclasses.replace(row, method="theirs", source="them/head") for row in results.results]
    file = dataclasses.replace(results, results=rows).to_json(tmp_path / "theirs.json")
    assert not methods_in(card_of(root, root / "heads", tmp_path, results=file))
    assert MeasuredResults.from_json(file).results == rows


def test_title_and_backbone_are_what_is_known(root, tmp_path):
    card = card_of(root, root / "a/head", tmp_path)
    assert card.data.base_model is None and "not named here" in table_row(card, "Derived from")[0]
    named = card_of(root, root / "a/head", tmp_path, name="Small", base_model="me/base")
    assert named.data.model_name == "Small" and table_row(named, "Derived from") == ["`me/base`"]
    copied = shutil.copytree(root / "b/head", tmp_path / "copied")
    config = json.loads((copied / "config.json").read_text())
    for name, known in (("base", None), ("/nowhere/base", None), ("me/base", "me/base")):
        (copied / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": name}))
        assert card_of(root, copied, tmp_path / "named", overwrite=True).data.base_model == known
        shutil.rmtree(tmp_path / "named")


@pytest.mark.parametrize(("options", "length"), [({}, 5), ({"draft_length": 2}, 2), ({"draft_length": 9}, 9)])
def test_the_draft_length_of_a_config_is_stated(options, length):
    head = EagleHead.from_backbone(llama(num_hidden_layers=8), **options)
    _, _, facts = describe(head)
    assert facts.window == length + 1 == head.default_draft() + 1
    assert dict(facts.rows)["Draft length"].startswith(f"{length} tokens")
