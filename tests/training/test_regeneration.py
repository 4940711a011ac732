"""Text that the backbone writes: its own, the same after an interruption, with labels on completions alone."""

import sys

import datasets
import pytest
import torch

from tests.training.test_evaluation_loss import llama
from tokenahead import NgramDrafter
from tokenahead.training import regenerate
from tokenahead.training import regeneration as regeneration_module
from tokenahead.training.parts import part_files
from tokenahead.training.regeneration import RegeneratedText
from tokenahead.training.utils import MissingExtraError

PROMPTS = [[70, 71, 72], [80], [90, 91], [100, 101, 102, 103], [75, 76]]


def test_text_is_the_backbones_own_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    backbone = llama()
    backbone.generation_config.eos_token_id = 84
    options = dict(max_new_tokens=12, batch_size=2)
    rows = regenerate(backbone, PROMPTS, tmp_path / "greedy", **options, do_sample=False)
    for row, prompt in zip(rows, PROMPTS):
        want = backbone.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0]
        assert row["input_ids"].equal(want) and row["labels"][: len(prompt)].eq(-100).all()
        assert row["labels"][len(prompt) :].equal(want[len(prompt) :])
    drawn = regenerate(backbone, PROMPTS, tmp_path / "drawn", **options, do_sample=True, top_k=0)
    monkeypatch.setattr(regeneration_module, "_SECONDS", 0.0)  # a part for each batch
    for left in range(3):
        for path in part_files(tmp_path / "drawn")[left:]:
            path.unlink()
        with pytest.raises(ValueError, match="5.*rows"):
            RegeneratedText(tmp_path / "drawn")
        again = regenerate(backbone, PROMPTS, tmp_path / "drawn", **options, do_sample=True, top_k=0)
        assert again.rows == drawn.rows and len(part_files(tmp_path / "drawn")) == 3
    drafted = NgramDrafter().attach(backbone)
    padded = [{"input_ids": [0, 0, *row], "attention_mask": [0, 0, *[1] * len(row)]} for row in PROMPTS]
    found = regenerate(backbone, padded, tmp_path / "g2", **options, do_sample=False, assistant_model=drafted)
    assert found.rows == rows.rows  # padding of prompts is no prompt


def test_samples_are_drawn_from_the_whole_distribution_unless_another_is_asked_for(tmp_path):
    backbone = llama()
    # what the model's own defaults cut must not be cut, or its text is not that of the distribution that is measured
    backbone.generation_config.update(top_k=1, top_p=0.5, temperature=0.01)
    options = dict(max_new_tokens=6, batch_size=5, do_sample=True)
    whole = dict(top_k=0, top_p=1.0, temperature=1.0)
    drawn = regenerate(backbone, PROMPTS, tmp_path / "own", **options)
    assert drawn.rows == regenerate(backbone, PROMPTS, tmp_path / "whole", **options, **whole).rows
    greedy = regenerate(backbone, PROMPTS, tmp_path / "greedy", max_new_tokens=6, do_sample=False)
    assert drawn.rows != greedy.rows
    assert regenerate(backbone, PROMPTS, tmp_path / "asked", **options, top_k=1).rows == greedy.rows
    backbone.generation_config.do_sample = True  # whoever asks for samples
    found = regenerate(backbone, PROMPTS, tmp_path / "default", max_new_tokens=6, batch_size=5)
    assert found.rows == drawn.rows


@pytest.mark.core
def test_refusals(tmp_path):
    backbone = llama()
    with pytest.raises(ValueError, match="max_tokns"):  # which binds no folder, as nothing is written
        regenerate(backbone, PROMPTS, tmp_path, max_new_tokens=4, max_tokns=3)
    regenerate(backbone, PROMPTS, tmp_path, max_new_tokens=2)
    with pytest.raises(ValueError, match="max_new_tokens=.*2.*3"):
        regenerate(backbone, PROMPTS, tmp_path, max_new_tokens=3)
    with pytest.raises(ValueError, match="prompts="):
        regenerate(backbone, PROMPTS[::-1], tmp_path, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"options=.*{\}.*{'bad_words_ids': \[\[7\]\]\}"):
        regenerate(backbone, PROMPTS, tmp_path, max_new_tokens=2, bad_words_ids=[[7]])
    with torch.no_grad():
        backbone.lm_head.weight += 1
    with pytest.raises(ValueError, match="backbone="):
        regenerate(backbone, PROMPTS, tmp_path, max_new_tokens=2)
    with pytest.raises(ValueError, match="prompts"):
        regenerate(backbone, [], tmp_path)
    with pytest.raises(ValueError, match="prompts"):
        regenerate(backbone, [[1], []], tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="plan.json"):
        RegeneratedText(tmp_path / "x")


def test_rows_are_a_data_set_that_comes_back(tmp_path, monkeypatch):
    prompts = datasets.Dataset.from_dict({"input_ids": PROMPTS, "source": ["a file"] * len(PROMPTS)})
    rows = regenerate(llama(), prompts, tmp_path / "answers", max_new_tokens=6)
    assert regenerate(llama(), PROMPTS, tmp_path / "answers", max_new_tokens=6).rows == rows.rows
    data = rows.to_dataset()
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "pushed.parquet")  # the file that `push_to_hub` sends
    pushed = datasets.Dataset.from_parquet(str(tmp_path / "pushed.parquet"), cache_dir=str(tmp_path / "cache"))
    for again in (datasets.load_from_disk(tmp_path / "saved"), pushed):
        assert again.column_names == ["input_ids", "labels"] and len(again) == len(rows)
        for found, row in zip(again.with_format("torch"), rows):
            assert all(torch.equal(found[name], row[name]) for name in row)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"to_dataset needs .*tokenahead\[train\]"):
        rows.to_dataset()
