"""`tokenahead card`: which figures it shows, what it keeps of an earlier card, and what it refuses."""

from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

from tests.every_model import llama, moved_heads
from tests.test_cli import error_of, run
from tests.training.conftest import small_model
from tokenahead import EvaByteTokenizer
from tokenahead.model_cards import MeasuredResults, render_card, write_card
from tokenahead.model_cards.card import make_card
from tokenahead.training.evaluation.decoding import PLAIN
from tokenahead.training.requests import CardRequest
from tokenahead.training.results import source_mark


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its tokenizer and a card that tells of its training."""
    path = tmp_path_factory.mktemp("made") / "toy"
    model = small_model()
    model.save_pretrained(path, remote_code="bundle")
    EvaByteTokenizer().save_pretrained(path)
    told = {"training_data": "Novels.", "training_description": "Slowly.", "hyperparameters": {"learning_rate": 0.1}}
    write_card(path, render_card(model, None, license="mit", language="en", tags=["mine"], **told))
    return path


def test_figures_of_a_bench_are_shown_and_what_was_told_is_kept(folder, results, capsys):
    own, plain = results.results
    rows = [replace(own, method="own", source=source_mark(str(folder))), replace(plain, method=PLAIN)]
    file = replace(results, results=rows).to_json(folder.parent / "results.json")
    assert run("card", folder, "--results", file) == 0
    assert capsys.readouterr().out == f"wrote {folder / 'README.md'}\n"
    card = ModelCard.load(folder / "README.md")
    assert MeasuredResults.from_json(folder / "results.json") == MeasuredResults.from_json(file)
    figures = {entry.metric_name for entry in card.data.eval_results}
    assert "Bytes per backbone call, greedy" in figures and not any("sampled" in name for name in figures)
    for told in ("Novels.", "Slowly.", "learning_rate: 0.1", results.command):
        assert card.text.count(told) == 1
    assert (card.data.license, card.data.language, card.data.library_name) == ("mit", "en", "transformers")
    assert "mine" in card.data.tags and str(folder.parent) not in card.content
    before = card.content
    assert run("card", folder) == 0  # the figures of before, and nothing twice
    assert ModelCard.load(folder / "README.md").content == before


@pytest.mark.core
def test_a_card_of_a_drafter_needs_no_backbone(tmp_path):
    moved_heads(llama(vocab_size=320)).save_pretrained(tmp_path / "heads", remote_code=None)
    card = ModelCard.load(make_card(CardRequest(str(tmp_path / "heads"), output=tmp_path / "out")))
    assert card.data.library_name == "tokenahead" and str(tmp_path) not in card.content
    assert not (tmp_path / "heads" / "README.md").exists()


@pytest.mark.core
def test_refusals_are_one_line(folder, tmp_path, capsys):
    code, line = error_of(capsys, "card", folder, "--results", tmp_path / "none.json")
    assert code == 1 and "none.json" in line
    code, line = error_of(capsys, "card", "me/nowhere")
    assert code == 1 and "--output" in line
    own = (folder / "README.md").read_text() + "My own words.\n"
    (folder / "README.md").write_text(own)
    code, line = error_of(capsys, "card", folder)
    assert code == 1 and "overwrite=True" in line and (folder / "README.md").read_text() == own
