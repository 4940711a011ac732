"""Trainers of TRL on models that draft: what they do not train is said, and what they cannot train is refused."""

import logging
import traceback

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.training.test_evaluation_loss import llama
from tests.training.test_rollouts import tokenizer
from tokenahead import DeepSeekMTP, MTPHeads, PTPForCausalLM

SETTINGS = dict(max_steps=2, report_to=[], use_cpu=True, per_device_train_batch_size=2, save_strategy="no")
MAKERS = {
    "heads": lambda backbone: MTPHeads.from_backbone(backbone, window=3),
    "modules": lambda backbone: DeepSeekMTP.from_backbone(backbone, 1),
    "ptp": lambda backbone: PTPForCausalLM.from_backbone(backbone, num_slots=2),
}


def train(kind, method, folder, adapt=lambda model: model):
    model = adapt(MAKERS[kind](llama(num_hidden_layers=2)))
    if method == "sft":
        data = Dataset.from_dict({"text": ["a b c d e f"] * 4})
        config = SFTConfig(str(folder), max_length=8, **SETTINGS)
        trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer())
    else:
        config = GRPOConfig(str(folder), num_generations=2, max_completion_length=3, **SETTINGS)
        data = Dataset.from_dict({"prompt": ["a b c d"] * 4})
        rewards = [lambda completions, **_: [float(len(text)) for text in completions]]
        trainer = GRPOTrainer(model, rewards, config, data, processing_class=tokenizer())
    trainer.train()
    return model


@pytest.mark.by_day("heads-sft", "ptp-grpo")
@pytest.mark.parametrize("method", ["sft", "grpo"])
@pytest.mark.parametrize("kind", ["heads", "ptp"])
def test_what_cannot_learn_is_refused_by_name(kind, method, tmp_path):
    with pytest.raises(RuntimeError, match="MTPHeads.*MTPSFTTrainer" if kind == "heads" else "PTP.*PTPSFTTrainer"):
        train(kind, method, tmp_path)


def with_adapters(model):
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.mark.by_day("plain")
@pytest.mark.parametrize("adapt", [lambda model: model, with_adapters], ids=["plain", "peft"])
def test_modules_that_do_not_learn_are_said_once(adapt, tmp_path, caplog):
    logging.Logger.warning_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").propagate = True
        model = train("modules", "sft", tmp_path, adapt)
    assert sum("MTPSFTTrainer" in record.message for record in caplog.records) == 1
    caplog.clear()
    model.train()(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]]))
    model.eval()(torch.tensor([[1, 2, 3]]))
    assert not caplog.records


def test_a_trained_model_has_one_frame_of_ours_around_its_forward(tmp_path):
    model, names = train("modules", "sft", tmp_path), []

    def note(*_):
        names.extend(frame.name for frame in traceback.extract_stack() if "common/online" in frame.filename)

    model.base_model.register_forward_pre_hook(note)
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]]))
    assert set(names) <= {"__call__"} and len(names) == 1
    assert not {"learns_besides", "has_warned"} & vars(model).keys()
