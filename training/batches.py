"""Batches of training data, and what is validated of them before the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForSeq2Seq
from transformers.utils import logging

from ..modeling.heads.losses import IGNORE

logger = logging.get_logger(__name__)
BATCHES_TO_SEARCH = 1000
"""Batches that are searched for a target, where the first update has none."""
Inputs = dict[str, Any]


def check_data(given: Mapping[str, Any]) -> None:
    """Refuse data without rows.

    Args:
        given: Arguments of a trainer, by name.

    Raises:
        ValueError: `train_dataset` or `eval_dataset`, or one of several, is empty.
    """
    for name in ("train_dataset", "eval_dataset"):
        data = given.get(name)
        for part in data.values() if isinstance(data, Mapping) else [data]:
            if isinstance(part, Sized) and len(part) == 0:
                raise ValueError(f"{name} is empty; give at least one row with a target, or None")


def check_depths(
    counts: torch.Tensor, count: Callable[[Any], torch.Tensor], batches: Callable[[], Iterable[Any]]
) -> None:
    """Search for targets at every depth, in the first update and, where it lacks some, in further batches.

    Warns of depths that no row reaches.

    Args:
        counts: [n], targets per depth of the first update.
        count: Targets per depth of a batch.
        batches: Returns an iterator over the training data.

    Raises:
        ValueError: No targets at all.
    """
    found = counts.bool().cpu()
    others = islice(batches(), BATCHES_TO_SEARCH) if not found.all() else ()
    for batch in others:
        found = found | count(batch).bool().cpu()
        if found.all():
            return
    if not found.any():
        raise ValueError(
            "train_dataset has no targets: its labels are -100 everywhere, or no row is longer than one token"
        )
    if not found.all():
        missing = ", ".join(str(depth + 1) for depth in (~found).nonzero()[:, 0].tolist())
        logger.warning(
            f"no row of train_dataset reaches depth {missing}: the heads of these depths learn nothing; give longer "
            "rows, or a smaller window"
        )


def check_ids(batches: Sequence[dict[str, Any]], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary, which on an accelerator would only show as a failed assertion of a kernel.

    Args:
        batches: Micro-batches of an update.
        vocab_size: V.

    Raises:
        ValueError: An id outside 0..V - 1, or a label that is neither such an id nor -100.
    """
    for batch in batches:
        check_lengths(batch)
        for name in ("input_ids", "labels", "shift_labels"):
            ids = batch.get(name)
            if not isinstance(ids, torch.Tensor) or not ids.numel():
                continue
            wrong = (ids >= vocab_size) | (ids < 0)
            if name != "input_ids":
                wrong &= ids != IGNORE
            if wrong.any():
                also = "" if name == "input_ids" else f", or {IGNORE} where nothing is scored"
                raise ValueError(
                    f"{name} hold {int(ids[wrong][0])}, but the vocabulary has {vocab_size} tokens: ids go from 0 to "
                    f"{vocab_size - 1}{also}; was the text prepared with another tokenizer?"
                )


def check_lengths(batch: dict[str, Any]) -> None:
    """Refuse labels of another shape than their ids.

    Args:
        batch: A micro-batch.

    Raises:
        ValueError: Labels of another shape.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor) and ids.shape != labels.shape:
        raise ValueError(
            f"labels have shape {list(labels.shape)}, and input_ids {list(ids.shape)}: give every id one label, "
            f"{IGNORE} where nothing is scored"
        )


def pad_rows(rows: list[Inputs]) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest row; labels with -100, everything else with 0.

    Raises:
        ValueError: See `check_columns`.
    """
    check_columns(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {}
    for name in rows[0]:
        columns = [torch.as_tensor(row[name]) for row in rows]
        fill = IGNORE if name == "labels" else 0
        batch[name] = torch.stack([nn.functional.pad(c, (0, longest - len(c)), value=fill) for c in columns])
    if "attention_mask" not in batch:
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch


def check_columns(rows: list[Inputs]) -> None:
    """Refuse rows whose columns are not as long as their ids: padding would hide it.

    Args:
        rows: Of a batch.

    Raises:
        ValueError: A row without `input_ids`, without a column of the first row, or with a column of another length.
    """
    for row in rows:
        if missing := [name for name in ("input_ids", *rows[0]) if name not in row]:
            hint = ": text is tokenized beforehand" if missing[0] == "input_ids" else ", and another row has"
            raise ValueError(f"a row of the data has no {missing[0]}{hint}")
        for name in ("labels", "attention_mask", "position_ids"):
            if name in row and len(row[name]) != len(row["input_ids"]):
                raise ValueError(
                    f"a row of the data has {len(row['input_ids'])} input_ids and {len(row[name])} {name}: every id "
                    "needs one" + (f", {IGNORE} where nothing is scored" if name == "labels" else "")
                )


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows; padded on the side of the tokenizer, if there is one.

    Attributes:
        tokenizer: The tokenizer, or None.
    """

    tokenizer: Any = None

    def __call__(self, rows: list[Inputs]) -> Any:
        """Return a batch."""
        if self.tokenizer is None:
            return pad_rows(rows)
        check_columns(rows)
        return DataCollatorForSeq2Seq(self.tokenizer)(rows)
