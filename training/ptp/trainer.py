"""A Trainer for `PTPForCausalLM`: slots learn what uniforms pick. Knows how a batch becomes a loss; parts are pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DataCollatorForSeq2Seq, Trainer

from ...configuration.ptp import SAMPLING
from ...modeling.heads.losses import IGNORE
from ...modeling.sampling import pick
from ..beginning import check_checkpoint, check_ids
from ..running_means import RunningMeansMixin
from .completions import Completions, Sequences, at_columns, completion_tokens, draw_starts
from .losses import slot_losses, slot_mean, slot_weights
from .options import PTPOptions
from .rows import PackedRows
from .teacher import Teacher, student_drafts

Inputs = dict[str, Any]


class PTPTrainer(RunningMeansMixin, Trainer):
    """transformers' Trainer for parallel token prediction.

    Every step draws random starts in the sequences, finds uniforms that pick the tokens behind them under the law that
    decoding verifies (`model.config.sampling`), and teaches the slots to predict the tokens from the uniforms.

    The data are dictionaries with `input_ids` and, where wanted, `attention_mask`, `labels` (-100: never a target) and
    `position_ids` (packed documents start anew at 0). The log carries `num_correct`: how many
    slots of a completion are right before the first wrong one, on average (PTP paper, Eq. 16).

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
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = False  # slots are counted when they are drawn: the loss is a mean
        if teacher is not None:
            teacher = teacher.to(self.args.device).requires_grad_(False).eval()
        self._external = None if teacher is None else Teacher(teacher, model.config.sampling)

    def _own_collator(self, tokenizer: Any) -> Any:
        """What makes batches where no collator is given; None leaves it to `Trainer`."""
        return _pad if tokenizer is None else DataCollatorForSeq2Seq(tokenizer)

    @property
    def _teacher(self) -> Teacher:
        return self._external or Teacher(self._owner, self._owner.config.sampling)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The mean loss of the slots of one batch, and the backbone's own where `base_weight` asks for it.

        Args:
            model: The model, perhaps wrapped.
            inputs: A batch.
            return_outputs: Return slots, too: `logits` [B, C, L, v], `tokens` and `valid` [B, C, L].
            num_items_in_batch: Not used.

        Returns:
            The loss, and the outputs where asked for.
        """
        options, is_training = self.options, model.training
        with _at_rest(model), torch.no_grad():
            sequences, rows, completions, (u, reached) = self._task(model, Sequences.of(inputs), is_training)
        tokens, valid, law = self._targets(completions, reached)
        slots = tokens.shape[-1]
        uniforms = u[..., :slots]
        if rows.cache is not None and not self._learns_in_one_pass:
            base_logits, logits = None, rows.slots(uniforms)
        else:
            rows.cache = None
            base_logits, logits = rows.everything(uniforms, with_tokens=options.base_weight > 0)
        loss = slot_mean(slot_losses(logits, tokens, law, options.loss), valid, options.gamma)
        noted = {"slots": (loss.detach(), slot_weights(valid, options.gamma).sum())}
        if base_logits is not None:
            targets = _next_tokens(sequences)
            base_loss = _next_token_loss(base_logits, targets)
            noted["base"] = base_loss.detach(), (targets != IGNORE).sum()
            loss = loss + options.base_weight * base_loss
        if options.method == "distil":  # inverted uniforms are right by construction
            correct = self._hits(logits, tokens, u[..., -slots:]).long().cumprod(-1).sum(-1)
            whole = valid.all(-1)
            noted["num_correct"] = (correct * whole).sum() / whole.sum().clamp(min=1), whole.sum()
        self._note(noted, is_training)
        return (loss, {"logits": logits, "tokens": tokens, "valid": valid}) if return_outputs else loss

    @property
    def _learns_in_one_pass(self) -> bool:
        """Whether tokens and slots share a forward: where the backbone learns, or activations are not kept."""
        owner = self._owner
        return owner.trains_backbone or owner.is_activation_checkpointing or self.options.base_weight > 0

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Inputs], torch.Tensor | None]:
        """The micro-batches of an update.

        Raises:
            ValueError: Before the first step, where ids are none.
        """
        batches, counts = super().get_batch_samples(*args, **kwargs)
        if self.state.global_step == self._initial_global_step:
            check_ids(batches, self._owner.config.vocab_size)
        return batches, counts

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As in `Trainer`; a checkpoint of another model is refused."""
        check_checkpoint(resume_from_checkpoint, self._owner)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _task(
        self, model: nn.Module, sequences: Sequences, is_training: bool
    ) -> tuple[Sequences, PackedRows, Completions, tuple[torch.Tensor, torch.Tensor]]:
        """What the slots are to learn in this batch: completions, and uniforms that pick them."""
        options, owner, teacher = self.options, self._owner, self._teacher
        is_one_hot = owner.config.variant == "one_hot"
        length = owner.config.num_slots + (not is_one_hot)
        if options.sequences == "teacher":
            sequences = teacher.continued(sequences, 2 * length)
        starts, exists = draw_starts(sequences.startable, options.completions)
        rows = PackedRows(model, sequences, starts, is_one_hot)
        reads = self._external is None or options.sequences == "student" or not self._learns_in_one_pass
        logits = rows.read() if reads else None
        concentration = options.concentration if is_training else 1.0
        if options.method == "inverse":
            return sequences, rows, *_inverse(rows, sequences, logits, exists, length, concentration)
        with_law = options.loss != "ce" and not owner.config.predicts_tokens
        if options.sequences == "student":
            written = student_drafts(rows, logits, owner.config)
            completions = teacher.drafts(sequences, starts, exists, written, with_law)
        else:
            logits = logits if self._external is None else teacher.of_sequences(sequences)
            completions = teacher.pieces(sequences, logits, starts, exists, length, with_law)
        return sequences, rows, completions, completions.place(concentration)

    def _targets(
        self, completions: Completions, reached: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Tokens and valid [B, C, L], and laws [B, C, L, v]: a categorical slot predicts the token behind its own."""
        first = int(self._owner.config.variant == "categorical")
        valid = (reached & completions.scored)[..., first:]
        law = completions.law
        return completions.tokens[..., first:], valid, None if law is None else law[..., first:, :]

    def _hits(self, logits: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Slots whose draft is right, [B, C, L] bool; categorical slots draft with the uniforms of their targets."""
        logits = logits.detach()
        if self._owner.config.predicts_tokens:
            return logits.argmax(-1) == tokens
        return pick(uniforms, logits.double().softmax(-1)) == tokens

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """The loss of an evaluation batch; its uniforms are uniform in their intervals."""
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, self._prepare_inputs(self._without_repeated_rows(inputs)))
        return loss.detach(), None, None

    def _note(self, noted: dict[str, tuple[torch.Tensor, torch.Tensor]], is_training: bool) -> None:
        """Adds means and what they are means of to the running ones; what a batch does not have counts 0."""
        nothing = (torch.zeros((), device=self.args.device),) * 2
        means, counts = zip(*(noted.get(name, nothing) for name in ("num_correct", "slots", "base")))
        counts = torch.stack([count.float() for count in counts])
        self._means[is_training].add(torch.stack([mean.float() for mean in means]) * counts, counts)

    def _mean_names(self) -> list[str]:
        return ["num_correct"]

    def _pooled_loss(self, sums: torch.Tensor, counts: torch.Tensor) -> float:
        _, slots, base = (sums / counts).tolist()
        return slots + (self.options.base_weight * base if counts[2] else 0.0)


def _inverse(
    rows: PackedRows,
    sequences: Sequences,
    logits: torch.Tensor,
    exists: torch.Tensor,
    length: int,
    concentration: float,
) -> tuple[Completions, tuple[torch.Tensor, torch.Tensor]]:
    _, tokens, known, scored = completion_tokens(sequences, rows.starts, exists, length)
    first = at_columns(logits, rows.starts - 1)
    placed = rows.invert(first, tokens, known, concentration)
    nowhere = torch.zeros_like(tokens, dtype=torch.float64)
    return Completions(rows.starts, tokens, known, scored, nowhere, nowhere), placed


def _next_tokens(sequences: Sequences) -> torch.Tensor:
    """Targets of the backbone's own loss, [B, T - 1]."""
    return sequences.tokens[:, 1:].masked_fill(~sequences.startable[:, 1:], IGNORE)


def _next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    losses = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    return losses / (targets != IGNORE).sum().clamp(min=1)


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
