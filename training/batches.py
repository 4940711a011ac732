"""Batches of training rows: by a budget of tokens, and joined without padding where the model reads them apart.

Joined rows are one sequence [1, N] without an attention mask, whose position ids start at 0 with every row: what
`DataCollatorWithFlattening` makes, and what transformers, and the losses here, read as separate documents. Whether a
model does is tried, not looked up in a list of models. Batches of a budget are chosen once; an epoch takes them in
another order, so that it always has the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.utils import logging

from ..generation.backbone.wrapped_models import untyped
from ..modeling.common.recording import STATES, SUMMARIES, collate
from ..modeling.heads.losses import IGNORE
from .columns import PER_TOKEN, ReadingCollator, ReadRows, RowReader

logger = logging.get_logger(__name__)
TOKENS_PER_BATCH = 4096
"""The default budget."""
_LENGTH = 36
"""Tokens of a document in the trial: more than short convolutions reach, and two are attended to one by one."""
Inputs = dict[str, Any]
Collate = Callable[[list[Inputs]], Mapping[str, Any]]


@dataclass(frozen=True)
class Collator:
    """Makes a batch of rows; if lengths differ, padded on the side of the tokenizer, or on the right without one."""

    tokenizer: PreTrainedTokenizerBase | None = None

    def __call__(self, rows: list[Inputs]) -> Mapping[str, Tensor]:
        """Return a batch; labels are padded with -100."""
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
        parts = [_without_padding(self.collator([row])) for row in rows] if len(rows) > 1 else []
        columns = [part for part in parts if part is not None]
        lengths = {len(part["input_ids"]) for part in columns}
        is_even = len(lengths) < 2 and lengths == {len(row["input_ids"]) for row in rows}
        if len(columns) < max(2, len(rows)) or is_even or len({frozenset(part) for part in columns}) > 1:
            return self.collator(rows)
        joined = {name: torch.cat([each[name] for each in columns])[None] for name in columns[0]}
        if "labels" in joined:  # no token before it is of its document
            joined["labels"] = joined["labels"].masked_fill(joined["position_ids"] == 0, IGNORE)
        return joined


def _without_padding(part: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return the columns of a row's batch [1, L, ..] without padding, [L, ..] each, and with positions.

    None where a column has not an entry per token, or positions begin elsewhere than at 0.
    """
    shape = part["input_ids"].shape
    if not all(isinstance(each, Tensor) and each.shape[:2] == shape for each in part.values()):
        return None
    columns = {name: each[0] for name, each in part.items()}
    if (mask := columns.pop("attention_mask", None)) is not None:
        columns = {name: each[mask.bool()] for name, each in columns.items()}
    positions = columns.setdefault("position_ids", torch.arange(len(columns["input_ids"])))
    return None if positions[:1].any() else columns


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
    if (known := getattr(rows, "lengths", None)) is not None:
        return list(known)
    names = getattr(rows, "column_names", None) or ()
    if column in names:
        return [int(length) for length in rows[column]]
    if "input_ids" in names:
        rows = rows.select_columns([name for name in ("input_ids", "attention_mask") if name in names])
    every = map(rows.__getitem__, range(len(rows)))
    return [int(sum(row["attention_mask"])) if "attention_mask" in row else len(row["input_ids"]) for row in every]


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


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Switch dropout off within the context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def obstacle_to_joining(model: Any, row: Mapping[str, Any], device: torch.device) -> str:
    """Return why rows of a model may not be joined: it mixes documents, or its forward fails; empty where they may.

    Where it mixes them, the loss of a document changes with the document before it. It changes a little where experts
    sum other rows in another order; as much then, where the two are rows of a batch.

    Args:
        model: What is trained, without wrappers of distribution.
        row: A row of its data: where it has states of a backbone, the backbone is not run.
        device: The device of the inputs.
    """
    cards = [] if device.type == "cpu" else [device]
    with at_rest(model), torch.random.fork_rng(cards, device_type=device.type):
        try:
            joined, apart = (_change(model, row, device, is_joined) for is_joined in (True, False))
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:  # it takes no position ids, for example
            return f"its forward of two documents fails with {type(error).__name__}: {error}"
    return "it mixes documents" if joined > 4 * apart else ""


def _change(model: Any, row: Mapping[str, Any], device: torch.device, is_joined: bool) -> float:
    """Return how much the losses of a document change with the other one, joined or as rows of a batch."""
    losses = []
    for other in (7, 5):
        torch.manual_seed(0)  # a backbone apart may have dropout
        output = model(**_two_documents(model, row, other, device, is_joined), use_cache=False)
        losses.append(torch.cat([output.loss.flatten(), output.head_losses.flatten()]).double())
    return float((losses[0] - losses[1]).abs().nan_to_num(0.0).max())


def _two_documents(
    model: Any, row: Mapping[str, Any], other: int, device: torch.device, is_joined: bool
) -> dict[str, Tensor]:
    """Return a batch of two documents; `other` chooses the first one, and the second alone is scored."""
    places = torch.arange(_LENGTH, device=device)
    ids = torch.stack([other * places + 1, 3 * places + 2]) % model.config.get_text_config().vocab_size  # [2, N]
    labels = ids.clone()
    labels[0] = IGNORE
    batch = {"input_ids": ids, "labels": labels}
    if STATES in row:
        states = torch.randn([2, _LENGTH, *row[STATES].shape[1:]], generator=torch.Generator().manual_seed(0))
        states[0] *= other
        batch[STATES] = states.to(device, row[STATES].dtype)
        if SUMMARIES in row:  # any, which need no unembedding
            batch[SUMMARIES] = torch.zeros(2, _LENGTH, *row[SUMMARIES].shape[1:], device=device)
    if is_joined:
        batch = {name: each.flatten(0, 1)[None] for name, each in batch.items()}
        batch["position_ids"] = places.repeat(2)[None]
    return batch


class BatchingMixin(Trainer):
    """A `Trainer` whose training batches have a budget of tokens, and no padding where rows may be joined.

    Attributes:
        tokens_per_batch: The budget that was asked for; see `MTPTrainer`.
        joins_rows: Whether the loss of this trainer takes joined rows.
        tokens_besides: Positions that the trainer adds to every row.
        ignore_columns: Columns of rows that are left out unread.
    """

    tokens_per_batch: int | None
    joins_rows = False
    tokens_besides: int = 0
    ignore_columns: Sequence[str] = ()
    _unjoined_for: str | None = None
    _counted: tuple[Any, list[int]] | None = None
    _owner: Any
    _reader: str

    def check_batches(self) -> None:
        """Refuse a budget that cannot be met, and joined rows where every sequence gets slots."""
        if self.tokens_besides and self._is_joined_already:
            raise ValueError(f"data_collator={type(self.data_collator).__name__} joins rows, and each has own slots")
        budget = self.tokens_per_batch
        if budget and (reason := self._obstacle()):
            raise ValueError(f"tokens_per_batch={budget}: {reason}; leave one of them out")
        if budget and self.train_dataset is not None:
            self._check_budget(self._row_costs(self.train_dataset), budget)

    def _check_budget(self, costs: Sequence[int], budget: int) -> None:
        longest = max(range(len(costs)), key=costs.__getitem__)
        if costs[longest] > budget:
            raise ValueError(f"tokens_per_batch={budget} is less than row {longest} of train_dataset, {costs[longest]}")

    def _obstacle(self) -> str | None:
        """Return why batches have no budget: this trainer does not choose their rows, or has a number of rows."""
        args, data, config = self.args, self.train_dataset, self.accelerator.dataloader_config
        size, strategy = args.per_device_train_batch_size, "batch_rebalance"
        obstacles = {
            "streaming": data is not None and (isinstance(data, IterableDataset) or not hasattr(data, "__len__")),
            f"train_sampling_strategy={strategy!r}": args.train_sampling_strategy == strategy,
            "auto_find_batch_size=True": args.auto_find_batch_size,
            "split_batches=True": config.split_batches,
            "dispatch_batches=True": bool(config.dispatch_batches),
            f"{args.n_gpu} devices of one process (DataParallel)": args.n_gpu > 1,
            f"per_device_train_batch_size={size}": size != TrainingArguments.per_device_train_batch_size,
        }
        return next((f"{name} decides on the rows of a batch" for name, holds in obstacles.items() if holds), None)

    def _row_costs(self, data: Any) -> list[int]:
        """Return what every row costs; rows are read once, which may take minutes."""
        if self._counted is None or self._counted[0] is not data:
            self._counted = data, row_lengths(data, self.args.length_column_name)
        return [length + self.tokens_besides for length in self._counted[1]]

    def get_train_dataloader(self) -> DataLoader:
        """As in `Trainer`, with batches of a budget of tokens, and rows joined where they may be."""
        data, collator = self.train_dataset, untyped(self.data_collator)
        joins = self._joins()
        if joins:
            self.data_collator = JoinedCollator(collator)
        try:
            if data is None or self.tokens_per_batch == 0 or self._obstacle():
                return super().get_train_dataloader()
            return self._budget_dataloader(data, is_padded=not (joins or self._is_joined_already))
        finally:
            self.data_collator = collator

    def _budget_dataloader(self, data: Any, is_padded: bool) -> DataLoader:
        args = self.args
        costs = self._row_costs(data)
        budget = self.tokens_per_batch or max(TOKENS_PER_BATCH, max(costs))
        self._check_budget(costs, budget)
        seed = args.seed if args.data_seed is None else args.data_seed
        in_order = args.train_sampling_strategy == "sequential"
        by_length = not in_order and (is_padded or args.train_sampling_strategy == "group_by_length")
        order = list(range(len(costs)))
        if not in_order:
            order = torch.randperm(len(costs), generator=torch.Generator().manual_seed(seed)).tolist()
        if by_length:
            order.sort(key=lambda row: -costs[row])
        readers = max(1, args.world_size // self.get_tp_size())
        batches = batches_by_tokens(costs, budget, order, is_padded, readers, args.dataloader_drop_last)
        if hasattr(data, "column_names"):  # of `datasets`: Trainer would not know it within
            data = self._remove_unused_columns(data, description="training")
        else:
            self.data_collator = self._get_collator_with_removed_columns(self.data_collator, description="training")
        self.data_collator = BatchCollator(untyped(self.data_collator))
        rows = BatchedRows(data, batches)
        return self._get_dataloader(
            dataset=rows,
            description="Training",
            batch_size=1,
            sampler_fn=lambda _: SequentialSampler(rows) if in_order else RandomSampler(rows),
            is_training=True,
        )

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """As in `Trainer`, row by row, so that masks become labels before they go (`RowReader`)."""
        reader = self._row_reader(description)
        if reader is None:
            return super()._remove_unused_columns(dataset, description)
        reader.check(dataset.column_names)
        return ReadRows(dataset.select_columns([name for name in dataset.column_names if name in reader.read]), reader)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """See `_remove_unused_columns`."""
        reader = self._row_reader(description)
        if reader is None:
            return super()._get_collator_with_removed_columns(data_collator, description)
        return ReadingCollator(data_collator, reader)

    def _row_reader(self, description: str | None) -> RowReader | None:
        """Return what reads rows of the collator; None where it alone knows what it reads, and gets all columns."""
        taken, removes = taken_columns(self.data_collator), self.args.remove_unused_columns
        if taken is None and not removes:
            return None
        self._set_signature_columns_if_needed()
        own = frozenset(self._signature_columns or ())
        columns = own if taken is None else taken
        columns = columns & own if removes else columns
        return RowReader(frozenset(columns), self.ignore_columns, f"a row of the {(description or '').lower()} data")

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As in `Trainer`; what a collator of others still calls a mask of targets would be read by nobody."""
        for name in inputs:
            if name.endswith(("mask", "masks")) and not name.endswith("attention_mask"):
                raise ValueError(f"data_collator left {name!r} in a batch: let it make labels of it")
        return super()._prepare_inputs(inputs)

    def num_examples(self, dataloader: DataLoader) -> int:
        """As in `Trainer`; rows, where the data are batches of them."""
        data = getattr(dataloader, "dataset", None)
        return sum(map(len, data.batches)) if isinstance(data, BatchedRows) else super().num_examples(dataloader)

    def collates_rows(self) -> bool:
        """Return whether the collator treats every row by itself, so that it may be given one at a time."""
        return is_row_wise(self.data_collator)

    @property
    def _is_joined_already(self) -> bool:
        """Whether the collator joins rows: TRL's with `padding_free` or packing, or transformers' own."""
        return getattr(self, "padding_free", False) or isinstance(self.data_collator, DataCollatorWithFlattening)

    def _joins(self) -> bool:
        """Return whether batches of training rows are joined.

        Raises:
            ValueError: Rows are joined already, and this model mixes them.
        """
        if not self.joins_rows or self.train_dataset is None or self.args.n_gpu > 1:
            return False
        if not self._is_joined_already and not self.collates_rows():
            return False
        is_cut = self.accelerator.dataloader_config.dispatch_batches or not hasattr(self.train_dataset, "__len__")
        if is_cut and self.args.world_size > 1 and not self._is_joined_already:  # accelerate stacks batches to cut them
            return False
        if self._unjoined_for is None:  # tried once: processes that shard a model hold parts of it later
            found = [self._tried()]
            self._unjoined_for = str(broadcast_object_list(found)[0] if self.args.world_size > 1 else found[0])
        if self._unjoined_for:
            reason = f"rows of {self._reader} cannot be joined without padding: {self._unjoined_for}"
            if self._is_joined_already:
                raise ValueError(f"leave out packing, padding_free and DataCollatorWithFlattening: {reason}")
            logger.warning_once(f"rows of similar lengths are padded: {reason}")
        return not (self._unjoined_for or self._is_joined_already)

    def _tried(self) -> str:
        model, data = self._owner, untyped(self.train_dataset)
        row = data[0] if hasattr(data, "__len__") else {}  # a stream might lose it
        if any(parameter.is_meta for parameter in model.parameters()):
            return ""  # the first process decides
        with self.accelerator.autocast():  # as the forward that it prepares has it
            return obstacle_to_joining(model, row, self.args.device)
