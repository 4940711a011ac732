"""DPO of a model that drafts for itself: its preferences move, and its drafter keeps up."""

import copy

import pytest
from datasets import Dataset
from trl import DPOConfig

from tests.every_model import llama
from tests.families import family_model
from tests.models import tiny_model
from tokenahead import EvaByteTokenizer, MTPHeads
from tokenahead.training import MTPDPOTrainer

PAIRS = {"prompt": ["say: "] * 4, "chosen": ["hello world"] * 4, "rejected": ["go away now"] * 4}


def trainer_of(model, folder, settings=None, **options):
    config = DPOConfig(
        str(folder), use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,
        learning_rate=3e-3, per_device_train_batch_size=4, gradient_checkpointing=False, max_length=64, beta=0.5,
        lr_scheduler_type="constant", disable_tqdm=True, **({"max_steps": 8} | (settings or {})),
    )  # fmt: skip
    data = Dataset.from_dict(PAIRS)
    given = dict(train_dataset=data, processing_class=EvaByteTokenizer())
    return MTPDPOTrainer(model, copy.deepcopy(model), config, **given, **options)


@pytest.mark.by_day("evabyte")
@pytest.mark.core_cases("evabyte")
@pytest.mark.parametrize(
    "make", [tiny_model, lambda: family_model("llama", vocab_size=320)], ids=["evabyte", "modules"]
)
def test_preferences_and_drafter_learn_together(make, tmp_path):
    trainer = trainer_of(make(), tmp_path, drafter_weight=1.0)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "drafter_loss" in entry]
    assert entries[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-5)
    assert entries[-1]["rewards/margins"] > 0.1 and entries[-1]["drafter_loss"] < entries[0]["drafter_loss"] - 0.1


def test_what_does_not_draft_for_itself_is_refused(tmp_path):
    for model in (MTPHeads.from_backbone(llama(vocab_size=320)), llama(vocab_size=320)):
        with pytest.raises(TypeError, match="drafts for itself"):
            MTPDPOTrainer(model)
    for weight in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=f"drafter_weight={weight} must be a number of at least 0"):
            MTPDPOTrainer(tiny_model(), drafter_weight=weight)
