"""Has a run learn from text that its backbone wrote, where its settings say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..extras import needs_extra
from ..regeneration import regenerate
from .data import load_data
from .models import Trainee
from .settings import Settings

with needs_extra("train", "tokenahead train"):
    from datasets import Dataset
    from trl.data_utils import maybe_convert_to_chatml

_PROMPT_TOKENS = 32


def with_own_text(settings: Settings, trainee: Trainee) -> Settings:
    """Settings whose data are what the backbone writes behind the beginnings of the data that they name.

    A chat begins with all that stands before the last answer, a `prompt` is one, and of other rows the first
    `prompt_tokens` ids are taken.

    Args:
        settings: Of the run; `regenerate` says where to write and how, as `regenerate` of this library takes it.
        trainee: What is trained.

    Raises:
        ValueError: No directory, a stream, or a directory of other text.
    """
    if settings.drafter.regenerate is None:
        return settings
    options = dict(settings.drafter.regenerate)
    folder, count = options.pop("folder", None), options.pop("prompt_tokens", _PROMPT_TOKENS)
    if not (folder and isinstance(folder, str) and isinstance(count, int) and count >= 1):
        raise ValueError(f"regenerate={settings.drafter.regenerate} needs folder=, and prompt_tokens of at least 1")
    vocab_size = trainee.backbone.config.get_text_config().vocab_size
    rows = load_data(settings, False, trainee.tokenizer, vocab_size)["train"]
    if not isinstance(rows, Dataset):
        raise ValueError(f"regenerate={settings.drafter.regenerate} takes all rows: set dataset_streaming: false")
    column = settings.training.dataset_text_field
    with settings.training.main_process_first(desc="text of the backbone"):
        regenerate(
            trainee.backbone, [_beginning(row, trainee.tokenizer, column, count) for row in rows], folder, **options
        )
    data = replace(settings.data, dataset_name=str(folder), dataset_config=None, dataset_train_split="train")
    return replace(settings, data=data, mixture=replace(settings.mixture, datasets=[]))


def _beginning(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, column: str, count: int) -> list[int]:
    row = maybe_convert_to_chatml(dict(row))
    if turns := row.get("messages") or (row.get("prompt") if isinstance(row.get("prompt"), list) else None):
        answers = [place for place, turn in enumerate(turns) if turn.get("role") == "assistant"]
        before = turns[: answers[-1]] if answers and "messages" in row else turns
        return tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
    if "prompt" in row:
        return tokenizer(row["prompt"])["input_ids"]
    return (row["input_ids"] if "input_ids" in row else tokenizer(row[column])["input_ids"])[:count]
