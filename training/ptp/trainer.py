"""A Trainer for `PTPForCausalLM`: slots learn what uniforms pick. Knows how a batch becomes a loss; parts are pure."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ...configuration.ptp import SAMPLING
from ...modeling.heads.losses import IGNORE
from ..beginning import check_checkpoint, check_ids
from ..running_means import RunningMeansMixin
from ..sharding import WholeModelMixin, check_shards
from .completions import Sequences
from .options import PTPOptions
from .refusals import check_arguments
from .slots import SlotReader
from .tasks import Task, TaskMaker
from .teacher import Teacher

LEARNING_RATE = 2e-3
"""Of `PTPTrainer`, where `TrainingArguments` has its default: at 5e-5 a student hardly learns."""
_TASK = "ptp_task"
_BATCHES_TO_SEARCH = 1000  # for something to learn, where the first update has nothing
Inputs = dict[str, Any]


class PTPTrainer(WholeModelMixin, RunningMeansMixin, Trainer):
    """transformers' Trainer for parallel token prediction.

    Every step draws random starts in the sequences, finds uniforms that pick the tokens behind them under the law that
    decoding verifies (`model.config.sampling`), and teaches the slots to predict the tokens from the uniforms.

    The data are dictionaries with `input_ids` and, where wanted, `attention_mask`, `labels` (-100: never a target) and
    `position_ids` (packed documents start anew at 0). The log carries `num_correct`: how many
    slots of a completion are right before the first wrong one, on average (PTP paper, Eq. 16); and
    `num_correct_greedy`, the same of the completions that are most likely.

    Gradients are exact under accumulation and on several ranks: sums are divided by the counts of the whole update.
    `eval_loss` is the same every time, whatever the size of batches, and no generator notices an evaluation. What a
    step draws follows from the seed, the step and the rank alone: a resumed run learns what an uninterrupted one does.
    Where `TrainingArguments` has its default learning rate, it is 2e-3 here.

    Args:
        model: A `PTPForCausalLM`.
        args: `TrainingArguments`.
        options: What to learn, from what.
        teacher: Another teacher than the model's own backbone; of the same vocabulary.
        **kwargs: For `Trainer`.

    Raises:
        TypeError: A model that is no `PTPForCausalLM`.
        ValueError: Options that this model cannot follow.

    Example:
        >>> model = PTPForCausalLM.from_backbone(backbone, num_slots=8)
        >>> PTPTrainer(model, TrainingArguments("out", max_steps=1000), train_dataset=data).train()
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any = None,
        *,
        options: PTPOptions | None = None,
        teacher: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        self.options = options or PTPOptions()
        self._owner: Any = model  # the model itself, without what distribution wraps around it
        _check(model, self.options, teacher)
        if kwargs.get("data_collator") is None:
            kwargs["data_collator"] = self._own_collator(kwargs.get("processing_class"))
        super().__init__(model, _with_rate(args), **kwargs)
        check_arguments(self)
        check_shards(self)
        self.model_accepts_loss_kwargs = True  # sums are divided by the counts of a whole update
        if teacher is not None:
            teacher = teacher.to(self.args.device).requires_grad_(False).eval()
        self._external = None if teacher is None else Teacher(teacher, model.config.sampling)

    def _own_collator(self, tokenizer: Any) -> Any:
        """What makes batches where no collator is given; None leaves it to `Trainer`."""
        return _pad if tokenizer is None else DataCollatorForSeq2Seq(tokenizer)

    @property
    def _maker(self) -> TaskMaker:
        teacher = self._external or Teacher(self._owner, self._owner.config.sampling)
        return TaskMaker(self._owner.config, self.options, teacher, self._external is None)

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
                task.rows.cache = None  # one cache at a time: the context is read again
        totals = sum(self._counts(task) for task in tasks)
        if self.args.world_size > 1:
            totals = self.accelerator.gather(totals[None]).sum(0)
        if self.state.global_step == 0 and not totals[0]:
            self._refuse_barren_data()
        return [{**batch, _TASK: task} for batch, task in zip(batches, tasks)], totals

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
        """The mean loss of the slots of an update, as far as this batch adds to it, and the backbone's own.

        Args:
            model: The model, perhaps wrapped.
            inputs: A batch.
            return_outputs: Return slots, too: `tokens`, `valid` and `hits` [B, C, L].
            num_items_in_batch: [2], from `get_batch_samples`; None: this batch is all.

        Returns:
            The loss, and the outputs where asked for.
        """
        task = inputs.get(_TASK) or self._task(model, inputs, model.training)
        own = self._counts(task)
        totals = own if num_items_in_batch is None else num_items_in_batch
        targets = _next_tokens(task.sequences) if self.options.base_weight else None
        reader = SlotReader(task, self.options, self._owner.config, totals, targets)
        if self._learns_in_one_pass:
            task.rows.cache = None
            loss, sums, hits = task.rows.everything(task.inputs, reader)
        else:
            if task.rows.cache is None:
                with _at_rest(model):
                    task.rows.read()
            loss, sums, hits = task.rows.slots(task.inputs, reader)
        self._note(task, sums, own, hits, model.training)
        if num_items_in_batch is not None:
            loss = loss * self.args.world_size  # ranks average their gradients
        return (loss, {"tokens": task.tokens, "valid": task.valid, "hits": hits}) if return_outputs else loss

    @property
    def _learns_in_one_pass(self) -> bool:
        """Whether tokens and slots share a forward: where the backbone learns, or activations are not kept."""
        owner = self._owner
        return owner.trains_backbone or owner.is_activation_checkpointing or self.options.base_weight > 0

    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Task:
        """What the slots are to learn in this batch."""
        with _at_rest(model):
            return self._maker.task(model, inputs, is_training, reads=not self._learns_in_one_pass)

    def _counts(self, task: Task) -> torch.Tensor:
        return task.counts(self.options.gamma, _next_tokens(task.sequences) if self.options.base_weight else None)

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

    def _note(
        self, task: Task, sums: torch.Tensor, counts: torch.Tensor, hits: torch.Tensor, is_training: bool
    ) -> None:
        """Adds sums and counts of a batch to the running ones; inverted uniforms are right by construction."""
        correct, whole = hits.long().cumprod(-1).sum(-1), task.valid.all(-1)
        is_greedy = task.uniforms[..., 0] < 0
        distils = self.options.method == "distil"
        kinds = [whole & ~is_greedy & distils, whole & is_greedy]
        right = torch.stack([(correct * kind).sum() for kind in kinds])
        sums = torch.cat([right.double(), sums.detach().double()])
        self._means[is_training].add(sums, torch.cat([torch.stack([k.sum() for k in kinds]).double(), counts]))

    def _mean_names(self) -> list[str]:
        return ["num_correct", "num_correct_greedy"]

    def _pooled_loss(self, sums: torch.Tensor, counts: torch.Tensor) -> float:
        slots, base = (sums[2:] / counts[2:]).tolist()
        return slots + (self.options.base_weight * base if counts[3] else 0.0)


def _with_rate(args: Any) -> Any:
    """Arguments with a learning rate that adapters learn at, where none was chosen."""
    args = TrainingArguments("tmp_trainer") if args is None else args
    if args.learning_rate != type(args).learning_rate:
        return args
    args = copy.copy(args)
    args.learning_rate = LEARNING_RATE
    return args


def _next_tokens(sequences: Sequences) -> torch.Tensor:
    """Targets of the backbone's own loss, [B, T - 1]."""
    return sequences.tokens[:, 1:].masked_fill(~sequences.startable[:, 1:], IGNORE)


def _check(model: nn.Module, options: PTPOptions, teacher: nn.Module | None) -> None:
    """Refuses what cannot be learned; the message says what would do."""
    if not hasattr(model, "uniform_embedding"):
        raise TypeError(f"PTPTrainer trains a PTPForCausalLM, not {type(model).__name__}; see from_backbone")
    variant = model.config.variant
    if options.method == "inverse":
        if variant != "categorical" or not model.config.informative:
            raise ValueError(f"method='inverse' needs variant='categorical', not {variant!r}, and informative uniforms")
        if teacher is not None:
            raise ValueError("method='inverse' learns without a teacher; drop teacher=")
        if model.config.sampling != SAMPLING:
            raise ValueError(f"method='inverse' learns the data's own law, not sampling={model.config.sampling}")
    elif teacher is None and model.trains_backbone and options.base_weight == 0:
        raise ValueError(
            "the backbone would be its own moving teacher: freeze it with train_only('drafter'), pass teacher=, "
            "or let it learn from the data with base_weight"
        )
    if options.base_weight and not model.trains_backbone:
        raise ValueError(f"base_weight={options.base_weight}: the backbone is frozen; call train_only('all')")
    size = getattr(getattr(teacher, "config", None), "vocab_size", model.config.vocab_size)
    if size != model.config.vocab_size:
        raise ValueError(f"the teacher has a vocabulary of {size} tokens, the student of {model.config.vocab_size}")


def _pad(rows: list[Inputs]) -> dict[str, torch.Tensor]:
    """Pads on the right to the longest row; labels with -100, everything else with 0."""
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


@contextmanager
def _at_rest(model: nn.Module) -> Iterator[None]:
    """Without dropout: the law of the teacher is that of decoding."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
