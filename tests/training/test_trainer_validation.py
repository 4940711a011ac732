"""What `MTPTrainer` and `MTPSFTTrainer` cannot train: one clear error each, before the first step."""

import copy

import pytest
import torch
from datasets import Dataset
from torch.utils.data import IterableDataset
from transformers import TrainingArguments
from trl import SFTConfig

from tests import ptp_models
from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead import EvaByteTokenizer
from tokenahead.training import MTPSFTTrainer, MTPTrainer

KINDS = [MTPTrainer, MTPSFTTrainer]


def quiet(folder, kind, **options):
    make = SFTConfig if kind is MTPSFTTrainer else TrainingArguments
    own = {"bf16": False} if kind is MTPSFTTrainer else {}
    return make(str(folder), use_cpu=True, report_to="none", save_strategy="no", max_steps=2, **own, **options)


def text():
    return Dataset.from_dict({"text": ["def f(x):\n    return x\n"] * 4})


@pytest.mark.by_day("plain model-MTPTrainer", "path-MTPSFTTrainer")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "some/folder", "not a str"),
        (ptp_models.backbone, "LlamaForCausalLM"),
        (ptp_models.student, "PTPForCausalLM"),
    ],
    ids=["path", "plain model", "parallel prediction"],
)
def test_other_models_are_refused(kind, make, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        kind(make(), quiet(tmp_path, kind), train_dataset=text(), processing_class=EvaByteTokenizer())


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def masked_rows():
    return [{**row, "labels": torch.full_like(row["labels"], -100)} for row in ragged_rows()]


@pytest.mark.parametrize("wrap", [list, Stream])
def test_labels_that_score_nothing_are_refused_before_the_first_step(wrap, tmp_path):
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_for(model, tmp_path, ragged_rows(), max_steps=2)
    trainer.train_dataset = wrap(masked_rows())
    with pytest.raises(ValueError, match="train_dataset.*-100"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_first_update_without_targets_is_no_reason_to_stop(tmp_path):
    rows = [*masked_rows()[:2], *ragged_rows()]
    trainer = trainer_for(small_model(), tmp_path, rows, max_steps=3, train_sampling_strategy="sequential")
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("kind", KINDS)
def test_processes_that_accelerate_does_not_join_are_refused(kind, tmp_path, monkeypatch):
    config = quiet(tmp_path, kind)
    assert config.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2.*use_cpu=True"):
        kind(small_model(), config, train_dataset=text(), processing_class=EvaByteTokenizer())
