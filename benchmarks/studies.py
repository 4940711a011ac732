"""What studies of trained drafters share: training against the clock, and held-out text to measure along."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import ByteWindows, Corpus
from torch.optim.lr_scheduler import LambdaLR
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tokenahead.training.box import code_prompts
from tokenahead.training.evaluation import DraftMeasures
from tokenahead.training.evaluation.drafts import text_of
from tokenahead.training.features import FeatureDataset, StatesSource, cache_features
from tokenahead.training.strategy import TrainingStrategy
from tokenahead.training.trainer import MTPTrainer

LENGTH, ROWS = 256, 4
"""Positions of a row, and rows of a step."""
BEGUN = 32
"""Ids of the beginnings that a backbone continues."""
_WARMUP = 0.04  # share of a budget in which the learning rate rises


class TimeBudget(TrainerCallback):
    """Ends a training when its seconds are spent; the learning rate rises for a while, and then falls to 0.

    Args:
        seconds: The budget.
        clock: Tells the time; `time.process_time` leaves out what other programs take.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.process_time) -> None:
        self.seconds, self.clock, self.started = seconds, clock, clock()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the clock."""
        self.started = self.clock()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop at the end of the first step after the budget."""
        control.should_training_stop = control.should_training_stop or self.passed() >= 1

    def passed(self) -> float:
        """Return the share of the budget that is spent."""
        return min(1.0, (self.clock() - self.started) / self.seconds)

    def rate(self, step: int) -> float:
        """Return the share of the peak learning rate that is due now."""
        return min(1.0, 0.1 + 0.9 * self.passed() / _WARMUP) * (1 - self.passed())


def train(
    model: torch.nn.Module,
    strategy: TrainingStrategy | Callable[..., Trainer],
    data: Any,
    seconds: float,
    rate: float = 0.0,
    seed: int = 0,
    steps: int | None = None,
    rows: int = ROWS,
    bfloat16: bool = False,
    prints: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """Train for so many seconds of processor time, or so many steps, with a rate that falls to 0; `prints` what is
    logged. Instead of a strategy: what makes a trainer of model, arguments and data."""
    trainer: Any = None
    budget = TimeBudget(seconds)
    if steps is not None:
        budget = TimeBudget(steps, clock=lambda: trainer.state.global_step if trainer else 0)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=10**6, per_device_train_batch_size=rows, report_to="none", seed=seed,
            use_cpu=not torch.cuda.is_available(), save_strategy="no", disable_tqdm=True, dataloader_drop_last=True,
            logging_steps=20, logging_nan_inf_filter=False, learning_rate=rate, weight_decay=0.0, bf16=bfloat16,
            dataloader_pin_memory=False,
        )  # fmt: skip
        is_own = isinstance(strategy, TrainingStrategy)
        make = partial(MTPTrainer, strategy=strategy, tokens_per_batch=0) if is_own else strategy
        trainer = make(model, arguments, train_dataset=data)
        if isinstance(data, StatesSource):
            trainer.data_collator = data.collate
        trainer.lr_scheduler = LambdaLR(trainer.create_optimizer(), budget.rate)
        for callback in (budget, *callbacks):
            trainer.add_callback(callback)
        if not prints:
            trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()
    return trainer


def read_answers(path: Path, longest: int) -> list[tuple[torch.Tensor, int]]:
    """Return ids of prompts and answers, cut, and the lengths of prompts, of a file of `ids`, `lengths`, `prompts`."""
    stored = np.load(path)
    ids, ends = torch.from_numpy(stored["ids"].astype(np.int64)), stored["lengths"].cumsum()
    pairs = zip(ids.tensor_split(torch.from_numpy(ends[:-1].astype(np.int64))), stored["prompts"].tolist())
    return [(text[:longest], prompt) for text, prompt in pairs if min(len(text), longest) - prompt > 8]


def row_of(text: torch.Tensor, prompt: int) -> dict[str, torch.Tensor]:
    """Return a row whose prompt is not scored."""
    return {"input_ids": text, "labels": text.clone().index_fill(0, torch.arange(prompt), -100)}


def chosen_rows(corpus: Corpus, count: int) -> list[dict[str, torch.Tensor]]:
    """Return windows of the text to learn from, the same in every run."""
    windows = ByteWindows(corpus.train, LENGTH)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))
    return [windows[index] for index in order[:count].tolist()]


def features_of(drafter: Any, corpus: Corpus, rows: int, folder: Path) -> FeatureDataset:
    """Return what a drafter reads of windows, computed once."""
    return cache_features(drafter, chosen_rows(corpus, rows), folder)


def held_out_rows(corpus: Corpus, count: int = 32) -> torch.Tensor:
    """Return windows [count, LENGTH] from all over the held-out text."""
    windows = ByteWindows(corpus.held_out, LENGTH)
    every = max(1, len(windows) // count)
    return torch.stack([windows[index]["input_ids"] for index in range(0, len(windows), every)][:count])


def drawn_texts(backbone: Any, held_out: torch.Tensor) -> torch.Tensor:
    """Return held-out beginnings as the backbone continues them at T = 1."""
    torch.manual_seed(0)
    begun = held_out[:, :BEGUN]
    options = dict(attention_mask=torch.ones_like(begun), do_sample=True, top_k=0, pad_token_id=0)
    return backbone.generate(begun, **options, max_new_tokens=LENGTH - BEGUN)


def measured(drafter: Any, texts: torch.Tensor) -> DraftMeasures:
    """Return expected calls and losses along texts behind their beginnings, at T = 1."""
    measures = DraftMeasures()
    for part in texts.split(ROWS):
        measures.add(drafter, text_of(part[:, :BEGUN], part[:, BEGUN:]))
    return measures


def beginnings(corpus: Corpus, count: int, new_tokens: int) -> list[str]:
    """Return held-out code to complete, so short that new tokens stay at positions the backbone was trained at."""
    return code_prompts(corpus.held_out.contents(), count, length=LENGTH - new_tokens)
