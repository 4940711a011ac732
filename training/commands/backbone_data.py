"""What the frozen backbone adds to the data of a run: states that are stored on disk, and text that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer

from ...generation.attach import AttachableDrafter
from ..extras import needs_extra
from ..features import STATES, FeatureDataset, cache_features
from ..regeneration import regenerate
from .data import load_data
from .models import Trainee
from .settings import Settings

with needs_extra("train", "tokenahead train"):
    from datasets import Dataset
    from trl.data_utils import maybe_convert_to_chatml

_PROMPT_TOKENS = 32


def check_features(settings: Settings, model: PreTrainedModel) -> None:
    """Refuse a run that has no states to store, before anything is written."""
    folder = settings.drafter.features
    if folder is None:
        return
    if Path(folder).is_file():
        raise ValueError(f"features={folder} is a file: choose a directory")
    if not isinstance(model, AttachableDrafter) or settings.drafter.training_strategy().train != "drafter":
        raise ValueError(
            f"features={folder} holds the states of a frozen backbone: leave it out, or train heads or an EAGLE head "
            "apart, with strategy: {train: drafter}"
        )
    streams = {"dataset_streaming": settings.data.dataset_streaming, "streaming": settings.mixture.streaming}
    for name in (name for name, value in streams.items() if value):
        raise ValueError(f"features={folder} holds all rows at once, and a stream has no end: set {name}: false")


def keep_features(trainer: Trainer, settings: Settings) -> None:
    """Write the states that the drafter learns from, or those that are missing, and replace the data with them."""
    folder, rows = settings.drafter.features, trainer.train_dataset
    if folder is None or not isinstance(rows, Dataset):
        return
    with trainer.args.main_process_first(desc="states of the backbone"):
        trainer.train_dataset = cache_features(trainer.model, _Collated(rows, trainer.data_collator), folder)
    trainer.data_collator = _Either(trainer.data_collator)
    trainer.args.remove_unused_columns = False  # TRL's list of columns knows no states


class _Collated(Sequence):
    """Rows as the trainer's collator makes them, one by one: with labels, and with positions where they are packed."""

    def __init__(self, rows: Dataset, collator: Any) -> None:
        self.rows, self.collator = rows, collator

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        batch = self.collator([self.rows[number]])
        return {name: values[0] for name, values in batch.items() if isinstance(values, torch.Tensor)}


class _Either:
    """Batches of rows with stored states, and of rows without, as evaluation has them."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Any]) -> Any:
        return (FeatureDataset.collate if STATES in rows[0] else self.collator)(rows)


def with_own_text(settings: Settings, trainee: Trainee) -> Settings:
    """Return settings whose data are what the backbone writes after the beginnings of the data that they name.

    A chat begins with all that stands before the last answer, a `prompt` is one, and of other rows the first
    `prompt_tokens` ids are taken.

    Args:
        settings: Of the run; `regenerate` says where to write and how, as `regenerate` of this library takes it.
        trainee: What is trained.

    Raises:
        ValueError: No directory, a stream, or a directory of other text.
    """
    asked = settings.drafter.regenerate
    if asked is None:
        return settings
    options = settings.drafter.options("regenerate")
    folder, count = options.pop("folder", None), options.pop("prompt_tokens", _PROMPT_TOKENS)
    if not (folder and isinstance(folder, str) and isinstance(count, int) and count >= 1):
        raise ValueError(f"regenerate={asked} needs folder=, and prompt_tokens of at least 1")
    vocab_size = trainee.backbone.config.get_text_config().vocab_size
    rows = load_data(settings, False, trainee.tokenizer, vocab_size)["train"]
    if not isinstance(rows, Dataset):
        raise ValueError(f"regenerate={asked} takes all rows: set dataset_streaming: false")
    column = settings.training.dataset_text_field
    with settings.training.main_process_first(desc="text of the backbone"):
        prompts = [_beginning(dict(row), trainee.tokenizer, column, count) for row in rows]
        regenerate(trainee.backbone, prompts, folder, **options)
    data = replace(settings.data, dataset_name=folder, dataset_config=None, dataset_train_split="train")
    return replace(settings, data=data, mixture=replace(settings.mixture, datasets=[]))


def _beginning(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, column: str, count: int) -> Any:
    row = maybe_convert_to_chatml(row)
    if turns := row.get("messages") or (row.get("prompt") if isinstance(row.get("prompt"), list) else None):
        answers = [index for index, turn in enumerate(turns) if turn.get("role") == "assistant"]
        before = turns[: answers[-1]] if answers and "messages" in row else turns
        return tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
    if "prompt" in row:
        return tokenizer(row["prompt"])["input_ids"]
    return (row["input_ids"] if "input_ids" in row else tokenizer(row[column])["input_ids"])[:count]
