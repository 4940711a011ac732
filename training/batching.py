"""How trainers make batches of training rows: by a budget of tokens, and joined where the model reads them apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments
from transformers.utils import logging

from ..configuration.fields import refuse
from ..configuration.transformers_names import TRAINER, check_names
from ..generation.tensors.wrapped_models import untyped
from .batches import (
    TOKENS_PER_BATCH,
    BatchCollator,
    BatchedRows,
    JoinedCollator,
    batches_by_tokens,
    check_budget,
    is_row_wise,
    row_lengths,
    row_order,
    taken_columns,
)
from .columns import ReadingCollator, ReadRows, RowReader
from .documents import obstacle_to_joining

logger = logging.get_logger(__name__)
check_names(TRAINER)


class BatchingMixin(Trainer):
    """A `Trainer` whose training batches have a budget of tokens, and no padding where rows may be joined.

    Attributes:
        tokens_per_batch: The budget that was asked for; see `MTPTrainer`.
        joins_rows: Whether the loss of this trainer takes joined rows.
        tokens_besides: Positions that the trainer adds to every row.
        ignore_columns: Columns of rows that are left out unread.
        _owner: The model without wrappers of distribution.
        _reader: The name of what reads the rows.
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
        """Refuse a budget that cannot be met, and joined rows where every sequence gets slots.

        Raises:
            ValueError: A negative budget, one beside a number of rows, one where rows are not chosen by this trainer,
                or one that the longest row does not fit; a collator that joins rows, with `tokens_besides`.
        """
        if self.tokens_besides and self._is_joined_already:
            raise ValueError(
                f"data_collator={type(self.data_collator).__name__} joins rows: slots are drawn for every sequence, "
                "so that joined rows would share those of one, and slots read a dense mask, which grows with the "
                "square of a sequence; leave it out: rows of similar lengths are padded"
            )
        budget = self.tokens_per_batch
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
            raise ValueError(f"tokens_per_batch={budget!r} must be a whole number of tokens, 0: no budget, or None")
        if not budget:
            return
        reasons = self._obstacle(), self._rows_given()
        refuse((reason, f"tokens_per_batch={budget}: {reason}") for reason in reasons)
        if self.train_dataset is not None:
            check_budget(self._row_costs(self.train_dataset), budget, self.tokens_besides)

    def _rows_given(self) -> str | None:
        """Return why there is no budget by default, where the arguments have a number of rows."""
        size, default = self.args.per_device_train_batch_size, TrainingArguments.per_device_train_batch_size
        if size == default:
            return None
        return f"per_device_train_batch_size={size} is a number of rows; leave one of them out"

    def _obstacle(self) -> str | None:
        """Return why this trainer cannot choose the rows of a batch, if it cannot."""
        args, data, config = self.args, self.train_dataset, self.accelerator.dataloader_config
        strategy = "batch_rebalance"
        obstacles = {
            "a stream does not know the lengths of its rows; set per_device_train_batch_size": data is not None
            and (isinstance(data, IterableDataset) or not hasattr(data, "__len__")),
            f"train_sampling_strategy={strategy!r} divides rows itself": args.train_sampling_strategy == strategy,
            "auto_find_batch_size=True changes a number of rows": args.auto_find_batch_size,
            "split_batches=True divides the rows of a batch among processes": config.split_batches,
            "dispatch_batches=True divides the rows of a batch among processes": bool(config.dispatch_batches),
            f"{args.n_gpu} devices of one process (DataParallel) divide the rows of a batch": args.n_gpu > 1,
        }
        return next((reason for reason, holds in obstacles.items() if holds), None)

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
            if self.tokens_per_batch is None and self._rows_given():
                return super().get_train_dataloader()
            return self._budget_dataloader(data, is_padded=not (joins or self._is_joined_already))
        finally:
            self.data_collator = collator

    def _budget_dataloader(self, data: Any, is_padded: bool) -> DataLoader:
        args = self.args
        costs = self._row_costs(data)
        budget = self.tokens_per_batch or max(TOKENS_PER_BATCH, max(costs))
        check_budget(costs, budget, self.tokens_besides)
        seed = args.seed if args.data_seed is None else args.data_seed
        in_order = args.train_sampling_strategy == "sequential"
        by_length = not in_order and (is_padded or args.train_sampling_strategy == "group_by_length")
        order = row_order(costs, by_length, not in_order, seed)
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
                raise ValueError(f"data_collator left {name!r} in a batch, which is not read: let it make labels of it")
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
        reason = f"rows of {self._reader} cannot be joined without padding: {self._unjoined_for}"
        if self._unjoined_for and self._is_joined_already:
            raise ValueError(
                "leave out packing, padding_free and DataCollatorWithFlattening, and rows of similar lengths are "
                f"padded: {reason}"
            )
        if self._unjoined_for:
            logger.warning_once(f"rows of similar lengths are padded: {reason}")
        return not (self._unjoined_for or self._is_joined_already)

    def _tried(self) -> str:
        model, data = self._owner, untyped(self.train_dataset)
        row = data[0] if hasattr(data, "__len__") else {}  # a stream might lose it
        if any(parameter.is_meta for parameter in model.parameters()):
            return ""  # the first process decides
        with self.accelerator.autocast():  # as the forward that it prepares has it
            return obstacle_to_joining(model, row, self.args.device)
