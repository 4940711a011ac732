"""Updates whose loss is a sum over tasks: drawn ahead of the forward, divided by the counts of the whole update."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForSeq2Seq, Trainer
from transformers.trainer_utils import EvalLoopOutput

from ...modeling.heads.losses import IGNORE
from ..beginning import check_checkpoint, check_data, check_ids
from ..running_means import RunningMeansMixin
from ..sharding import WholeModelMixin, check_shards
from .completions import Sequences
from .refusals import check_arguments

TASK = "ptp_task"
"""Where a batch carries what was drawn for it."""
_BATCHES_TO_SEARCH = 1000  # for something to learn, where the first update has nothing
Inputs = dict[str, Any]


class UpdateTrainer(WholeModelMixin, RunningMeansMixin, Trainer):
    """What trainers of rows behind tokens share.

    Gradients are exact under accumulation and on several ranks: sums are divided by the counts of the whole update.
    `eval_loss` is the same every time, whatever the size of batches, and no generator notices an evaluation. What a
    step draws follows from the seed, the step and the rank alone: a resumed run learns what an uninterrupted one does.

    A subclass sets `_owner` (the model, without what distribution wraps around it) before this class begins, and says
    what a batch's task is (`_task`; it has `release()`), what its sums are divided by (`_counts`, the first above 0
    where there is something to learn), and how it becomes a loss (`_learn`).
    """

    _owner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_data(kwargs)
        super().__init__(*args, **kwargs)
        check_data(vars(self))
        check_arguments(self)
        check_shards(self)
        self.model_accepts_loss_kwargs = True  # sums are divided by the counts of a whole update

    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Any:
        """What is to be learned in this batch."""
        raise NotImplementedError

    def _counts(self, task: Any) -> torch.Tensor:
        """What the sums of a task are divided by, if it is all of an update, [n] float64."""
        raise NotImplementedError

    def _learn(
        self, model: nn.Module, task: Any, totals: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of a task, as far as it adds to an update, and outputs; notes what the log carries.

        Args:
            model: The model, perhaps wrapped.
            task: Of a batch.
            totals: [n], what sums are divided by.
            counts: [n], of this task alone.
        """
        raise NotImplementedError

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], torch.Tensor | None]:
        """The micro-batches of an update with their tasks, and what all their sums are divided by, on all ranks.

        Raises:
            ValueError: Before the first step, where nothing in the training data can be learned, or ids are none.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        if self.state.global_step == self._initial_global_step:
            check_ids(batches, self._owner.config.vocab_size)
        with self._drawing(f"{self.args.seed} {self.state.global_step} {self.args.process_index}"):
            tasks = [self._task(self.model_wrapped, self._prepare_inputs(batch), True) for batch in batches]
        if len(tasks) > 1:
            for task in tasks:
                task.release()
        totals = sum(self._counts(task) for task in tasks)
        if self.args.world_size > 1:
            totals = self.accelerator.gather(totals[None]).sum(0)
        if self.state.global_step == 0 and not totals[0]:
            self._refuse_barren_data()
        return [{**batch, TASK: task} for batch, task in zip(batches, tasks)], totals

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As in `Trainer`; a checkpoint of another model is refused."""
        check_checkpoint(resume_from_checkpoint, self._owner)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _refuse_barren_data(self) -> None:
        others = islice(self.get_train_dataloader(), _BATCHES_TO_SEARCH)
        if not any(Sequences.of(batch).startable.any() for batch in others):
            raise ValueError(
                "train_dataset has nothing to complete: its labels are -100 everywhere, or no row is longer than one "
                "token"
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss of an update, as far as this batch adds to it.

        Args:
            model: The model, perhaps wrapped.
            inputs: A batch.
            return_outputs: Return what `_learn` gives beside the loss, too.
            num_items_in_batch: [n], from `get_batch_samples`; None: this batch is all.

        Returns:
            The loss, and the outputs where asked for.
        """
        task = inputs.get(TASK) or self._task(model, inputs, model.training)
        counts = self._counts(task)
        totals = counts if num_items_in_batch is None else num_items_in_batch
        loss, outputs = self._learn(model, task, totals, counts)
        if num_items_in_batch is not None:
            loss = loss * self.args.world_size  # ranks average their gradients
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in `Trainer`; the same every time, and the global generator does not notice."""
        with self._drawing(self.args.seed):
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def _drawing(self, seed: int | str) -> Iterator[None]:
        """Random numbers that follow from a seed alone; the global generator is the same behind it as before.

        `Trainer` restores the generators of a checkpoint only after `get_batch_samples`: what is drawn there must not
        depend on them, nor move them, or a resumed run would learn other tasks than one that was never stopped.
        """
        device = self.args.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            torch.manual_seed(seed if isinstance(seed, int) else random.Random(seed).getrandbits(63))
            yield

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """The loss of an evaluation batch; its uniforms lie evenly in their intervals."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(self._without_repeated_rows(inputs)))
        return loss.detach(), None, None


def next_tokens(sequences: Sequences) -> torch.Tensor:
    """Targets of the backbone's own loss, [B, T - 1]."""
    return sequences.tokens[:, 1:].masked_fill(~sequences.startable[:, 1:], IGNORE)


def pad_rows(rows: list[Inputs]) -> dict[str, torch.Tensor]:
    """Pads on the right to the longest row; labels with -100, everything else with 0.

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
    """Refuses rows whose columns do not stand below their ids, one value each: padding would hide it.

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
    """Makes a batch of rows whose columns are as long as their ids; padded as the tokenizer says, if there is one.

    Attributes:
        tokenizer: It, or None.
    """

    tokenizer: Any = None

    def __call__(self, rows: list[Inputs]) -> Any:
        """A batch."""
        if self.tokenizer is None:
            return pad_rows(rows)
        check_columns(rows)
        return DataCollatorForSeq2Seq(self.tokenizer)(rows)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Without dropout: the distribution of the teacher is that of decoding."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
