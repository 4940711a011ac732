"""Data of a run: chats, prompts with completions, plain text or token ids, from files or the Hub. Knows no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ...modeling.heads.losses import IGNORE
from ..extras import needs_extra
from ..regeneration import RegeneratedText, holds_text
from .columns import check_lengths, check_types, watched
from .settings import Settings

with needs_extra("train", "reading data"):
    from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from pyarrow import ArrowException
    from trl import get_dataset
    from trl.data_utils import maybe_convert_to_chatml

if TYPE_CHECKING:
    Data = Dataset | IterableDataset

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
_COLUMNS = "'messages' or 'conversations' (chats), 'prompt' and 'completion', or 'input_ids'"
_LONGEST = 300  # letters of what a reader of files says
_ROWS_TO_READ = 1000  # of a stream of chats, whose turns are looked at before training


def load_data(
    settings: Settings, with_evaluation: bool, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> dict[str, Data]:
    """Training data, and data to evaluate on.

    `dataset_name` is a file (JSON, JSON lines, Parquet, CSV, Arrow, or text with a row per line), a directory of such
    files, of `Dataset.save_to_disk` or of `regenerate` (whose completions alone are scored), or a name on the Hub;
    `datasets` is a mixture of them, as in TRL.

    Args:
        settings: Of the run.
        with_evaluation: Whether there must be data to evaluate on: the split `dataset_test_split`, or a share
            `test_split_size` of all rows.
        tokenizer: Its chat template is needed for chats.
        vocab_size: Ids that the model has.

    Returns:
        By `"train"` and `"eval"`.

    Raises:
        ValueError: No data, no such split, an empty one, columns that are missing, or chats without assistant turns.
            What a stream holds behind its first rows is refused where it is read.
        FileNotFoundError: A path that is none.
    """
    data = _loaded(settings)
    train_name, test_name = settings.data.dataset_train_split, settings.data.dataset_test_split
    if not isinstance(data, dict):
        data = {train_name: data}
    size = settings.mixture.test_split_size
    if with_evaluation and test_name not in data and size is not None:
        data = dict(data) | _divided(_split(data, train_name, "dataset_train_split"), size, settings.training.seed)
        test_name = "test"
    chosen = {"train": _split(data, train_name, "dataset_train_split")}
    if with_evaluation:
        hint = "; or set test_split_size, or eval_strategy='no'"
        chosen["eval"] = _split(data, test_name, "dataset_test_split", hint)
    for name, rows in chosen.items():
        check_rows(rows, name, settings, tokenizer, vocab_size)
        if isinstance(rows, IterableDataset):
            chosen[name] = watched(
                rows, name, settings.training.dataset_text_field, partial(_check_row, name=name, vocab_size=vocab_size)
            )
    return chosen


def _loaded(settings: Settings) -> Any:
    if settings.mixture.datasets:
        settings.mixture.streaming |= settings.data.dataset_streaming
        size, settings.mixture.test_split_size = settings.mixture.test_split_size, None
        try:
            with _readable(_source(settings)):
                return get_dataset(settings.mixture)
        finally:
            settings.mixture.test_split_size = size
    name = settings.data.dataset_name
    if name is None:
        raise ValueError("dataset_name is missing: a file, a directory or a name on the Hub; or `datasets`, a mixture")
    options: dict[str, Any] = {"streaming": settings.data.dataset_streaming or settings.mixture.streaming}
    path = Path(name)
    if path.is_file():
        if not path.stat().st_size:
            raise ValueError(f"dataset_name={name} is empty")
        if path.suffix not in _BUILDERS:
            raise ValueError(f"dataset_name={name}: {path.suffix!r} is none of {', '.join(_BUILDERS)}")
        with _readable(name):
            return load_dataset(_BUILDERS[path.suffix], data_files={"train": str(path)}, **options)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return load_from_disk(name)
    if holds_text(path):
        return _regenerated(path)
    if not path.is_dir() and (name.startswith((".", "/", "~")) or path.suffix in _BUILDERS):
        raise FileNotFoundError(f"dataset_name={name}: no such file or directory")
    try:
        with _readable(name):
            return load_dataset(name, settings.data.dataset_config, **options)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"dataset_name={name}: no such file or directory, and the Hub gave none: {error}"
        ) from error


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Says which data a reader of files failed at, and why."""
    try:
        yield
    except (OSError, NotImplementedError):
        raise
    except (DatasetsError, ArrowException, ValueError, TypeError, KeyError) as error:
        cause = error.__cause__ or error.__context__ or error
        said = " ".join(str(cause).split())[:_LONGEST] or type(cause).__name__
        raise ValueError(f"dataset_name={name}: could not be read: {said}") from error


def _regenerated(folder: Path) -> Dataset:
    rows = [{name: ids.tolist() for name, ids in row.items()} for row in RegeneratedText(folder)]
    return Dataset.from_list(rows)


def _split(data: dict[str, Any], name: str, setting: str, hint: str = "") -> Any:
    if name not in data:
        raise ValueError(f"{setting}={name!r}: the data have {', '.join(map(repr, data))}{hint}")
    return data[name]


def _divided(rows: Data, size: float, seed: int) -> dict[str, Dataset]:
    if not isinstance(rows, Dataset):
        raise ValueError("test_split_size divides no stream; name a split to evaluate on with dataset_test_split")
    parts: DatasetDict = rows.train_test_split(test_size=size, seed=seed)
    return {"train": parts["train"], "test": parts["test"]}


def check_rows(rows: Data, name: str, settings: Settings, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuses rows that nothing could be learned from.

    Args:
        rows: The rows.
        name: What they are called in messages.
        settings: Of the run.
        tokenizer: Its chat template is needed for chats.
        vocab_size: Ids that the model has.

    Raises:
        ValueError: No rows, columns that are missing or hold something else, ids that are none, or chats without
            assistant turns or a template.
    """
    with _readable(_source(settings)):  # a stream is read from here on
        first = next(iter(rows), None)
    if first is None:
        raise ValueError(f"the {name} data are empty: {_source(settings)} has no rows")
    text = settings.training.dataset_text_field
    is_chat = bool({"messages", "conversations"} & first.keys())
    has_completion = {"prompt", "completion"} <= first.keys()
    if not (is_chat or has_completion or {text, "input_ids"} & first.keys()):
        raise ValueError(
            f"the {name} data have the columns {', '.join(first)}; needed are {text!r} (dataset_text_field), {_COLUMNS}"
        )
    check_types(rows, first, name, text)
    if "input_ids" in first and isinstance(rows, Dataset):
        _check_ids(rows, name, vocab_size)
        if "labels" in first:
            check_lengths(rows, name)
    if is_chat:
        if tokenizer.chat_template is None and settings.training.chat_template_path is None:
            raise ValueError(
                f"the {name} data are chats, but the tokenizer has no chat template: set chat_template_path"
            )
        chats = rows.select_columns([*({"messages", "conversations"} & first.keys())])
        _check_chats(chats if isinstance(rows, Dataset) else islice(chats, _ROWS_TO_READ), name)
    elif has_completion and all(isinstance(first[column], list) for column in ("prompt", "completion")):
        for number, row in enumerate(rows if isinstance(rows, Dataset) else islice(rows, _ROWS_TO_READ)):
            _check_turns([*row["prompt"], *row["completion"]], f"row {number} of the {name} data")


def _check_ids(rows: Dataset, name: str, vocab_size: int) -> None:
    """Token ids that were made beforehand; those that the tokenizer makes are in the vocabulary."""
    for column in {"input_ids", "labels"} & set(rows.column_names):
        for chunk in rows.data.column(column).chunks:  # memory-mapped, a chunk at a time
            _check_column(chunk.flatten().to_numpy(zero_copy_only=False), column, name, vocab_size)


def _check_row(row: dict[str, Any], name: str, vocab_size: int) -> None:
    """A row of a stream."""
    for column in {"input_ids", "labels"} & row.keys() if "input_ids" in row else ():
        _check_column(np.asarray(row[column]), column, name, vocab_size)
    if {"input_ids", "labels"} <= row.keys() and len(row["input_ids"]) != len(row["labels"]):
        raise ValueError(
            f"a row of the {name} data has {len(row['input_ids'])} input_ids and {len(row['labels'])} labels: every id "
            f"needs one, {IGNORE} where nothing is scored"
        )


def _check_column(ids: np.ndarray, column: str, name: str, vocab_size: int) -> None:
    wrong = ids[((ids < 0) | (ids >= vocab_size)) & ((ids != IGNORE) | (column == "input_ids"))]
    if len(wrong):
        raise ValueError(f"{column} of the {name} data hold {wrong[0]}; the model has ids from 0 to {vocab_size - 1}")


def _check_chats(rows: Iterable[dict[str, Any]], name: str) -> None:
    for number, row in enumerate(rows):
        turns = maybe_convert_to_chatml(dict(row)).get("messages") or []
        _check_turns(turns, f"row {number} of the {name} data")
        if not any(turn.get("role") == "assistant" for turn in turns):
            roles = ", ".join(str(turn.get("role")) for turn in turns) or "none"
            raise ValueError(f"row {number} of the {name} data has no assistant turn (roles: {roles}); leave it out")


def _check_turns(turns: list[dict[str, Any]], row: str) -> None:
    for place, turn in enumerate(turns):
        content = turn.get("content")
        if content is None and not turn.get("tool_calls"):
            raise ValueError(f"{row}: turn {place} has no 'content'")
        if not isinstance(content, str | None):
            raise ValueError(f"{row}: the 'content' of turn {place} must be text, not {repr(content)[:40]}")


def _source(settings: Settings) -> str:
    return settings.data.dataset_name or ", ".join(entry.path for entry in settings.mixture.datasets)
