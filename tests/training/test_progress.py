"""The bar of a training says how many tokens a second takes, and how many of them are not padding."""

import re

import pytest
import torch
from transformers import ProgressCallback

from tests.ptp_models import student
from tests.training.conftest import small_model, trainer_for
from tokenahead.training import PTPTrainer

ROWS = [{"input_ids": torch.arange(2, 2 + size), "labels": torch.arange(2, 2 + size)} for size in (6, 4, 6, 3)]
MODELS = {"heads": (small_model, {}), "slots": (student, {"trainer_class": PTPTrainer, "max_grad_norm": 1.0})}


def padded(row):
    """Rows as a padding collator makes them."""
    fill = 6 - len(row["input_ids"])
    parts = {"input_ids": 0, "labels": -100}
    found = {name: torch.nn.functional.pad(row[name], (0, fill), value=value) for name, value in parts.items()}
    return found | {"attention_mask": torch.arange(6) < len(row["input_ids"])}


def bar_of(kind, tmp_path, monkeypatch, **options):
    make, given = MODELS[kind]
    trainer = trainer_for(make(), tmp_path, [padded(row) for row in ROWS], disable_tqdm=False, **given, **options)
    [bar] = [each for each in trainer.callback_handler.callbacks if isinstance(each, ProgressCallback)]
    monkeypatch.setattr(type(bar), "seconds_between", 0.0)
    return trainer, bar


@pytest.mark.by_day("slots")
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_per_second_and_useful_ones_are_shown(kind, tmp_path, monkeypatch, capsys):
    settings = {"max_steps": 2, "train_sampling_strategy": "sequential", "gradient_accumulation_steps": 2}
    trainer, _ = bar_of(kind, tmp_path, monkeypatch, **settings)
    trainer.train()
    shown = re.findall(r"(\S+)<(\S+), .*?, ([\d,]+) tokens/s, (\d+)% useful", capsys.readouterr().err)
    assert shown and int(shown[-1][2].replace(",", "")) > 0
    assert {share for *_, share in shown} == {"100" if kind == "heads" else "79"}  # joined, or 6 + 4 + 6 + 3 of 24


def test_an_evaluation_takes_no_time(tmp_path, monkeypatch):
    trainer, bar = bar_of("heads", tmp_path, monkeypatch)
    bar.count({"input_ids": torch.zeros(2, 3)})
    assert bar._tokens == 6
    trainer.evaluate()
    assert bar._tokens == 0


def test_without_a_bar_nothing_is_counted(tmp_path):
    trainer = trainer_for(small_model(), tmp_path, ROWS[:1], disable_tqdm=True)
    assert trainer._bar is None
