"""A Trainer for `PTPForCausalLM`: slots learn to predict the tokens that uniforms pick."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ...generation.backbone.wrapped_models import check_whole, checkpoints_activations, shard
from ...modeling import PTPForCausalLM
from ...modeling.heads.losses import IGNORE
from ..batches import Inputs, at_rest
from ..trainer_base import BaseTrainer, check_depths, check_ids
from .forwards import Sequences, Teacher
from .losses import PTPOptions
from .tasks import MaskReader, SlotReader, Task, TaskMaker

TASK = "ptp_task"
"""The key of a batch under which its task is stored."""


class UpdateTrainer(BaseTrainer):
    """The base of trainers of slots and registers, which follow the tokens of a batch.

    Gradients are exact under accumulation and on several ranks: sums are divided by the counts of the whole update.
    `eval_loss` is the same every time, whatever the size of batches, and an evaluation advances no generator. What a
    step draws depends on the seed, the step and the rank alone: a resumed run learns what an uninterrupted one does.

    A subclass sets `_owner` (the model, without what distribution wraps around it) before `__init__`, and defines the
    task of a batch (`_task`; it has `release()`), what its sums are divided by (`_counts`, the first above 0 if there
    is something to learn), and its loss (`_learn`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # sums are divided by the counts of a whole update

    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Any:
        """Return the task of this batch."""
        raise NotImplementedError

    def _counts(self, task: Any) -> Tensor:
        """Return the divisors of a task's sums, if it is a whole update, [n] float64."""
        raise NotImplementedError

    def _learn(self, model: nn.Module, task: Any, totals: Tensor, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a task's share in the loss (sums by `totals` [n]; its `counts` [n]), and outputs."""
        raise NotImplementedError

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], Tensor | None]:
        """Return the micro-batches of an update with their tasks, and the divisors of their sums, over all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        if self.state.global_step == self._initial_global_step:
            check_ids(batches, self._owner.config.vocab_size)
        reader = self.args.process_index // self.get_tp_size()  # processes that divide a model read the same rows
        with self._drawing(f"{self.args.seed} {self.state.global_step} {reader}"):
            model = cast(nn.Module, self.model_wrapped)
            tasks = [self._task(model, self._prepare_inputs(batch), True) for batch in batches]
        if len(tasks) > 1:
            for task in tasks:
                task.release()
        totals = torch.stack([self._counts(task) for task in tasks]).sum(0)
        if self.args.world_size > 1:
            totals = cast(Tensor, self.accelerator.reduce(totals, "sum")) / self.get_tp_size()
        if self.state.global_step == 0:
            check_depths(totals[:1], lambda batch: Sequences.of(batch).startable.any()[None], self.get_train_dataloader)
        return [{**batch, TASK: task} for batch, task in zip(batches, tasks)], totals

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the share of this batch in the mean loss of an update, whose divisors [n] are `num_items_in_batch`."""
        task = inputs.get(TASK) or self._task(model, inputs, model.training)
        counts = self._counts(task)
        totals = num_items_in_batch if isinstance(num_items_in_batch, Tensor) else counts
        loss, outputs = self._learn(model, task, totals, counts)
        if num_items_in_batch is not None:
            loss = loss * (self.args.world_size // self.get_tp_size())  # ranks average their gradients
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in `Trainer`; the same every time, and the global generator is not advanced."""
        with self._drawing(self.args.seed):
            return super().evaluation_loop(*args, **kwargs)

    @contextmanager
    def _drawing(self, seed: int | str) -> Iterator[None]:
        """Seed the random numbers within the context; afterwards the global generator is the same as before.

        `Trainer` restores the generators of a checkpoint only after `get_batch_samples`.
        """
        device = self.args.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            torch.manual_seed(seed if isinstance(seed, int) else random.Random(seed).getrandbits(63))
            yield

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        """Return the loss of an evaluation batch; its uniforms lie evenly in their intervals."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(self.without_repeats(inputs)))
        return loss.detach(), None, None


def next_tokens(sequences: Sequences) -> Tensor:
    """Return the targets of the backbone's own loss, [B, T - 1]."""
    return sequences.tokens[:, 1:].masked_fill(~sequences.startable[:, 1:], IGNORE)


LEARNING_RATE = 2e-3
"""The default of `PTPTrainer`: at transformers' default of 5e-5 a student hardly learns."""


class PTPTrainer(UpdateTrainer):
    """transformers' Trainer for parallel token prediction.

    Every step draws random starts in the sequences, finds uniforms that pick the next tokens under the
    distribution that decoding verifies (`model.config.sampling`), and trains the slots to predict the tokens from the
    uniforms. Slots of masks (`variant="mask"`) read no uniforms; they learn their tokens and the backbone's states
    (`MaskReader`).

    The data are dictionaries with `input_ids` and, optionally, `attention_mask`, `labels` (-100: never a target) and
    `position_ids` (packed documents start at 0 again). The log carries `num_correct`: the mean number of slots of a
    completion before the first wrong one (PTP paper, Eq. 16); and `num_correct_greedy`, the same for the most likely
    completions.

    Gradients, evaluation and resumed runs are exact, see `UpdateTrainer`. The learning rate of `TrainingArguments` is
    2e-3 unless it was set.

    Args:
        model: A `PTPForCausalLM`.
        args: `TrainingArguments`.
        options: What to learn, and from what.
        teacher: A teacher other than the model's own backbone, with the same vocabulary.
        shard_backbone: Divide the layers of the backbone, which is frozen, among processes (`TrainingStrategy`).
        **kwargs: For `Trainer`.

    Raises:
        TypeError: A model that is not a `PTPForCausalLM`.
        ValueError: Options that this model does not support.

    Example:
        >>> model = PTPForCausalLM.from_backbone(backbone, num_slots=8)
        >>> PTPTrainer(model, TrainingArguments("out", max_steps=1000), train_dataset=data).train()
    """

    counts_correct = True

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        options: PTPOptions | None = None,
        teacher: nn.Module | None = None,
        shard_backbone: bool = False,
        **kwargs: Any,
    ) -> None:
        self.options = options or PTPOptions()
        self._owner: PTPForCausalLM = _checked(model, self.options, teacher, shard_backbone)
        if shard_backbone:
            shard(self._owner.backbone, cast(torch.device, PartialState().device))
        super().__init__(model, _with_rate(args), **kwargs)
        if self.args.neftune_noise_alpha:
            noise = self.args.neftune_noise_alpha
            raise ValueError(f"neftune_noise_alpha={noise} would change the teacher's distribution; leave it out")
        if teacher is not None:
            teacher = teacher.to(self.args.device).requires_grad_(False).eval()
        self._external = None if teacher is None else Teacher(teacher, self._owner.config.sampling or {})

    @property
    def tokens_besides(self) -> int:
        return self.options.completions * self._owner.config.num_slots

    @property
    def _maker(self) -> TaskMaker:
        teacher = self._external or Teacher(self._owner, self._owner.config.sampling or {})
        return TaskMaker(self._owner.config, self.options, teacher, self._external is None)

    def _learn(self, model: nn.Module, task: Task, totals: Tensor, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `UpdateTrainer`; the outputs are those of slots: `tokens`, `valid` and `hits` [B, C, L]."""
        targets = next_tokens(task.sequences) if self.options.base_weight else None
        values = task, self.options, self._owner.config, totals, targets
        reader = SlotReader(*values) if self._owner.config.reads_uniforms else MaskReader(self._owner, *values)
        if self._learns_in_one_pass:
            task.release()
            loss, sums, hits = task.packed.everything(task.inputs, reader)
        else:
            if task.packed.cache is None:
                with at_rest(model):
                    task.packed.read()
            loss, sums, hits = task.packed.slots(task.inputs, reader)
        self._note(task, sums, counts, hits, model.training)
        return loss, {"tokens": task.tokens, "valid": task.valid, "hits": hits}

    @property
    def _learns_in_one_pass(self) -> bool:
        """Whether tokens and slots share a forward: if the backbone learns, or activations are recomputed."""
        owner = self._owner
        return owner.trains_backbone or checkpoints_activations(owner) or self.options.base_weight > 0

    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Task:
        with at_rest(model):
            return self._maker.task(model, inputs, is_training, reads=not self._learns_in_one_pass)

    def _counts(self, task: Task) -> Tensor:
        return task.counts(self.options.gamma, next_tokens(task.sequences) if self.options.base_weight else None)

    def _note(self, task: Task, sums: Tensor, counts: Tensor, hits: Tensor, is_training: bool) -> None:
        correct, whole = hits.long().cumprod(-1).sum(-1), task.valid.all(-1)
        is_greedy = task.uniforms[..., 0] < 0
        groups = [whole & ~is_greedy & self.counts_correct, whole & is_greedy]
        right = torch.stack([(correct * group).sum() for group in groups])
        sums = torch.cat([right.double(), sums.detach().double()])
        self._means[is_training].add(sums, torch.cat([torch.stack([g.sum() for g in groups]).double(), counts]))

    def _mean_names(self) -> list[str]:
        return ["num_correct", "num_correct_greedy"]

    def _pooled_loss(self, sums: Tensor, counts: Tensor) -> float:
        slots, base = (sums[2:] / counts[2:]).tolist()
        return slots + (self.options.base_weight * base if counts[3] else 0.0)


def _with_rate(args: TrainingArguments | None) -> TrainingArguments:
    """Return arguments with a learning rate for adapters, if none was set."""
    args = TrainingArguments("tmp_trainer") if args is None else args
    if args.learning_rate != type(args).learning_rate:
        return args
    args = copy.copy(args)
    args.learning_rate = LEARNING_RATE
    return args


def _checked(model: nn.Module, options: PTPOptions, teacher: nn.Module | None, shards: bool) -> PTPForCausalLM:
    """Return the model, or refuse options that it cannot learn."""
    if not isinstance(model, PTPForCausalLM):
        hint = "see PTPForCausalLM.from_backbone; of a PTPStudent, give it student.whole"
        raise TypeError(f"PTPTrainer trains a PTPForCausalLM, not {type(model).__name__}: {hint}")
    if teacher is not None:
        check_whole(teacher, "teacher=")
    if shards and model.trains_backbone:
        raise ValueError("shard_backbone=True is for a frozen backbone: call train_only('drafter'), or use FSDP2")
    if teacher is None and model.trains_backbone and options.base_weight == 0:
        raise ValueError("base_weight=0: the backbone would teach itself; use train_only('drafter') or teacher=")
    size = getattr(getattr(teacher, "config", None), "vocab_size", model.config.vocab_size)
    if size != model.config.vocab_size:
        raise ValueError(f"teacher= has a vocabulary of {size} tokens, and the student of {model.config.vocab_size}")
    return model
