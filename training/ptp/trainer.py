"""A Trainer for `PTPForCausalLM`: slots learn to predict the tokens that uniforms pick."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ...generation.backbone.wrapped_models import check_whole, checkpoints_activations, shard
from ...modeling import PTPForCausalLM
from ...modeling.heads.losses import IGNORE
from ...modeling.ptp.inputs import GREEDY
from ..batches import Inputs, at_rest
from ..trainer_base import BaseTrainer, check_depths, check_ids
from .forwards import (
    Completions,
    FixedDraws,
    PackedBatch,
    RandomDraws,
    Scores,
    Sequences,
    Teacher,
    at_columns,
    draw_starts,
)
from .losses import PTPOptions, slot_weights
from .tasks import MaskReader, SlotReader, Task

_TASK = "ptp_task"
"""The key of a batch under which its task is stored."""


class UpdateTrainer(BaseTrainer):
    """The base of trainers of slots and registers, which follow the tokens of a batch.

    Gradients are exact under accumulation and on several ranks: sums are divided by the counts of the whole update.
    `eval_loss` is the same every time, whatever the size of batches, and an evaluation advances no generator. What a
    step draws depends on the seed, the step and the rank alone: a resumed run learns what an uninterrupted one does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True  # sums are divided by the counts of a whole update

    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Any:
        raise NotImplementedError

    def _counts(self, task: Any) -> Tensor:
        """Return the divisors of a task's sums, [n] float64, the first above 0 if there is something to learn."""
        raise NotImplementedError

    def _learn(self, model: nn.Module, task: Any, totals: Tensor, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a task's share in the loss (sums by `totals` [n]; its `counts` [n]), and outputs."""
        raise NotImplementedError

    def get_batch_samples(
        self, epoch_iterator: Iterator[Inputs], num_batches: int, device: torch.device
    ) -> tuple[list[Inputs], Tensor | None]:
        """As in `Trainer`, with their tasks, and the divisors of their sums over all ranks."""
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
        return [{**batch, _TASK: task} for batch, task in zip(batches, tasks)], totals

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the share of this batch in the mean loss of an update, whose divisors [n] are `num_items_in_batch`."""
        task = inputs.get(_TASK) or self._task(model, inputs, model.training)
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
        """Seed the global generator within the context: `Trainer` restores it only after `get_batch_samples`."""
        device = self.args.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
            torch.manual_seed(seed if isinstance(seed, int) else random.Random(seed).getrandbits(63))
            yield

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, None, None]:
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(self.without_repeats(inputs)))
        return loss.detach(), None, None


def next_tokens(sequences: Sequences) -> Tensor:
    """Return the targets of the backbone's own loss, [B, T - 1]."""
    return sequences.tokens[:, 1:].masked_fill(~sequences.startable[:, 1:], IGNORE)


class PTPTrainer(UpdateTrainer):
    """transformers' Trainer for parallel token prediction.

    Every step draws random starts in the sequences, finds uniforms that pick the next tokens under the distribution
    that decoding verifies (`model.config.sampling`), and trains the slots to predict the tokens from the uniforms.
    Slots of masks (`variant="mask"`) learn their tokens and the backbone's states (`MaskReader`).

    The data are dictionaries with `input_ids` and, optionally, `attention_mask`, `labels` (-100: never a target) and
    `position_ids` (packed documents start at 0 again). The log carries `num_correct`: the mean number of slots of a
    completion before the first wrong one (PTP paper, Eq. 16); and `num_correct_greedy`, the same for the most likely
    completions. Gradients, evaluation and resumed runs are exact, see `UpdateTrainer`.

    Args:
        model: A `PTPForCausalLM`.
        args: `TrainingArguments`; their learning rate is 2e-3 unless it was set.
        options: What to learn, and from what.
        teacher: A teacher other than the model's own backbone, with the same vocabulary.
        shard_backbone: Divide the layers of the backbone, which is frozen, among processes (`TrainingStrategy`).
        **kwargs: For `Trainer`.

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
        if not isinstance(model, PTPForCausalLM):
            raise TypeError(f"PTPTrainer trains a PTPForCausalLM, such as student.whole, not {type(model).__name__}")
        if shard_backbone and model.trains_backbone:
            raise ValueError("shard_backbone=True is for a frozen backbone: call train_only('drafter'), or use FSDP2")
        if teacher is None and model.trains_backbone and self.options.base_weight == 0:
            raise ValueError("base_weight=0: the backbone would teach itself; use train_only('drafter') or teacher=")
        if teacher is not None:
            check_whole(teacher, "teacher=")
        own = model.config.vocab_size
        if (size := getattr(getattr(teacher, "config", None), "vocab_size", own)) != own:
            raise ValueError(f"teacher= has a vocabulary of {size} tokens, and the student of {own}")
        self._owner: PTPForCausalLM = model
        if shard_backbone:
            shard(model.backbone, cast(torch.device, PartialState().device))
        args = TrainingArguments("tmp_trainer") if args is None else args
        if args.learning_rate == type(args).learning_rate:  # at transformers' default a student hardly learns
            args = copy.copy(args)
            args.learning_rate = 2e-3
        super().__init__(model, args, **kwargs)
        if noise := self.args.neftune_noise_alpha:
            raise ValueError(f"neftune_noise_alpha={noise} would change the teacher's distribution; leave it out")
        if teacher is not None:
            teacher = teacher.to(self.args.device).requires_grad_(False).eval()
        self._is_own = teacher is None
        self._teacher = Teacher(model if teacher is None else teacher, model.config.sampling)

    @property
    def tokens_besides(self) -> int:
        return self.options.completions * self._owner.config.num_slots

    @property
    def _learns_in_one_pass(self) -> bool:
        """Whether tokens and slots share a forward: if the backbone learns, or activations are recomputed."""
        learns = self._owner.trains_backbone or self.options.base_weight > 0
        return learns or checkpoints_activations(self._owner)

    @torch.no_grad()
    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Task:
        options, config, sequences = self.options, self._owner.config, Sequences.of(inputs)
        draws = RandomDraws(options.concentration) if is_training else FixedDraws(sequences.documents)
        keys = draws.keys(sequences.documents)
        starts, exists = draw_starts(sequences.startable, options.completions, keys)
        packed = PackedBatch(model, sequences, starts, config)
        needs_states = self._is_own or options.sequences == "student" or not config.reads_uniforms
        with at_rest(model):
            own = packed.read() if needs_states or not self._learns_in_one_pass else None
            shares = draws.shares(starts, config.num_slots + (not config.is_one_hot))
            completions = self._completions(packed, own, exists, shares)
        # a categorical slot predicts the token after its own; a one-hot one its own, with probability 1
        first, scores = int(not config.is_one_hot), completions.scores
        values = completions.tokens, completions.uniforms, completions.reached & completions.scored
        tokens, uniforms, valid = (each[..., first:] for each in values)
        targets = scores[:, :, 1:] if scores is not None and first and options.loss != "ce" else None
        task = Task(packed, completions, tokens, uniforms, valid, targets)
        if not config.reads_uniforms and own is not None:
            columns = starts[..., None] + torch.arange(config.num_slots, device=starts.device)
            task.anchors = at_columns(own.states, columns.clamp(max=sequences.tokens.shape[1] - 1))
        return task

    def _completions(self, packed: PackedBatch, own: Scores | None, exists: Tensor, shares: Tensor) -> Completions:
        """Return completions whose uniforms lie at these shares [B, C, K] of their intervals; `own` of `read`."""
        chosen = self._greedy_indices(packed.starts)
        others = exists if chosen is None else exists.index_fill(1, chosen, False)
        sequences, starts, length = packed.sequences, packed.starts, shares.shape[-1]
        if self.options.sequences == "student" and own is not None:
            noise = torch.rand(*starts.shape, self._owner.config.num_slots + 1, device=starts.device)
            found = self._teacher.drafts(sequences, starts, others, packed.written(own, noise), shares)
        else:
            scores = own if self._is_own and own is not None else self._teacher.of_sequences(sequences)
            found = self._teacher.pieces(sequences, scores, starts, others, shares)
        if chosen is None:
            return found
        # the chosen completions, [G] indices, are replaced by the most likely continuations
        starts = starts[:, chosen]
        if self._is_own and own is not None:
            tokens, scores = packed.most_likely(own.at(starts - 1), starts, length)
        else:
            tokens, scores = self._teacher.most_likely(sequences, starts, length)
        known = exists[:, chosen, None] & self._teacher.belong(tokens)
        return replace(
            found,
            tokens=found.tokens.index_copy(1, chosen, tokens),
            scored=found.scored.index_copy(1, chosen, known),
            uniforms=found.uniforms.index_fill(1, chosen, GREEDY),
            reached=found.reached.index_copy(1, chosen, known),
            scores=None if found.scores is None else found.scores.replaced(chosen, scores),
        )

    def _greedy_indices(self, starts: Tensor) -> Tensor | None:
        share = self.options.greedy_share if self._owner.config.greedy else 0.0
        chosen = [index for index in range(starts.shape[1]) if int((index + 1) * share) > int(index * share)]
        return torch.tensor(chosen, device=starts.device) if chosen else None

    def _learn(self, model: nn.Module, task: Task, totals: Tensor, counts: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values = task, self.options, totals, self._next_tokens(task)
        reader = SlotReader(*values) if self._owner.config.reads_uniforms else MaskReader(*values, self._owner)
        if self._learns_in_one_pass:
            task.release()
            loss, sums, hits = task.packed.everything(task.inputs, reader)
        else:
            if task.packed.cache is None:
                with at_rest(model):
                    task.packed.read()
            loss, sums, hits = task.packed.slots(task.inputs, reader)
        correct, whole = hits.long().cumprod(-1).sum(-1), task.valid.all(-1)
        is_greedy = task.uniforms[..., 0] < 0
        groups = torch.stack([whole & ~is_greedy & self.counts_correct, whole & is_greedy])
        sums = torch.cat([(groups * correct).sum((1, 2)).double(), sums.detach().double()])
        self._means[model.training].add(sums, torch.cat([groups.sum((1, 2)).double(), counts]))
        return loss, {"tokens": task.tokens, "valid": task.valid, "hits": hits}

    def _next_tokens(self, task: Task) -> Tensor | None:
        return next_tokens(task.packed.sequences) if self.options.base_weight else None

    def _counts(self, task: Task) -> Tensor:
        slots, targets = slot_weights(task.valid, self.options.gamma).double().sum(), self._next_tokens(task)
        return torch.stack([slots, torch.zeros_like(slots) if targets is None else (targets >= 0).sum().double()])

    def _mean_names(self) -> list[str]:
        return ["num_correct", "num_correct_greedy"]

    def _pooled_loss(self, sums: Tensor, counts: Tensor) -> float:
        slots, base = (sums[2:] / counts[2:]).tolist()
        return slots + (self.options.base_weight * base if counts[3] else 0.0)
