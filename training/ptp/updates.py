"""Updates whose loss is a sum over tasks: drawn before the forward, divided by the counts of the whole update."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ...modeling.heads.losses import IGNORE
from ..batches import BATCHES_TO_SEARCH, Inputs, check_data, check_ids
from ..checkpoints import check_checkpoint
from ..trainer_base import BaseTrainer, check_shards, summed_over_processes
from .completions import Sequences

TASK = "ptp_task"
"""The key of a batch under which its task is stored."""


class UpdateTrainer(BaseTrainer):
    """What the trainers of slots and registers, rows after the tokens of a batch, share.

    Gradients are exact under accumulation and on several ranks: sums are divided by the counts of the whole update.
    `eval_loss` is the same every time, whatever the size of batches, and an evaluation advances no generator. What a
    step draws depends on the seed, the step and the rank alone: a resumed run learns what an uninterrupted one does.

    A subclass sets `_owner` (the model, without what distribution wraps around it) before `__init__` of this class, and
    defines the task of a batch (`_task`; it has `release()`), what its sums are divided by (`_counts`, the first above
    0 if there is something to learn), and its loss (`_learn`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_data(kwargs)
        super().__init__(*args, **kwargs)
        check_data(vars(self))
        _check_arguments(self)
        check_shards(self)
        self.model_accepts_loss_kwargs = True  # sums are divided by the counts of a whole update

    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Any:
        """Return what is to be learned in this batch."""
        raise NotImplementedError

    def _counts(self, task: Any) -> torch.Tensor:
        """Return what the sums of a task are divided by, if it is a whole update, [n] float64."""
        raise NotImplementedError

    def _learn(
        self, model: nn.Module, task: Any, totals: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the share of a task in the loss of an update, and outputs; add to the running means.

        Args:
            model: The model, perhaps wrapped.
            task: The task of a batch.
            totals: [n], what sums are divided by.
            counts: [n], the counts of this task alone.
        """
        raise NotImplementedError

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], torch.Tensor | None]:
        """Return the micro-batches of an update with their tasks, and what all their sums are divided by, on all ranks.

        Raises:
            ValueError: Before the first step, if nothing in the training data can be learned, or ids are invalid.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        if self.state.global_step == self._initial_global_step:
            check_ids(batches, self._owner.config.vocab_size)
        with self._drawing(f"{self.args.seed} {self.state.global_step} {self.args.process_index}"):
            model: Any = self.model_wrapped
            tasks = [self._task(model, self._prepare_inputs(batch), True) for batch in batches]
        if len(tasks) > 1:
            for task in tasks:
                task.release()
        totals = torch.stack([self._counts(task) for task in tasks]).sum(0)
        if self.args.world_size > 1:
            totals = summed_over_processes(self.accelerator, totals)
        if self.state.global_step == 0 and not totals[0]:
            self._refuse_barren_data()
        return [{**batch, TASK: task} for batch, task in zip(batches, tasks)], totals

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        """As in `Trainer`; a checkpoint of another model is refused."""
        check_checkpoint(resume_from_checkpoint, self._owner)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _refuse_barren_data(self) -> None:
        others = islice(self.get_train_dataloader(), BATCHES_TO_SEARCH)
        if not any(Sequences.of(batch).startable.any() for batch in others):
            raise ValueError(
                "train_dataset has no targets: its labels are -100 everywhere, or no row is longer than one token"
            )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the share of this batch in the mean loss of an update.

        Args:
            model: The model, perhaps wrapped.
            inputs: A batch.
            return_outputs: Whether to return the outputs of `_learn`, too.
            num_items_in_batch: [n], from `get_batch_samples`; None: this batch is the whole update.

        Returns:
            The loss, and with `return_outputs` the outputs.
        """
        task = inputs.get(TASK) or self._task(model, inputs, model.training)
        counts = self._counts(task)
        totals = num_items_in_batch if isinstance(num_items_in_batch, torch.Tensor) else counts
        loss, outputs = self._learn(model, task, totals, counts)
        if num_items_in_batch is not None:
            loss = loss * self.args.world_size  # ranks average their gradients
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in `Trainer`; the same every time, and the global generator is not advanced."""
        with self._drawing(self.args.seed):
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def _drawing(self, seed: int | str) -> Iterator[None]:
        """Seed the random numbers within the context; afterwards the global generator is the same as before.

        `Trainer` restores the generators of a checkpoint only after `get_batch_samples`: what is drawn there must
        neither depend on them nor advance them, or a resumed run would learn other tasks than an uninterrupted one.
        """
        device = self.args.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            torch.manual_seed(seed if isinstance(seed, int) else random.Random(seed).getrandbits(63))
            yield

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Return the loss of an evaluation batch; its uniforms lie evenly in their intervals."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(self.without_repeated_rows(inputs)))
        assert isinstance(loss, torch.Tensor)
        return loss.detach(), None, None


def next_tokens(sequences: Sequences) -> torch.Tensor:
    """Return the targets of the backbone's own loss, [B, T - 1]."""
    return sequences.tokens[:, 1:].masked_fill(~sequences.startable[:, 1:], IGNORE)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Switch dropout off: the distribution of the teacher is that of decoding."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _check_arguments(trainer: UpdateTrainer) -> None:
    """Refuse arguments that would be ignored.

    Raises:
        ValueError: There is one; the message says what to do instead.
    """
    name, means = type(trainer).__name__, trainer._mean_names()
    if trainer.compute_metrics is not None:
        raise ValueError(
            f"compute_metrics= needs logits of texts, and a step of {name} has those of rows after them; leave it out: "
            f"the log carries {means[0]} and eval_{means[0]}, and evaluate(...) returns them"
        )
    if trainer.args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor={trainer.args.label_smoothing_factor} is for losses of labels, and {name} has a "
            "loss of its own; set it to 0"
        )


def check_noise(args: TrainingArguments) -> None:
    """Refuse noise where the backbone's own distribution is learned.

    Raises:
        ValueError: NEFTune.
    """
    if args.neftune_noise_alpha:
        raise ValueError(
            f"neftune_noise_alpha={args.neftune_noise_alpha} adds noise to the embeddings of the teacher, too, and its "
            "distribution is what the slots learn; leave it out"
        )
