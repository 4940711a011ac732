"""What trainers refuse before the first step: ids that are none, checkpoints of others, settings without effect."""

import copy

import pytest
import torch

from tests import ptp_models
from tests.every_model import llama
from tests.families import family_model
from tests.training.conftest import ragged_rows, small_model, trainer_for
from tokenahead import EagleHead, MTPHeads, PTPForCausalLM
from tokenahead.training import MTPTrainer, PTPTrainer


def student(**options):
    return PTPForCausalLM.from_backbone(ptp_models.backbone(), num_slots=3, **options)


def rows_with(value: int, name: str, size: int = 320):
    rows = ragged_rows(vocab_size=size)
    for row in rows:
        row[name] = row[name].clone()
    rows[1][name][5] = value
    return rows


@pytest.mark.by_day("labels--7", "input_ids-5000")
@pytest.mark.parametrize(("name", "value"), [("labels", 320), ("labels", -7), ("input_ids", 5000)])
def test_ids_outside_the_vocabulary_are_named(name, value, tmp_path):
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_for(model, tmp_path, rows_with(value, name), max_steps=2, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match=f"{name} hold {value}, but the vocabulary has 320 tokens"):
        trainer.train()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_ids_of_a_student_are_checked_too(tmp_path):
    size = ptp_models.VOCABULARY
    trainer = trainer_for(
        student(), tmp_path, rows_with(size, "input_ids", size), PTPTrainer, max_steps=1, gradient_accumulation_steps=4
    )
    with pytest.raises(ValueError, match=f"input_ids hold {size}"):
        trainer.train()


def short_rows(length: int):
    return [{"input_ids": torch.arange(70, 70 + length), "labels": torch.arange(70, 70 + length)} for _ in range(4)]


def with_head(**options):
    model = small_model()
    model.set_head(**options)
    return model


def circuit(rank: int):
    return with_head(head_type="cp", rank=rank)


def heads(window: int):
    return MTPHeads.from_backbone(llama(), window=window)


def modules(count: int):
    return family_model("deepseek_v3", num_nextn_predict_layers=count)


def eagle():
    return EagleHead.from_backbone(llama(num_hidden_layers=4))


PAIRS = {
    "another head": (small_model, lambda: circuit(2), "head_type='ff'.*'cp'"),
    "another rank": (lambda: circuit(2), lambda: circuit(3), "rank=2.* 3"),
    "another model": (lambda: heads(3), eagle, "model_type='mtp_heads'"),
    "another window": (lambda: heads(3), lambda: heads(4), "window=3.* 4"),
    "other modules": (lambda: modules(2), lambda: modules(1), "num_nextn_predict_layers=2"),
    "another student": (student, lambda: student(lora_rank=2), "lora_rank=64.* 2"),
}


@pytest.mark.by_day("another head", "another student")
@pytest.mark.core_cases("another head")
@pytest.mark.parametrize(("earlier", "now", "message"), PAIRS.values(), ids=PAIRS)
def test_a_checkpoint_of_another_model_is_refused(earlier, now, message, tmp_path):
    def run(model, **options):
        size = model.config.get_text_config().vocab_size
        kind = PTPTrainer if isinstance(model, PTPForCausalLM) else MTPTrainer
        rows = ragged_rows(vocab_size=size)
        return trainer_for(model, tmp_path, rows, kind, max_steps=2, save_strategy="steps", save_steps=1, **options)

    run(earlier()).train()
    model = now()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        run(model).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
