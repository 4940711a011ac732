"""A Trainer for `PTPForCausalLM`: slots learn to predict the tokens that uniforms pick."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from ...configuration.ptp import SAMPLING
from ...modeling import PTPForCausalLM, PTPStudent
from ...modeling.wrapped_models import checkpoints_activations
from ..batches import Collator, Inputs
from .forwards import Teacher
from .losses import MaskReader, SlotReader
from .options import PTPOptions
from .tasks import Task, TaskMaker
from .updates import UpdateTrainer, at_rest, check_noise, next_tokens

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
        **kwargs: For `Trainer`.

    Raises:
        TypeError: A model that is not a `PTPForCausalLM`.
        ValueError: Options that this model does not support.

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
        self._owner: PTPForCausalLM = _checked(model, self.options, teacher)
        if kwargs.get("data_collator") is None:
            kwargs["data_collator"] = self._own_collator(kwargs.get("processing_class"))
        super().__init__(model, _with_rate(args), **kwargs)
        check_noise(self.args)
        if teacher is not None:
            teacher = teacher.to(self.args.device).requires_grad_(False).eval()
        self._external = None if teacher is None else Teacher(teacher, self._owner.config.sampling or {})

    def _own_collator(self, tokenizer: Any) -> Any:
        """Return the default collator; None leaves it to `Trainer`."""
        return Collator(tokenizer)

    @property
    def _maker(self) -> TaskMaker:
        teacher = self._external or Teacher(self._owner, self._owner.config.sampling or {})
        return TaskMaker(self._owner.config, self.options, teacher, self._external is None)

    def _learn(
        self, model: nn.Module, task: Task, totals: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `UpdateTrainer`; the outputs are those of slots: `tokens`, `valid` and `hits` [B, C, L]."""
        targets = next_tokens(task.sequences) if self.options.base_weight else None
        given = task, self.options, self._owner.config, totals, targets
        reader = SlotReader(*given) if self._owner.config.reads_uniforms else MaskReader(self._owner, *given)
        if self._learns_in_one_pass:
            task.release()
            loss, sums, hits = task.rows.everything(task.inputs, reader)
        else:
            if task.rows.cache is None:
                with at_rest(model):
                    task.rows.read()
            loss, sums, hits = task.rows.slots(task.inputs, reader)
        self._note(task, sums, counts, hits, model.training)
        return loss, {"tokens": task.tokens, "valid": task.valid, "hits": hits}

    @property
    def _learns_in_one_pass(self) -> bool:
        """Whether tokens and slots share a forward: if the backbone learns, or activations are recomputed."""
        owner = self._owner
        return owner.trains_backbone or checkpoints_activations(owner) or self.options.base_weight > 0

    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Task:
        """Return what the slots are to learn in this batch."""
        with at_rest(model):
            return self._maker.task(model, inputs, is_training, reads=not self._learns_in_one_pass)

    def _counts(self, task: Task) -> torch.Tensor:
        return task.counts(self.options.gamma, next_tokens(task.sequences) if self.options.base_weight else None)

    def _note(
        self, task: Task, sums: torch.Tensor, counts: torch.Tensor, hits: torch.Tensor, is_training: bool
    ) -> None:
        """Add sums and counts of a batch to the running means; inverted uniforms are right by construction."""
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
    """Return arguments with a learning rate for adapters, if none was set."""
    args = TrainingArguments("tmp_trainer") if args is None else args
    if args.learning_rate != type(args).learning_rate:
        return args
    args = copy.copy(args)
    args.learning_rate = LEARNING_RATE
    return args


def _checked(model: nn.Module, options: PTPOptions, teacher: Any) -> PTPForCausalLM:
    """Return the model, or refuse what cannot be learned; the message says what to do instead."""
    if not isinstance(model, PTPForCausalLM):
        hint = "give it student.whole" if isinstance(model, PTPStudent) else "see PTPForCausalLM.from_backbone"
        raise TypeError(f"PTPTrainer trains a PTPForCausalLM, not {type(model).__name__}; {hint}")
    variant = model.config.variant
    if options.sequences == "student" and not model.config.reads_uniforms:
        raise ValueError("sequences='student' is for slots that read uniforms; choose 'dataset' or 'teacher' for masks")
    if options.method == "inverse":
        if variant != "categorical" or not model.config.informative:
            raise ValueError(f"method='inverse' needs variant='categorical', not {variant!r}, and informative uniforms")
        if teacher is not None:
            raise ValueError("teacher= is not read with method='inverse', which has no teacher; leave it out")
        if model.config.sampling != SAMPLING:
            raise ValueError(
                f"sampling={model.config.sampling} is not possible with method='inverse', which learns that of the "
                f"data; set it to {SAMPLING}"
            )
    elif teacher is None and model.trains_backbone and options.base_weight == 0:
        raise ValueError(
            "base_weight=0 and no teacher=: the backbone that is trained would be its own teacher; freeze it with "
            "train_only('drafter'), pass teacher=, or set base_weight"
        )
    if options.base_weight and not model.trains_backbone:
        raise ValueError(f"base_weight={options.base_weight} needs a backbone that is trained; call train_only('all')")
    size = getattr(getattr(teacher, "config", None), "vocab_size", model.config.vocab_size)
    if size != model.config.vocab_size:
        raise ValueError(f"teacher= has a vocabulary of {size} tokens, and the student of {model.config.vocab_size}")
    return model
