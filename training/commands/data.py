"""Data of a run, from files or the Hub: chats, prompts with completions, plain text or token ids. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ...modeling.heads.losses import IGNORE
from ..regeneration import RegeneratedText, holds_text
from ..utils import needs_extra
from .settings import Settings

with needs_extra("train", "reading data"):
    import pyarrow.compute
    from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from pyarrow import ArrowException
    from trl import get_dataset
    from trl.data_utils import maybe_convert_to_chatml

if TYPE_CHECKING:
    Data = Dataset | IterableDataset

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
_COLUMNS = (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"))
"""The columns that training reads, in the order in which TRL looks for them; then `dataset_text_field`."""
_LONGEST = 300  # letters of the message of a reader of files
_ROWS_TO_READ = 1000  # of a stream of chats, whose turns are checked before training


def load_data(
    settings: Settings, with_evaluation: bool, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> dict[str, Data]:
    """Return training data, and data to evaluate on.

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
            What a stream holds after its first rows is refused where it is read.
        FileNotFoundError: A path that does not exist.
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
        _check_rows(rows, name, settings, tokenizer, vocab_size)
        if isinstance(rows, IterableDataset):
            check = _StreamCheck(name, settings.training.dataset_text_field, vocab_size)
            chosen[name] = rows.map(check, features=rows.features)
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
    """Name the data that a reader of files failed at, and the reason."""
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


def _check_rows(rows: Data, name: str, settings: Settings, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Refuse rows that nothing can be learned from: of a stream its first ones, of other data all."""
    with _readable(_source(settings)):  # a stream is read from here on
        first = next(iter(rows), None)
    if first is None:
        raise ValueError(f"the {name} data are empty: {_source(settings)} has no rows")
    text = settings.training.dataset_text_field
    columns = _columns_of(first, text)
    if not columns:
        raise ValueError(
            f"the {name} data have the columns {', '.join(first)}; needed are {text!r} (dataset_text_field), "
            "'messages' or 'conversations' (chats), 'prompt' and 'completion', or 'input_ids'"
        )
    _check_values(first, columns, name, "row 0")
    if isinstance(rows, Dataset):
        _check_columns(rows, columns, name, vocab_size)
    has_chats = columns[0] in ("messages", "conversations")
    if has_chats and tokenizer.chat_template is None and settings.training.chat_template_path is None:
        raise ValueError(f"the {name} data are chats, but the tokenizer has no chat template: set chat_template_path")
    if has_chats or (columns[0] == "prompt" and all(isinstance(first[column], list) for column in columns)):
        chosen = rows.select_columns(columns)
        for number, row in enumerate(chosen if isinstance(rows, Dataset) else islice(chosen, _ROWS_TO_READ)):
            _check_chat(dict(row), f"row {number} of the {name} data")


def _columns_of(row: dict[str, Any], text: str) -> list[str]:
    """Return the columns of a row that training reads."""
    for names in (*_COLUMNS, (text,)):
        if row.keys() >= {*names}:
            return [*names, *(["labels"] if names == ("input_ids",) and "labels" in row else [])]
    return []


def _check_values(row: dict[str, Any], columns: list[str], name: str, which: str) -> None:
    for column in columns:
        holds, wanted = _KINDS.get(column, (_is_text, "text"))
        if not holds(row[column]):
            raise ValueError(f"{column!r} of the {name} data must hold {wanted}, and {which} has {row[column]!r:.40}")


def _check_columns(rows: Dataset, columns: list[str], name: str, vocab_size: int) -> None:
    """Refuse columns of a file that hold something other than their name says; a column has one type, but for JSON."""
    for column in columns:
        table = rows.data.column(column)
        if missing := table.null_count:
            raise ValueError(f"{column!r} of the {name} data is null in {missing} row(s); leave them out")
        if "extension<" in str(table.type):  # of `datasets`, for mixed values
            for number, row in enumerate(rows.select_columns([column])):
                _check_values(dict(row), [column], name, f"row {number}")
        if "input_ids" in columns:  # those that the tokenizer makes are in the vocabulary
            for chunk in table.chunks:  # memory-mapped, a chunk at a time
                _check_ids(chunk.flatten().to_numpy(zero_copy_only=False), column, name, vocab_size)
    if "labels" in columns:
        _check_lengths(rows, name)


def _check_lengths(rows: Dataset, name: str) -> None:
    begun = 0
    for ids, labels in zip(*(rows.data.column(column).chunks for column in ("input_ids", "labels"))):
        lengths = [pyarrow.compute.call_function("list_value_length", [chunk]) for chunk in (ids, labels)]
        for number, (num_ids, num_labels) in enumerate(zip(*(each.to_pylist() for each in lengths)), begun):
            _check_pair(num_ids, num_labels, f"row {number} of the {name} data")
        begun += len(ids)


def _check_pair(num_ids: int, num_labels: int, row: str) -> None:
    if num_ids != num_labels:
        raise ValueError(
            f"{row} has {num_ids} input_ids and {num_labels} labels: every id needs one, {IGNORE} where nothing is "
            "scored"
        )


def _check_ids(ids: np.ndarray, column: str, name: str, vocab_size: int) -> None:
    wrong = ids[((ids < 0) | (ids >= vocab_size)) & ((ids != IGNORE) | (column == "input_ids"))]
    if len(wrong):
        raise ValueError(f"{column} of the {name} data hold {wrong[0]}; the model has ids from 0 to {vocab_size - 1}")


class _StreamCheck:
    """Checks the rows of a stream as they come, for its first one says nothing about the others.

    Args:
        name: Name of the data in messages.
        text: The column of plain text.
        vocab_size: Ids that the model has.
    """

    def __init__(self, name: str, text: str, vocab_size: int) -> None:
        self.name, self.text, self.vocab_size = name, text, vocab_size

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        columns = _columns_of(row, self.text)
        _check_values(row, columns, self.name, "a row")
        for column in columns if "input_ids" in columns else ():
            _check_ids(np.asarray(row[column]), column, self.name, self.vocab_size)
        if "labels" in columns:
            _check_pair(len(row["input_ids"]), len(row["labels"]), f"a row of the {self.name} data")
        return row


def _check_chat(row: dict[str, Any], which: str) -> None:
    """Refuse turns without text, and a chat without an assistant's turn; a completion is one whatever its role."""
    is_chat = "completion" not in row
    turns = maybe_convert_to_chatml(row).get("messages") or [] if is_chat else [*row["prompt"], *row["completion"]]
    for index, turn in enumerate(turns):
        content = turn.get("content")
        if content is None and not turn.get("tool_calls"):
            raise ValueError(f"{which}: turn {index} has no 'content'")
        if not isinstance(content, str | None):
            raise ValueError(f"{which}: the 'content' of turn {index} must be text, not {content!r:.40}")
    if is_chat and not any(turn.get("role") == "assistant" for turn in turns):
        roles = ", ".join(str(turn.get("role")) for turn in turns) or "none"
        raise ValueError(f"{which} has no assistant turn (roles: {roles}); leave it out")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, dict) for turn in value)


def _is_ids(value: Any) -> bool:
    values = value.tolist() if isinstance(value, torch.Tensor | np.ndarray) else value  # rows saved as tensors
    return isinstance(values, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in values)


def _is_text_or_chat(value: Any) -> bool:
    return _is_text(value) or _is_chat(value)


_TURNS, _IDS = "a list of turns, such as {'role': 'user', 'content': 'hi'}", "a list of whole numbers"
_KINDS = {
    "input_ids": (_is_ids, _IDS),
    "labels": (_is_ids, _IDS),
    "messages": (_is_chat, _TURNS),
    "conversations": (_is_chat, _TURNS),
    "prompt": (_is_text_or_chat, "text or a list of turns"),
    "completion": (_is_text_or_chat, "text or a list of turns"),
}
"""By column: whether a value is of its kind, and what that is."""


def _source(settings: Settings) -> str:
    return settings.data.dataset_name or ", ".join(entry.path for entry in settings.mixture.datasets)
