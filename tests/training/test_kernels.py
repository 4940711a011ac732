"""Compiled steps, and liger's kernels without a GPU: no trainer takes them, and each says why before its first step."""

import copy

import pytest
import torch
from datasets import Dataset
from transformers import TrainingArguments
from trl import DPOConfig, SFTConfig

from tests.families import family_model
from tests.ptp_models import backbone, student
from tests.training.test_dpo import PAIRS
from tokenahead import EagleHead, EvaByteTokenizer, MTPHeads
from tokenahead.experimental import MuToRTrainer
from tokenahead.training import MTPDPOTrainer, MTPSFTTrainer, MTPTrainer, PTPSFTTrainer, PTPTrainer
from tokenahead.training.trainer_base import check_kernels

ROWS = [{"input_ids": [3, 4, 5, 6, 7], "labels": [3, 4, 5, 6, 7]}] * 2
TRAINERS = {
    "heads": (MTPTrainer, lambda: MTPHeads.from_backbone(backbone(), window=3)),
    "eagle": (MTPTrainer, lambda: EagleHead.from_backbone(backbone(), version=1)),
    "modules": (MTPTrainer, lambda: family_model("llama")),
    "slots": (PTPTrainer, student),
    "registers": (MuToRTrainer, backbone),
    "heads, TRL": (MTPSFTTrainer, lambda: MTPHeads.from_backbone(backbone(), window=3)),
    "slots, TRL": (PTPSFTTrainer, student),
    "preferences": (MTPDPOTrainer, lambda: family_model("llama", vocab_size=320)),
}
ASKED = {"torch_compile": True, "torch_compile_backend": "eager", "torch_compile_mode": "reduce-overhead"}


def made(kind, folder, **options):
    trainer_class, model = TRAINERS[kind]
    sft, dpo = issubclass(trainer_class, (MTPSFTTrainer, PTPSFTTrainer)), trainer_class is MTPDPOTrainer
    arguments = SFTConfig if sft else DPOConfig if dpo else TrainingArguments
    options |= {"bf16": False} if sft or dpo else {}
    how = arguments(str(folder), use_cpu=True, report_to="none", save_strategy="no", max_steps=1, **options)
    data = Dataset.from_dict(PAIRS) if dpo else Dataset.from_list(ROWS)
    model = model()
    given = [model, copy.deepcopy(model), how] if dpo else [model, how]
    return trainer_class(*given, train_dataset=data, processing_class=EvaByteTokenizer() if sft or dpo else None)


@pytest.mark.by_day("heads-torch_compile", "slots, TRL-torch_compile_mode")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", TRAINERS)
def test_no_trainer_takes_it(kind, asked, tmp_path):
    with pytest.raises(ValueError, match="torch_compile=True"):
        made(kind, tmp_path, **{asked: ASKED[asked]})


def test_a_backend_of_accelerate_launch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(ValueError, match="torch_compile"):
        made("heads", tmp_path)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_refused(in_place, tmp_path):
    heads = MTPHeads.from_backbone(backbone(), window=3)
    if in_place:
        heads.compile(backend="eager")
    else:
        heads = torch.compile(heads, backend="eager")
    with pytest.raises(ValueError, match="torch_compile"):
        MTPTrainer(heads, TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"), train_dataset=ROWS)


def test_ligers_loss_never_replaces_that_of_a_drafter(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda"))
    given = {"output_dir": str(tmp_path), "use_liger_kernel": True, "report_to": "none"}
    arguments = TrainingArguments(liger_kernel_config={"rms_norm": True, "fused_linear_cross_entropy": True}, **given)
    check_kernels(arguments)
    assert arguments.liger_kernel_config == {"rms_norm": True, "fused_linear_cross_entropy": False}
