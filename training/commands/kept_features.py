"""Has a run learn from states of its frozen backbone that are kept on disk, where its settings say so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from ...generation.attach import AttachableDrafter
from ..extras import needs_extra
from ..features import STATES, FeatureDataset, cache_features
from .settings import Settings

with needs_extra("train", "tokenahead train"):
    from datasets import Dataset


def check_features(settings: Settings, model: Any) -> None:
    """Refuses a run that has no states to keep, before anything is written.

    Args:
        settings: Of the run; `features` names the directory.
        model: What is trained.

    Raises:
        ValueError: A run whose backbone does not stand still, a stream, or a file.
    """
    folder = settings.drafter.features
    if folder is None:
        return
    if Path(folder).is_file():
        raise ValueError(f"features={folder} is a file: choose a directory")
    if not isinstance(model, AttachableDrafter) or settings.drafter.training_strategy().train != "drafter":
        raise ValueError(
            f"features={folder} keeps the states of a backbone that stands still: leave it out, or train heads or an "
            "EAGLE head apart, with strategy: {train: drafter}"
        )
    streams = {"dataset_streaming": settings.data.dataset_streaming, "streaming": settings.mixture.streaming}
    for name in (name for name, value in streams.items() if value):
        raise ValueError(f"features={folder} holds all rows at once, and a stream has no end: set {name}: false")


def keep_features(trainer: Trainer, settings: Settings) -> None:
    """Writes the states that the drafter learns from, or those that are missing, and puts them in place of the data.

    Args:
        trainer: Of the run; its data are prepared.
        settings: Of the run, which `check_features` took.

    Raises:
        ValueError: A directory of other features.
        OSError: Less room on the disk than they need.
    """
    folder, rows = settings.drafter.features, trainer.train_dataset
    if folder is None:
        return
    with trainer.args.main_process_first(desc="states of the backbone"):
        trainer.train_dataset = cache_features(trainer.model, _Collated(rows, trainer.data_collator), folder)
    trainer.data_collator = _Either(trainer.data_collator)
    trainer.args.remove_unused_columns = False  # TRL's list of columns knows no states


class _Collated(Sequence):
    """Rows as the trainer's collator makes them, one by one: with their labels, and positions where they are packed."""

    def __init__(self, rows: Dataset, collator: Any) -> None:
        self.rows, self.collator = rows, collator

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        batch = self.collator([self.rows[number]])
        return {name: values[0] for name, values in batch.items() if isinstance(values, torch.Tensor)}


class _Either:
    """Batches of rows with kept states, and of rows without, as evaluation has them."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Any]) -> Any:
        return (FeatureDataset.collate if STATES in rows[0] else self.collator)(rows)
