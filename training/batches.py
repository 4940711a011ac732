"""Batches of a budget of tokens, and rows joined without padding.

Joined rows are one sequence [1, N] without an attention mask, whose position ids start at 0 with every row: what
`DataCollatorWithFlattening` makes, and what transformers, and the losses here, read as separate documents. Batches of a
budget are chosen once; an epoch takes them in another order, so that it always has the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    default_data_collator,
)

from ..modeling.common.recording import collate
from ..modeling.heads.losses import IGNORE
from .columns import PER_TOKEN

TOKENS_PER_BATCH = 4096
"""The default budget."""
Inputs = dict[str, Any]
Collate = Callable[[list[Inputs]], Mapping[str, Any]]


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows; if lengths differ, padded on the side of the tokenizer, or on the right without one."""

    tokenizer: PreTrainedTokenizerBase | None = None

    def __call__(self, rows: list[Inputs]) -> Mapping[str, Tensor]:
        """Return a batch; labels are padded with -100."""
        for row in rows:  # padding would hide what is missing or too short
            _refuse_missing(("input_ids", *rows[0]), row)
            for name in ("labels", "attention_mask", "position_ids"):
                if name in row and len(row[name]) != len(row["input_ids"]):
                    raise ValueError(
                        f"a row of the data has {len(row['input_ids'])} input_ids and {len(row[name])} {name}: every "
                        "id needs one" + (f", {IGNORE} where nothing is scored" if name == "labels" else "")
                    )
        columns = {name: [_tensor(row[name]) for row in rows] for name in rows[0]}
        if len({*map(len, columns["input_ids"])}) > 1:
            columns.setdefault("attention_mask", [torch.ones_like(ids) for ids in columns["input_ids"]])
        fills = {"labels": IGNORE, "shift_labels": IGNORE, "input_ids": getattr(self.tokenizer, "pad_token_id", 0) or 0}
        pad, side = nn.utils.rnn.pad_sequence, getattr(self.tokenizer, "padding_side", "right")
        return {name: pad(column, True, fills.get(name, 0), side) for name, column in columns.items()}


def _tensor(values: Any) -> Tensor:
    """Return the entries of a row's column; of an empty row as ids."""
    found = torch.as_tensor(values)
    return found if len(found) else found.long()


def _refuse_missing(names: Sequence[str], row: Mapping[str, Any]) -> None:
    if missing := [name for name in names if name not in row]:
        hint = ": text is tokenized beforehand" if missing[0] == "input_ids" else ", and another row has"
        raise ValueError(f"a row of the data has no {missing[0]}{hint}")


_ROW_WISE = (Collator, DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding)


def is_row_wise(collator: object) -> bool:
    """Return whether a collator is known to treat every row by itself, and then to pad; it may say so itself."""
    said = getattr(collator, "is_row_wise", None)
    if said is not None:
        return bool(said)
    is_known = isinstance(collator, _ROW_WISE) or collator in (default_data_collator, collate)
    return is_known and not getattr(collator, "mlm", False)


def taken_columns(collator: Any) -> frozenset[str] | None:
    """Return the columns of rows that a collator hands on; None where they are not known; it may say so itself."""
    if (said := getattr(collator, "takes", None)) is not None:
        return said
    if hasattr(collator, "collator"):
        return taken_columns(collator.collator)
    if hasattr(collator, "padding_free") or isinstance(collator, DataCollatorWithFlattening):  # of TRL, of transformers
        return frozenset({"input_ids", "labels", "seq_lengths"})
    if isinstance(collator, DataCollatorForLanguageModeling):  # whose labels are all ids
        return frozenset({"input_ids", "attention_mask"})
    return PER_TOKEN | {"shift_labels"} if is_row_wise(collator) else None


@dataclass(frozen=True)
class JoinedCollator:
    """Joins rows of different lengths without padding, and stacks rows of one length.

    Every row goes through a collator of rows, which prepares it; its padding is dropped. Rows with columns that are not
    one value or vector per token, pixels for example, or with positions of their own that do not begin at 0, are padded
    by that collator.

    Attributes:
        collator: See above; it is `is_row_wise`.
    """

    collator: Collate

    def __call__(self, rows: list[Inputs]) -> Mapping[str, Any]:
        """Return a batch."""
        parts = [self.collator([row]) for row in rows] if len(rows) > 1 else []
        if not parts or not all(map(_is_plain, parts)) or len({frozenset(part) for part in parts}) > 1:
            return self.collator(rows)
        columns = [_without_padding(part) for part in parts]
        lengths = {len(each["input_ids"]) for each in columns}
        starts = [int(each["position_ids"][0]) for each in columns if len(each["position_ids"])]
        if any(starts) or (len(lengths) == 1 and not any(map(_has_padding, parts))):
            return self.collator(rows)
        joined = {name: torch.cat([each[name] for each in columns])[None] for name in columns[0]}
        if "labels" in joined:  # no token before it is of its document
            joined["labels"] = joined["labels"].masked_fill(joined["position_ids"] == 0, IGNORE)
        return joined


def _is_plain(part: Mapping[str, Any]) -> bool:
    """Return whether all columns of a row's batch [1, L, ..] have an entry per token."""
    shape = part["input_ids"].shape
    return all(isinstance(each, Tensor) and each.shape[:2] == shape for each in part.values())


def _has_padding(part: Mapping[str, Tensor]) -> bool:
    return "attention_mask" in part and not bool(part["attention_mask"].all())


def _without_padding(part: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the columns of a row's batch without padding, [L, ..] each, and with positions."""
    columns = {name: each[0] for name, each in part.items() if name != "attention_mask"}
    if _has_padding(part):
        real = part["attention_mask"][0].bool()
        columns = {name: each[real] for name, each in columns.items()}
    columns.setdefault("position_ids", torch.arange(len(columns["input_ids"])))
    return columns


@dataclass(frozen=True)
class BatchCollator:
    """Collates what `BatchedRows` yields: a list of one batch of rows."""

    collator: Collate

    def __call__(self, batches: list[list[Inputs]]) -> Mapping[str, Any]:
        """Return the batch."""
        [rows] = batches
        return self.collator(rows)


class BatchedRows(Dataset):
    """A data set whose entries are batches of another one's rows, by their numbers."""

    def __init__(self, rows: Any, batches: Sequence[Sequence[int]]) -> None:
        self.rows, self.batches = rows, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> list[Inputs]:
        chosen, several = self.batches[number], getattr(self.rows, "__getitems__", None)
        return [self.rows[row] for row in chosen] if several is None else several(list(chosen))


def row_lengths(rows: Any, column: str = "length") -> list[int]:
    """Return the tokens of every row, without padding.

    Args:
        rows: A data set with a length; what it knows of lengths (`lengths`, a column) is read, else every row.
        column: Name of a column of lengths, where there is one.
    """
    known = getattr(rows, "lengths", None)
    if known is not None:
        return list(known)
    names = getattr(rows, "column_names", None) or ()
    if column in names:
        return [int(length) for length in rows[column]]
    if "attention_mask" in names:
        return [int(torch.as_tensor(mask).sum()) for mask in rows["attention_mask"]]
    if "input_ids" in names:
        return [len(ids) for ids in rows["input_ids"]]
    return [_length(rows[number]) for number in range(len(rows))]


def _length(row: Mapping[str, Any]) -> int:
    _refuse_missing(["input_ids"], row)
    mask = row.get("attention_mask")
    return len(row["input_ids"]) if mask is None else int(torch.as_tensor(mask).sum())


def check_budget(costs: Sequence[int], budget: int, besides: int = 0) -> None:
    """Refuse a budget that a row does not fit; `besides` of what each row costs are no tokens of it.

    Raises:
        ValueError: The longest row costs more.
    """
    longest = max(range(len(costs)), key=costs.__getitem__)
    if costs[longest] > budget:
        slots = f" and {besides} slots" if besides else ""
        raise ValueError(
            f"tokens_per_batch={budget} is smaller than row {longest} of train_dataset, which has "
            f"{costs[longest] - besides} tokens{slots}: set it to {costs[longest]} at least, or cut rows"
        )


def batches_by_tokens(
    lengths: Sequence[int],
    budget: int,
    order: Sequence[int],
    is_padded: bool = False,
    multiple: int = 1,
    drop_last: bool = False,
) -> list[list[int]]:
    """Return batches of row numbers, each of which costs at most `budget` tokens.

    Args:
        lengths: Tokens of every row, at most the budget.
        budget: Tokens of a batch.
        order: The order in which rows fill batches.
        is_padded: A batch costs its longest row times its rows; else the sum of its rows.
        multiple: Their number is a multiple of it, so that processes have equally many: batches of the most rows are
            halved; where there are too few rows, it is not.
        drop_last: Leave out the last batch, which is not full, and what is left of a multiple.
    """
    batches: list[list[int]] = []
    longest = total = 0
    for row in order:
        longest, total = max(longest, lengths[row]), total + lengths[row]
        cost = longest * (len(batches[-1]) + 1) if is_padded and batches else total
        if not batches or cost > budget:
            batches.append([])
            longest = total = lengths[row]
        batches[-1].append(row)
    if drop_last and len(batches) > 1:
        batches.pop()
        return batches[: max(multiple, len(batches) // multiple * multiple)]
    while len(batches) % multiple:
        number = max(range(len(batches)), key=lambda each: len(batches[each]))
        rows, half = batches[number], len(batches[number]) // 2
        if not half:
            break
        batches[number : number + 1] = [rows[:half], rows[half:]]
    return batches


def row_order(lengths: Sequence[int], by_length: bool, shuffles: bool, seed: int) -> list[int]:
    """Return the order in which rows fill batches: at random, the longest first (at random among equals), or theirs."""
    rows = list(range(len(lengths)))
    if shuffles:
        rows = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(rows, key=lambda row: -lengths[row]) if by_length else rows
