"""What trainers write is one version at every moment: the final model with its tokenizer, and online drafters."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from tests.kills import killed
from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead import EvaByteForMTPC, EvaByteTokenizer
from tokenahead.model_cards.push import public_copy
from tokenahead.training.loading import has_adapters, holds_model

COMPLETE = ".tokenahead-complete.*"


def hidden(folder):
    return [path.name for path in folder.rglob(".tokenahead-*")]


def trainer_of(folder):
    model = small_model()
    trainer = trainer_for(model, folder, ragged_rows())
    trainer.processing_class = EvaByteTokenizer()
    return trainer


def save(trainer, version):
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.fill_(version)
    trainer.model.config.initializer_range = version / 1000
    trainer.processing_class.model_max_length = trainer.processing_class.init_kwargs["model_max_length"] = version
    trainer.save_model()


def versions(folder):
    model = EvaByteForMTPC.from_pretrained(folder)
    weights = {each.flatten()[0].item() for each in model.parameters()}
    fields = {round(model.config.initializer_range * 1000), EvaByteTokenizer.from_pretrained(folder).model_max_length}
    return weights | fields


def test_the_final_save_is_one_version_with_its_tokenizer(tmp_path):
    trainer = trainer_of(tmp_path / "run")
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "README.md").write_text("by hand")
    save(trainer, 1)
    number, more = 0, True
    while more:
        save(trainer, 1)
        more = killed(lambda: save(trainer, 2), number)
        assert versions(tmp_path / "run") in ({1}, {2}), number
        number += 5
    save(trainer, 2)
    assert versions(tmp_path / "run") == {2} and hidden(tmp_path) == []
    assert (tmp_path / "run" / "README.md").read_text() == "by hand" and number > 20


@pytest.fixture
def unfinished(tmp_path):
    """A trainer whose directory `run` was killed when its version 2 was complete, and not yet brought in."""
    trainer, number = trainer_of(tmp_path / "run"), 0
    while not any((tmp_path / "run").glob(COMPLETE)):
        save(trainer, 1)
        assert killed(lambda: save(trainer, 2), number)
        number += 1
    return trainer


def test_a_push_finishes_first_and_leaves_hidden_folders_out(unfinished, tmp_path):
    (tmp_path / "run" / ".tokenahead-saving.left").mkdir()
    (tmp_path / "run" / ".tokenahead-saving.left" / "model.safetensors").write_text("")
    public_copy(tmp_path / "run", tmp_path / "copy")
    assert versions(tmp_path / "copy") == {2} and hidden(tmp_path / "copy") == []


def test_a_run_resumes_from_a_checkpoint_that_it_finishes(unfinished, tmp_path):
    unfinished._load_from_checkpoint(str(tmp_path / "run"))
    assert {each.flatten()[0].item() for each in unfinished.model.parameters()} == {2.0}
    assert hidden(tmp_path / "run") == []


def test_auto_classes_read_what_a_load_of_ours_has_finished(unfinished, tmp_path):
    EvaByteForMTPC.from_pretrained(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["initializer_range"] == 0.002
    assert AutoTokenizer.from_pretrained(tmp_path / "run").model_max_length == 2


def test_a_directory_with_an_unfinished_model_counts_as_a_model(unfinished, tmp_path):
    (tmp_path / "run" / "config.json").unlink(missing_ok=True)
    assert holds_model(tmp_path / "run") and not has_adapters(tmp_path / "run")
