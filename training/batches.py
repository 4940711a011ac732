"""Batches of training rows: by a budget of tokens, and joined without padding where the model reads them apart.

Joined rows are one sequence [1, N] without an attention mask, whose position ids start at 0 with every row: what
`DataCollatorWithFlattening` makes. Whether a model reads them as separate documents is tried. Batches of a budget are
chosen once; an epoch takes them in another order, so that it always has the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
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

from ..modeling.common.online import STATES, SUMMARIES, collate
from ..modeling.heads.losses import IGNORE
from .columns import PER_TOKEN, RowReader

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
        columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in rows[0]}
        if len({*map(len, columns["input_ids"])}) > 1:
            columns.setdefault("attention_mask", [torch.ones_like(ids) for ids in columns["input_ids"]])
        fills = {"labels": IGNORE, "shift_labels": IGNORE, "input_ids": getattr(self.tokenizer, "pad_token_id", 0) or 0}
        pad, side = nn.utils.rnn.pad_sequence, getattr(self.tokenizer, "padding_side", "right")
        for column in columns.values():  # an empty list is one of ids
            column[:] = [each if len(each) else each.long() for each in column]
        return {name: pad(column, True, fills.get(name, 0), side) for name, column in columns.items()}


_ROW_WISE = (Collator, DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, DataCollatorWithPadding)


def is_row_wise(collator: object) -> bool:
    """Return whether a collator is known to treat every row by itself, and then to pad; it may say so itself."""
    is_known = isinstance(collator, _ROW_WISE) or collator in (default_data_collator, collate) or _is_of_trl(collator)
    return bool(getattr(collator, "is_row_wise", is_known and not getattr(collator, "mlm", False)))


def _is_of_trl(collator: object) -> bool:
    return hasattr(collator, "padding_free")  # without importing an extra


def taken_columns(collator: Any) -> frozenset[str] | None:
    """Return the columns of rows that a collator hands on; None where they are not known; it may say so itself."""
    if (said := getattr(collator, "takes", None)) is not None:
        return said
    if _is_of_trl(collator) or isinstance(collator, DataCollatorWithFlattening):
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
    """

    collator: Collate

    def __call__(self, rows: list[Inputs]) -> Mapping[str, Any]:
        """Return a batch."""
        parts = [_without_padding(self.collator([row])) for row in rows]
        lengths = {len(each["input_ids"]) for each in (*rows, *parts) if each}
        if not all(parts) or len(lengths) == 1 or len({frozenset(part) for part in parts}) > 1:
            return self.collator(rows)
        joined = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
        if "labels" in joined:  # no token before it is of its document
            joined["labels"] = joined["labels"].masked_fill(joined["position_ids"] == 0, IGNORE)
        return joined


def _without_padding(part: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the columns of a row's batch [1, L, ..] without padding, [L, ..] each, and with positions, if it can be.

    It can, where columns have an entry per token, and positions begin at 0.
    """
    shape = part["input_ids"].shape
    if not all(isinstance(each, Tensor) and each.shape[:2] == shape for each in part.values()):
        return {}
    columns = {name: each[0] for name, each in part.items()}
    if (mask := columns.pop("attention_mask", None)) is not None:
        columns = {name: each[mask.bool()] for name, each in columns.items()}
    positions = columns.setdefault("position_ids", torch.arange(len(columns["input_ids"])))
    return {} if positions[:1].any() else columns


@dataclass(frozen=True)
class ReadingCollator:
    """Collates rows as a reader gives them, or those of `data` that a batch numbers; a class, for workers pickle it."""

    collator: Collate
    read: RowReader | None
    data: Any = None

    def __call__(self, rows: list[Any]) -> Mapping[str, Any]:
        """Return the batch."""
        if self.data is not None:
            [numbers] = rows
            several = getattr(self.data, "__getitems__", lambda numbers: [self.data[row] for row in numbers])
            rows = several(numbers)
        return self.collator(rows if self.read is None else self.read.all(rows))


class Batches(list[list[int]]):
    """Batches of row numbers, in the place of a data set."""


def row_lengths(rows: Any, column: str = "length") -> list[int]:
    """Return the tokens of every row, without padding: what the data know of them (`lengths`, a column), or counted."""
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
) -> Batches:
    """Return batches of row numbers, which fill them in `order`, each of at most `budget` tokens, or of one row.

    A padded batch costs its longest row times its rows. Their number is a `multiple`, so that processes have equally
    many: batches of the most rows are halved, as far as there are enough rows.
    """
    batches = Batches()
    longest = total = 0
    for row in order:
        longest, total = max(longest, lengths[row]), total + lengths[row]
        cost = longest * (len(batches[-1]) + 1) if is_padded and batches else total
        if not batches or cost > budget:
            batches.append([])
            longest = total = lengths[row]
        batches[-1].append(row)
    while len(batches) % multiple and (most := max(batches, key=len))[1:]:
        number, half = batches.index(most), len(most) // 2
        batches[number : number + 1] = [most[:half], most[half:]]
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
    sum other rows in another order; as much then, where the two are rows of a batch. A `row` of its data with states of
    a backbone says that this is not run.
    """
    if any(parameter.is_meta for parameter in model.parameters()):  # the first process decides
        return ""
    places = torch.arange(_LENGTH, device=device)

    def losses(other: int, is_joined: bool) -> Tensor:
        """Return the losses of the second of two documents; `other` chooses the first."""
        ids = torch.stack([other * places + 1, 3 * places + 2]) % model.config.get_text_config().vocab_size  # [2, N]
        batch = {"input_ids": ids, "labels": ids.index_fill(0, places[:1], IGNORE)}
        if STATES in row:
            states = torch.randn([2, _LENGTH, *row[STATES].shape[1:]], generator=torch.Generator().manual_seed(0))
            states[0] *= other
            batch[STATES] = states.to(device, row[STATES].dtype)
            if SUMMARIES in row:  # any, which need no unembedding
                batch[SUMMARIES] = torch.zeros(2, _LENGTH, *row[SUMMARIES].shape[1:], device=device)
        if is_joined:
            batch = {name: each.flatten(0, 1)[None] for name, each in batch.items()}
            batch["position_ids"] = places.repeat(2)[None]
        torch.manual_seed(0)  # a backbone apart may have dropout
        output = model(**batch, use_cache=False)
        return torch.cat([output.loss.flatten(), output.head_losses.flatten()]).double().nan_to_num(0.0)

    cards = [] if device.type == "cpu" else [device]
    with at_rest(model), torch.random.fork_rng(cards, device_type=device.type):
        try:
            joined, apart = (float((losses(7, how) - losses(5, how)).abs().max()) for how in (True, False))
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:  # it takes no position ids, for example
            return f"its forward of two documents fails with {type(error).__name__}: {error}"
    return "it mixes documents" if joined > 4 * apart else ""


class BatchingMixin(Trainer):
    """A `Trainer` whose training batches have a budget of tokens, and no padding where rows may be joined."""

    tokens_per_batch: int | None
    joins_rows = False  # whether the loss takes joined rows
    tokens_besides: int = 0  # positions that the trainer adds to every row
    ignore_columns: Sequence[str] = ()
    _unjoined_for: str | None = None
    _counted: tuple[object, list[int]] = None, []
    _owner: Any
    _reader: str

    def check_batches(self) -> None:
        """Refuse a budget that cannot be met, and joined rows where every sequence gets slots."""
        if self.tokens_besides and self._is_joined_already:
            raise ValueError(f"data_collator={type(self.data_collator).__name__} joins rows, and each has own slots")
        if self.tokens_per_batch and self.train_dataset is not None:
            if not self._fills_batches:
                raise ValueError(
                    f"tokens_per_batch={self.tokens_per_batch} fills batches from all rows: leave it out, or leave out "
                    "streaming, per_device_train_batch_size, batch_rebalance, auto_find_batch_size, split_batches, "
                    "dispatch_batches, dataloader_drop_last and DataParallel"
                )
            self._row_costs()

    @property
    def _fills_batches(self) -> bool:
        """Whether this trainer has all rows, and nothing else decides on those of a batch."""
        args, data, config = self.args, self.train_dataset, self.accelerator.dataloader_config
        is_counted = args.auto_find_batch_size or args.dataloader_drop_last or args.n_gpu > 1
        return (
            hasattr(data, "__len__")
            and not isinstance(data, IterableDataset)
            and args.train_sampling_strategy != "batch_rebalance"
            and args.per_device_train_batch_size == TrainingArguments.per_device_train_batch_size
            and not (is_counted or config.split_batches or config.dispatch_batches)
        )

    def _row_costs(self) -> list[int]:
        """Return what every row costs, at most the budget; rows are read once, which may take minutes."""
        if self._counted[0] is not self.train_dataset:
            self._counted = self.train_dataset, row_lengths(self.train_dataset, self.args.length_column_name)
        costs, budget = [length + self.tokens_besides for length in self._counted[1]], self.tokens_per_batch
        longest = max(range(len(costs)), key=costs.__getitem__)
        if budget and costs[longest] > budget:
            raise ValueError(f"tokens_per_batch={budget} is less than row {longest} of train_dataset, {costs[longest]}")
        return costs

    def _get_dataloader(
        self, dataset: Any, description: str, batch_size: int, *args: Any, is_training: bool = False, **kwargs: Any
    ) -> DataLoader:
        """As in `Trainer`, of rows as `RowReader` reads them; in training of a budget, and joined where they may be."""
        own: Any = self.data_collator
        reader, removes, collator, data = self._row_reader(description), self.args.remove_unused_columns, own, None
        joins = is_training and self._joins()
        if joins:
            collator = JoinedCollator(own)
        names = getattr(dataset, "column_names", None)
        if reader is not None and names:  # of `datasets`
            reader.check(names)
            dataset = dataset.select_columns([name for name in names if name in reader.read])
        if is_training and self.tokens_per_batch != 0 and self._fills_batches:
            data, dataset, batch_size = dataset, self._batches(not (joins or self._is_joined_already)), 1
            in_order = self.args.train_sampling_strategy == "sequential"
            kwargs["sampler_fn"] = SequentialSampler if in_order else RandomSampler
        self.data_collator, self.args.remove_unused_columns = ReadingCollator(collator, reader, data), False
        try:
            return super()._get_dataloader(dataset, description, batch_size, *args, is_training=is_training, **kwargs)
        finally:
            self.data_collator, self.args.remove_unused_columns = own, removes

    def _batches(self, is_padded: bool) -> Batches:
        args, costs = self.args, self._row_costs()
        order = list(range(len(costs)))
        if args.train_sampling_strategy != "sequential":
            seed = args.seed if args.data_seed is None else args.data_seed
            order = torch.randperm(len(costs), generator=torch.Generator().manual_seed(seed)).tolist()
            if is_padded or args.train_sampling_strategy == "group_by_length":
                order.sort(key=lambda row: -costs[row])
        readers = max(1, args.world_size // self.get_tp_size())
        budget = self.tokens_per_batch or max(TOKENS_PER_BATCH, max(costs))
        return batches_by_tokens(costs, budget, order, is_padded, readers)

    def _row_reader(self, description: str) -> RowReader | None:
        """Return what reads rows of the collator; None where it alone knows what it reads, and gets all columns."""
        taken, removes = taken_columns(self.data_collator), self.args.remove_unused_columns
        if taken is None and not removes:
            return None
        self._set_signature_columns_if_needed()
        own = frozenset(self._signature_columns or ())
        columns = own if taken is None else taken & own if removes else taken
        return RowReader(columns, self.ignore_columns, f"a row of the {description.lower()} data")

    def _prepare_inputs(self, inputs: Any) -> Any:
        """As in `Trainer`; what a collator of others still calls a mask of targets would be read by nobody."""
        for name in inputs:
            if name.endswith(("mask", "masks")) and not name.endswith("attention_mask"):
                raise ValueError(f"data_collator left {name!r} in a batch: let it make labels of it")
        return super()._prepare_inputs(inputs)

    def num_examples(self, dataloader: DataLoader) -> int:
        """As in `Trainer`; rows, where the data are batches of them."""
        data = getattr(dataloader, "dataset", None)
        return sum(map(len, data)) if isinstance(data, Batches) else super().num_examples(dataloader)

    @property
    def _is_joined_already(self) -> bool:
        """Whether the collator joins rows: TRL's with `padding_free` or packing, or transformers' own."""
        return getattr(self, "padding_free", False) or isinstance(self.data_collator, DataCollatorWithFlattening)

    def _joins(self) -> bool:
        """Return whether rows are joined here; a model that would mix what a collator has joined is refused."""
        args, data, is_joined = self.args, cast(Any, self.train_dataset), self._is_joined_already
        if not self.joins_rows or args.n_gpu > 1 or not (is_joined or is_row_wise(self.data_collator)):
            return False
        is_cut = self.accelerator.dataloader_config.dispatch_batches or not hasattr(data, "__len__")
        if is_cut and args.world_size > 1 and not is_joined:  # accelerate stacks batches to cut them
            return False
        if self._unjoined_for is None:  # tried once: processes that shard a model hold parts of it later
            row = data[0] if hasattr(data, "__len__") else {}  # a stream might lose it
            with self.accelerator.autocast():  # as the forward that it prepares has it
                found = [obstacle_to_joining(self._owner, row, args.device)]
            self._unjoined_for = str(broadcast_object_list(found)[0])
        if self._unjoined_for:
            reason = f"rows of {self._reader} cannot be joined without padding: {self._unjoined_for}"
            if is_joined:
                raise ValueError(f"leave out packing, padding_free and DataCollatorWithFlattening: {reason}")
            logger.warning_once(f"rows of similar lengths are padded: {reason}")
        return not (self._unjoined_for or is_joined)
