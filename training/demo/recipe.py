"""How the demo's model is made: its size, and the stages of its training. Measures and shows nothing but progress."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, TrainingArguments

from ...configuration import EvaByteConfig
from ...modeling import EvaByteForMTPC
from ..callbacks import ProgressCallback, TimeBudget, TimedTrainer
from ..data import ByteWindows, SourceText
from ..muon import JointOptimizer, Muon
from ..threads import ThreadGovernor


def tiny_config() -> EvaByteConfig:
    """A model of 1.2 million parameters: what two CPU cores can teach a useful amount in a few minutes."""
    return EvaByteConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        window_size=256,
        chunk_size=16,
        num_pred_heads=8,
        max_position_embeddings=4096,
        norm_add_unit_offset=True,
        initializer_range=0.04,
        rope_theta=1e5,
        pad_token_id=0,
        mtp_head={"gamma": 0.6},
    )


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        title: What the progress bar calls it.
        part: What is trained, as `model.train_only` takes it.
        share: Its share of the time.
        length: Ids per window of text.
        rows: Windows per step.
        rates: Share of the peak learning rates at its start and at its end.
        learning_rate: Peak for all that is no matrix of a layer (AdamW).
        matrix_learning_rate: Peak for the matrices of the layers (Muon).
    """

    title: str
    part: str
    share: float
    length: int
    rows: int
    rates: tuple[float, float]
    learning_rate: float = 1e-2
    matrix_learning_rate: float = 0.03


STAGES = (
    # short windows show more different text in the same time; long ones teach what lies beyond the attention window
    Stage("backbone and heads", "all", share=0.68, length=256, rows=4, rates=(1.0, 0.25)),
    Stage("longer windows", "all", share=0.2, length=512, rows=2, rates=(0.25, 0.0)),
    Stage("heads alone", "heads", share=0.12, length=512, rows=4, rates=(1.0, 0.0)),
)
"""First the heads learn together with the backbone, so that its states suit them, too (drafts of heads that are trained
on a finished backbone only are accepted a sixth less). At the end they learn alone, because the backbone's
distribution, which they have to predict, then no longer changes."""


def train(
    model: EvaByteForMTPC,
    text: SourceText,
    minutes: float,
    console: Console,
    seed: int = 0,
    stages: Sequence[Stage] = STAGES,
    callbacks: Sequence[TrainerCallback] = (),
) -> None:
    """Trains a model through all stages; it then is in evaluation mode, with nothing frozen.

    Args:
        model: The model.
        text: What it learns from.
        minutes: Time for all stages.
        console: Where progress is shown.
        seed: Of the order of the text.
        stages: The stages.
        callbacks: Further callbacks of every stage's trainer.
    """
    governor = ThreadGovernor(torch.get_num_threads())
    for stage in stages:
        model.train_only(stage.part)
        budget = TimeBudget(60.0 * minutes * stage.share, *stage.rates)
        progress = ProgressCallback(stage.title, budget, stage.rows * stage.length, console)
        try:
            _train_stage(model, text, stage, budget, seed, [governor, progress, *callbacks])
        finally:
            progress.close()
    model.train_only("all")
    model.eval()


def _train_stage(
    model: EvaByteForMTPC,
    text: SourceText,
    stage: Stage,
    budget: TimeBudget,
    seed: int,
    callbacks: list[TrainerCallback],
) -> None:
    with tempfile.TemporaryDirectory() as scratch:  # the Trainer wants a directory, though nothing is saved there
        trainer = TimedTrainer(
            budget,
            model,
            _arguments(scratch, stage, seed),
            train_dataset=ByteWindows(text, stage.length),
            optimizers=(build_optimizer(model, stage.learning_rate, stage.matrix_learning_rate), None),
            callbacks=callbacks,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def build_optimizer(model: EvaByteForMTPC, learning_rate: float, matrix_learning_rate: float) -> torch.optim.Optimizer:
    """Muon for the matrices of the layers and AdamW for the rest, without weight decay; frozen parameters get neither.

    Args:
        model: The model, with what is to be trained chosen (`train_only`).
        learning_rate: Of AdamW.
        matrix_learning_rate: Of Muon.
    """
    layers = {id(parameter) for parameter in model.model.layers.parameters() if parameter.dim() == 2}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if id(parameter) in layers]
    others = [parameter for parameter in trained if id(parameter) not in layers]
    adam = torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return JointOptimizer([Muon(matrices, lr=matrix_learning_rate), adam]) if matrices else adam


def has_fast_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 matrices itself (AVX512-BF16, AMX); emulation would be slower."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _arguments(folder: str, stage: Stage, seed: int) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        max_steps=sys.maxsize,  # the budget of time ends the training
        per_device_train_batch_size=stage.rows,
        max_grad_norm=1.0,
        logging_steps=10,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=has_fast_bfloat16(),
        use_cpu=True,
        dataloader_pin_memory=False,
        dataloader_drop_last=True,
        seed=seed,
    )
