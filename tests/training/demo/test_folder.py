"""The output directory: what is refused, what is replaced, what stays."""

import pytest
import torch

from tests.internals import MARK, check_output, forget_measurements, save_checkpoint
from tests.training.conftest import small_model
from tokenahead import EvaByteForMTPC, EvaByteTokenizer
from tokenahead.model_cards import render_card, write_card


def test_a_new_folder_is_made_whole(tmp_path):
    model = small_model()
    save_checkpoint(tmp_path / "out", model, EvaByteTokenizer(), {"made_by": "a test"})
    assert (tmp_path / "out" / MARK).read_text() == '{\n  "made_by": "a test"\n}\n'
    loaded = EvaByteForMTPC.from_pretrained(tmp_path / "out")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    assert EvaByteTokenizer.from_pretrained(tmp_path / "out")("a").input_ids == [1, 161]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_folder_keeps_what_has_another_name(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    save_checkpoint(tmp_path, small_model(0), EvaByteTokenizer(), {})
    other = small_model(1)
    save_checkpoint(tmp_path, other, EvaByteTokenizer(), {})
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert torch.equal(EvaByteForMTPC.from_pretrained(tmp_path).lm_head.weight, other.lm_head.weight)


def test_an_interruption_while_saving_leaves_the_old_model_whole(tmp_path, monkeypatch):
    output, old = tmp_path / "out", small_model(0)
    save_checkpoint(output, old, EvaByteTokenizer(), {})

    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(EvaByteTokenizer, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(output, small_model(1), EvaByteTokenizer(), {})
    assert torch.equal(EvaByteForMTPC.from_pretrained(output).lm_head.weight, old.lm_head.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_someone_elses_folder_is_refused_unless_told_otherwise(tmp_path):
    check_output(tmp_path / "new" / "deep", overwrite=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]  # the directory itself comes with the model
    check_output(tmp_path / "new", overwrite=False)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="--overwrite"):
        check_output(tmp_path, overwrite=False)
    check_output(tmp_path, overwrite=True)
    (tmp_path / MARK).write_text("{}")
    check_output(tmp_path, overwrite=False)
    with pytest.raises(NotADirectoryError, match="is a file"):
        check_output(tmp_path / "notes.txt", overwrite=True)


def test_figures_of_an_earlier_demo_go_and_words_stay(tmp_path):
    write_card(tmp_path, render_card(small_model(), None))
    (tmp_path / "results.json").write_text("{}")
    forget_measurements(tmp_path, "results.json", "acceptance.png")
    assert (tmp_path / "results.json").exists()  # without the mark it may be anyone's
    (tmp_path / MARK).write_text("{}")
    forget_measurements(tmp_path, "results.json", "acceptance.png")
    assert [path.name for path in tmp_path.iterdir()] == [MARK]
    (tmp_path / "README.md").write_text("my own words")
    forget_measurements(tmp_path, "results.json")
    assert (tmp_path / "README.md").read_text() == "my own words"
