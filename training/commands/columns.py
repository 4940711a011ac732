"""What columns of training data must hold: text, turns or token ids. Reads no files."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..extras import needs_extra

with needs_extra("train", "reading data"):
    import pyarrow.compute
    from datasets import Dataset, IterableDataset

if TYPE_CHECKING:
    Data = Dataset | IterableDataset


def check_types(rows: Data, first: dict[str, Any], name: str, text: str) -> None:
    """Refuses columns that hold something else than their name says, and rows that hold nothing.

    Of files, a column has one type, which its first row shows, unless it is one of `datasets` for mixed values.

    Args:
        rows: The rows.
        first: The first one.
        name: What they are called in messages.
        text: The column of plain text.

    Raises:
        ValueError: A column of another type, or a row without a value.
    """
    for column in _used(first, text):
        _check_value(first, column, name, "row 0 has")
        if not isinstance(rows, Dataset):
            continue
        if missing := rows.data.column(column).null_count:
            raise ValueError(f"{column!r} of the {name} data is null in {missing} row(s); leave them out")
        if "extension<" in str(rows.data.column(column).type):
            for number, row in enumerate(rows.select_columns([column])):
                _check_value(row, column, name, f"row {number} has")


def watched(rows: IterableDataset, name: str, text: str, check: Callable[[dict[str, Any]], None]) -> IterableDataset:
    """A stream whose rows are looked at as they come, for its first one says nothing about the others.

    Args:
        rows: The stream.
        name: What it is called in messages.
        text: The column of plain text.
        check: Refuses what else a row may not hold.

    Returns:
        The same rows; one with a column of another type is a `ValueError` where it is read.
    """

    def looked_at(row: dict[str, Any]) -> dict[str, Any]:
        for column in _used(row, text):
            _check_value(row, column, name, "a row has")
        check(row)
        return row

    return rows.map(looked_at, features=rows.features)


def _check_value(row: dict[str, Any], column: str, name: str, which: str) -> None:
    holds, wanted = _KINDS.get(column, (_is_text, "text"))
    if not holds(row[column]):
        raise ValueError(f"{column!r} of the {name} data must hold {wanted}, and {which} {repr(row[column])[:40]}")


def _used(first: dict[str, Any], text: str) -> list[str]:
    """The columns that training reads, in the order in which TRL looks for them."""
    for names in (("input_ids",), ("messages",), ("conversations",), ("prompt", "completion"), (text,)):
        if first.keys() >= {*names}:
            return [*names, *(["labels"] if names == ("input_ids",) and "labels" in first else [])]
    return []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(turn, dict) for turn in value)


def _is_ids(value: Any) -> bool:
    values = value.tolist() if hasattr(value, "tolist") else value  # rows that were saved as tensors
    return isinstance(values, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in values)


def _is_text_or_chat(value: Any) -> bool:
    return _is_text(value) or _is_chat(value)


_TURNS, _IDS = "a list of turns, such as {'role': 'user', 'content': 'hi'}", "a list of whole numbers"
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "input_ids": (_is_ids, _IDS),
    "labels": (_is_ids, _IDS),
    "messages": (_is_chat, _TURNS),
    "conversations": (_is_chat, _TURNS),
    "prompt": (_is_text_or_chat, "text or a list of turns"),
    "completion": (_is_text_or_chat, "text or a list of turns"),
}
"""By column: whether a value is of its kind, and what that is."""


def check_lengths(rows: Dataset, name: str) -> None:
    """Refuses rows that do not have as many labels as ids.

    Args:
        rows: Rows with `input_ids` and `labels`.
        name: What they are called in messages.

    Raises:
        ValueError: Such a row; it is named.
    """
    begun = 0
    chunks = zip(*(rows.data.column(column).chunks for column in ("input_ids", "labels")))
    for ids, labels in chunks:  # memory-mapped, a chunk at a time
        counts = [pyarrow.compute.list_value_length(chunk).to_numpy(zero_copy_only=False) for chunk in (ids, labels)]
        for place in (counts[0] != counts[1]).nonzero()[0][:1]:
            raise ValueError(
                f"row {begun + place} of the {name} data has {counts[0][place]} input_ids and {counts[1][place]} "
                "labels: every id needs one, -100 where nothing is scored"
            )
        begun += len(ids)
