"""Data of a run, from files or the Hub: chats, prompts with completions, plain text or token ids. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..batches import Inputs
from ..columns import read_rows
from ..regeneration import RegeneratedText, holds_text
from ..trainer_base import check_ids
from ..utils import needs_extra, one_line
from .settings import Settings

with needs_extra("train", "reading data"):
    from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
    from datasets.exceptions import DatasetNotFoundError, DatasetsError
    from pyarrow import ArrowException
    from trl.scripts.utils import get_dataset

if TYPE_CHECKING:
    Data = Dataset | IterableDataset

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}
_IDS = ("input_ids", "labels")
_LONGEST = 300  # characters of the message of a reader of files


def load_data(settings: Settings, with_evaluation: bool, vocab_size: int) -> dict[str, Data]:
    """Return training data, and data to evaluate on.

    `dataset_name` is a file (JSON, JSON lines, Parquet, CSV, Arrow, or text with a row per line), a directory of such
    files, of `Dataset.save_to_disk` or of `regenerate` (whose completions alone are scored), or a name on the Hub;
    `datasets` is a mixture of them, as in TRL.

    Args:
        settings: Of the run.
        with_evaluation: Whether there must be data to evaluate on: the split `dataset_test_split`, or a share
            `test_split_size` of all rows.
        vocab_size: Ids that the model has.

    Returns:
        By `"train"` and `"eval"`.

    Raises:
        ValueError: No data, no such split, an empty one, or ids that the model does not have. What a stream holds
            after its first rows is refused where it is read.
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
    return {name: _checked(rows, name, settings, vocab_size) for name, rows in chosen.items()}


def _loaded(settings: Settings) -> Any:
    if settings.mixture.datasets:
        settings.mixture.streaming |= settings.data.dataset_streaming
        size, settings.mixture.test_split_size = settings.mixture.test_split_size, None
        try:
            with readable(_source(settings)):
                return get_dataset(settings.mixture)
        finally:
            settings.mixture.test_split_size = size
    name = settings.data.dataset_name
    if name is None:
        raise ValueError("dataset_name is missing: a file, a directory or a name on the Hub; or `datasets`, a mixture")
    streaming = settings.data.dataset_streaming or settings.mixture.streaming
    path = Path(name)
    if path.is_file():
        if not path.stat().st_size:
            raise ValueError(f"dataset_name={name} is empty")
        if path.suffix not in _BUILDERS:
            raise ValueError(f"dataset_name={name}: {path.suffix!r} is none of {', '.join(_BUILDERS)}")
        with readable(name):
            return load_dataset(_BUILDERS[path.suffix], data_files={"train": str(path)}, streaming=streaming)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return load_from_disk(name)
    if holds_text(path):
        rows = [{name: ids.tolist() for name, ids in row.items()} for row in RegeneratedText(path)]
        return Dataset.from_list(rows)
    if not path.is_dir() and (name.startswith((".", "/", "~")) or path.suffix in _BUILDERS):
        raise FileNotFoundError(f"dataset_name={name}: no such file or directory")
    try:
        with readable(name):
            return load_dataset(name, settings.data.dataset_config, streaming=streaming)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(f"dataset_name={name}: no such file or directory, nor on the Hub: {error}") from error


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Raise errors of a reader of files with the name of the data and the reason."""
    try:
        yield
    except (OSError, NotImplementedError):
        raise
    except (DatasetsError, ArrowException, ValueError, TypeError, KeyError) as error:
        cause = error.__cause__ or error.__context__ or error
        if isinstance(cause, UnicodeDecodeError):
            raise ValueError(f"dataset_name={name} is no UTF-8 ({cause}): convert it") from error
        raise ValueError(f"dataset_name={name}: could not be read: {one_line(cause)[:_LONGEST]}") from error


def _split(data: dict[str, Any], name: str, setting: str, hint: str = "") -> Any:
    if name not in data:
        raise ValueError(f"{setting}={name!r}: the data have {', '.join(map(repr, data))}{hint}")
    return data[name]


def _divided(rows: Data, size: float, seed: int) -> dict[str, Dataset]:
    if not isinstance(rows, Dataset):
        raise ValueError("test_split_size divides no stream; name a split to evaluate on with dataset_test_split")
    parts: DatasetDict = rows.train_test_split(test_size=size, seed=seed)
    return {"train": parts["train"], "test": parts["test"]}


def _checked(rows: Data, name: str, settings: Settings, vocab_size: int) -> Data:
    """Return rows, read (`read_rows`); refuse data without any, and ids that the model does not have."""
    with readable(_source(settings)):  # a stream is read from here on
        first = next(iter(rows), None)
    if first is None:
        raise ValueError(f"the {name} data are empty: {_source(settings)} has no rows")
    rows = read_rows(rows, f"a row of the {name} data", settings.training)
    if "input_ids" not in first:
        return rows
    check = partial(_check_ids, name, vocab_size)
    if isinstance(rows, IterableDataset):
        return rows.map(check, features=rows.features)
    for row in rows.select_columns([each for each in _IDS if each in rows.column_names]).with_format("numpy"):
        check(dict(row))
    return rows


def _check_ids(name: str, vocab_size: int, row: Inputs) -> Inputs:
    """Return the row; refuse values that are no ids of the model, and labels of another length than the ids."""
    arrays = {column: np.asarray(row[column]) for column in _IDS if column in row}
    for column, ids in arrays.items():
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise ValueError(f"{column!r} of the {name} data must hold lists of whole numbers, not {row[column]!r:.40}")
    try:
        check_ids([{column: torch.from_numpy(ids.astype(np.int64)) for column, ids in arrays.items()}], vocab_size)
    except ValueError as error:
        raise ValueError(f"a row of the {name} data: {error}") from None
    return row


def _source(settings: Settings) -> str:
    return settings.data.dataset_name or ", ".join(entry.path for entry in settings.mixture.datasets)
