"""Cards that trainers write are the library's own: with data, recipe and log, from `Trainer` and from TRL."""

import pytest
from huggingface_hub import ModelCard

from tests.every_model import llama, moved_heads
from tests.training.conftest import ragged_rows, small_model, trainer_for
from tests.training.test_sft import trainer_of


def test_a_trained_model_has_a_card_and_no_code(tmp_path):
    trainer = trainer_for(small_model(), tmp_path, ragged_rows(), max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(language="en", license="mit", dataset="made up", dataset_args="seed 1", tags="toy")
    card = ModelCard.load(tmp_path / "README.md")
    shown = ("Trained by `MTPTrainer` for 2 steps", "`made up (seed 1)`: 8 rows.", "learning_rate:", "@article{")
    assert all(text in card.text for text in shown), card.text
    assert (card.data.license, card.data.language) == ("mit", "en") and "toy" in card.data.tags
    assert str(tmp_path) not in card.content
    assert not list(tmp_path.rglob("tokenahead_code"))  # the code is made when the model is pushed


@pytest.mark.core
def test_heads_name_their_backbone_and_no_folder(tmp_path):
    backbone = llama()
    backbone.config._name_or_path = str(tmp_path)
    trainer = trainer_for(moved_heads(backbone), tmp_path, ragged_rows(vocab_size=64), max_steps=1)
    trainer.create_model_card(finetuned_from="me/base", model_name="Heads")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.model_name) == ("me/base", "Heads") and str(tmp_path) not in card.content


@pytest.mark.core
def test_data_of_this_machine_are_named_without_their_folder(tmp_path):
    trainer = trainer_for(small_model(), tmp_path, ragged_rows(), max_steps=1)
    for name, shown in ((None, "Data that the run did not name"), (str(tmp_path / "rows.jsonl"), "`rows.jsonl`")):
        trainer.create_model_card(dataset_name=name)
        card = ModelCard.load(tmp_path / "README.md")
        assert f"{shown}: 8 rows." in card.text and card.data.get("datasets") is None
    trainer.create_model_card(dataset_name="me/rows")
    assert ModelCard.load(tmp_path / "README.md").data.datasets == ["me/rows"]


def test_words_of_a_person_are_kept(tmp_path):
    (tmp_path / "README.md").write_text("# Mine\n")
    trainer_for(small_model(), tmp_path, ragged_rows(), max_steps=1).create_model_card()
    assert (tmp_path / "README.md").read_text() == "# Mine\n"


def test_cards_of_trl_come_from_the_same_code(tmp_path):
    pytest.importorskip("trl")
    trainer_of(small_model(), tmp_path).create_model_card(dataset_name="made up")
    card = ModelCard.load(tmp_path / "README.md")
    assert "Trained by `MTPSFTTrainer`" in card.text and "made up" in card.text and "sft" in card.data.tags
    assert "None" not in card.content
