"""The targets of a batch's slots: completions, uniforms that pick them, and states that they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...configuration.ptp import PTPConfig
from ...generation.tensors.sampling import pick
from ...modeling import PTPForCausalLM
from ...modeling.common.chunks import LossSegment, chunked_sums
from ...modeling.heads.losses import IGNORE
from ...modeling.heads.window_distribution import exact
from ...modeling.ptp.inputs import GREEDY
from .forwards import (
    Completions,
    FixedDraws,
    PackedBatch,
    RandomDraws,
    Scores,
    Sequences,
    SlotInputs,
    Teacher,
    at_columns,
    draw_starts,
    student_drafts,
)
from .losses import PTPOptions, slot_losses, slot_weights, target_probs


@dataclass
class Task:
    """A batch, ready for the forward that learns.

    Attributes:
        sequences: The batch.
        packed: The batch in the model; its cache may be freed.
        inputs: Of the slots.
        completions: Of K tokens.
        u: [B, C, K], the uniforms that pick these tokens; `GREEDY` where they are the most likely ones.
        reached: [B, C, K] bool, tokens that uniforms determine.
        first: The token of a completion that slot 0 predicts: its own (0), or the one after it.
        with_distribution: Whether targets are distributions; else they are one-hot.
        anchors: [B, C, L, D], the backbone's states that predict the same tokens as the slots; for masks.
    """

    sequences: Sequences
    packed: PackedBatch
    inputs: SlotInputs
    completions: Completions
    u: Tensor
    reached: Tensor
    first: int
    with_distribution: bool
    anchors: Tensor | None = None

    def release(self) -> None:
        """Free the cache, so that only one exists at a time; the context is read again."""
        self.packed.cache = None

    @property
    def before(self) -> Tensor:
        """The tokens before those that slots should predict, [B, C, L] int64."""
        return self.completions.tokens[..., : -self.first]

    @property
    def tokens(self) -> Tensor:
        """The tokens that slots should predict, [B, C, L] int64."""
        return self.completions.tokens[..., self.first :]

    @property
    def uniforms(self) -> Tensor:
        """The uniforms that pick these tokens, [B, C, L]."""
        return self.u[..., self.first :]

    @property
    def valid(self) -> Tensor:
        """Slots that learn, [B, C, L] bool."""
        return (self.reached & self.completions.scored)[..., self.first :]

    @property
    def scores(self) -> Scores | None:
        """The scores of the target distributions, [B, C, L]; None if targets are one-hot."""
        scores = self.completions.scores
        return scores[:, :, self.first :] if self.with_distribution and scores is not None else None

    def counts(self, gamma: float, next_tokens: Tensor | None) -> Tensor:
        """Return the weight of all slots, and the number of targets of the backbone's own loss, [2] float64."""
        slots = slot_weights(self.valid, gamma).double().sum()
        others = torch.zeros_like(slots) if next_tokens is None else (next_tokens >= 0).sum().double()
        return torch.stack([slots, others])


Found = tuple[Completions, Tensor, Tensor]
"""Completions, the uniforms [B, C, K] that pick their tokens, and which of them count."""


class TaskMaker:
    """Makes tasks from batches, for slots that learn a teacher's distribution (`is_own`: the student's backbone)."""

    def __init__(self, config: PTPConfig, options: PTPOptions, teacher: Teacher, is_own: bool) -> None:
        self.arguments = config, options, teacher, is_own
        self.config, self.options, self.teacher, self.is_own = self.arguments
        self.is_one_hot = config.variant == "one_hot"
        self.length = config.num_slots + (not self.is_one_hot)

    @torch.no_grad()
    def task(self, model: nn.Module, inputs: Mapping[str, Tensor], is_training: bool, reads: bool) -> Task:
        """Return a batch's task, drawn at random in training, else evenly; `reads`: the forward needs the cache."""
        options, sequences = self.options, Sequences.of(inputs)
        draws = RandomDraws(options.concentration) if is_training else FixedDraws(sequences.documents)
        keys = draws.keys(sequences.documents)
        starts, exists = draw_starts(sequences.startable, options.completions, keys)
        packed = PackedBatch(model, sequences, starts, self.is_one_hot)
        needs_states = self.is_own or options.sequences == "student" or not self.config.reads_uniforms
        own = packed.read() if reads or needs_states else None
        completions, u, reached = self.found(packed, own, exists, draws.shares(starts, self.length))
        # a categorical slot predicts the token after its own; a one-hot one its own, with probability 1
        with_distribution = options.loss != "ce" and not self.config.predicts_tokens
        slots = SlotInputs(u[..., : self.config.num_slots], are_masks=not self.config.reads_uniforms)
        task = Task(sequences, packed, slots, completions, u, reached, int(not self.is_one_hot), with_distribution)
        if not self.config.reads_uniforms and own is not None:
            columns = starts[..., None] + torch.arange(self.config.num_slots, device=starts.device)
            task.anchors = at_columns(own.states, columns.clamp(max=sequences.tokens.shape[1] - 1))
        return task

    def found(self, packed: PackedBatch, own: Scores | None, exists: Tensor, shares: Tensor) -> Found:
        """Return completions, and uniforms [B, C, K] at these shares of their intervals, with which of them count."""
        chosen = self._greedy_indices(packed.starts)
        others = exists if chosen is None else exists.index_fill(1, chosen, False)
        sequences, starts = packed.sequences, packed.starts
        if self.options.sequences == "student" and own is not None:
            noise = torch.rand(*starts.shape, self.config.num_slots + 1, device=starts.device)
            written = student_drafts(packed, own, self.config, SlotInputs(noise))
            completions = self.teacher.drafts(sequences, starts, others, written)
        else:
            scores = own if self.is_own and own is not None else self.teacher.of_sequences(sequences)
            completions = self.teacher.pieces(sequences, scores, starts, others, self.length)
        u, reached = completions.place(shares)
        if chosen is None:
            return completions, u, reached
        # the chosen completions, [G] indices, are replaced by the most likely continuations
        starts = starts[:, chosen]
        if self.is_own and own is not None:
            tokens, scores = packed.most_likely(own.at(starts - 1), starts, self.length)
        else:
            tokens, scores = self.teacher.most_likely(sequences, starts, self.length)
        known = exists[:, chosen, None] & self.teacher.belong(tokens)
        completions = replace(
            completions,
            tokens=completions.tokens.index_copy(1, chosen, tokens),
            known=completions.known.index_copy(1, chosen, known),
            scored=completions.scored.index_copy(1, chosen, known),
            scores=None if completions.scores is None else completions.scores.replaced(chosen, scores),
        )
        return completions, u.index_fill(1, chosen, GREEDY), reached.index_copy(1, chosen, known)

    def _greedy_indices(self, starts: Tensor) -> Tensor | None:
        """Return the indices of greedy completions, [G] int64: evenly spread, whatever their number."""
        share = self.options.greedy_share if self.config.greedy else 0.0
        chosen = [index for index in range(starts.shape[1]) if int((index + 1) * share) > int(index * share)]
        return torch.tensor(chosen, device=starts.device) if chosen else None


class SlotReader:
    """Computes the losses of `PTPTrainer` from the last hidden states of tokens and slots.

    Args:
        task: The task of the batch.
        options: What is learned.
        config: The student's configuration.
        totals: [2], what the sums of slots and of the backbone's own targets are divided by.
        next_tokens: [B, T - 1] targets of the backbone's own loss, -100 for none; None if it does not learn.
    """

    def __init__(
        self, task: Task, options: PTPOptions, config: PTPConfig, totals: Tensor, next_tokens: Tensor | None
    ) -> None:
        self.task, self.options, self.config = task, options, config
        self.totals, self.next_tokens = totals, next_tokens
        self._hits: list[Tensor] = []

    def __call__(self, hidden: Tensor, head: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss; sums of slots and of the backbone [2]; hits [B, C, L] bool. States end with the slots'."""
        self._hits = []
        task, dtype = self.task, torch.promote_types(hidden.dtype, torch.float32)
        totals = self.totals.clamp(min=torch.finfo(torch.float32).tiny).to(dtype)
        slots = hidden[:, hidden.shape[1] - task.tokens[0].numel() :].unflatten(1, task.tokens.shape[1:])
        loss, slot_sum = self._of_slots(head, slots, totals[:1])
        base_sum = torch.zeros_like(slot_sum)
        if self.next_tokens is not None:
            before = hidden[:, : self.next_tokens.shape[1]]
            weight, scored = self.options.base_weight / totals[1:], self.next_tokens != IGNORE
            part = LossSegment(before, [self.next_tokens[..., None]], weight, scored=scored)

            def own(states: Tensor, targets: Tensor) -> Tensor:
                losses = nn.functional.cross_entropy
                return losses(exact(head(states)), targets[:, 0], ignore_index=IGNORE, reduction="none")[:, None]

            base, (base_sum,) = chunked_sums(own, head, [part], self.config.vocab_size)
            loss = loss + base
        hits = torch.cat(self._hits).view(task.tokens.shape)
        return loss, torch.cat([slot_sum, base_sum]), hits

    def _of_slots(self, head: nn.Module, slots: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return self._compared(head, slots, total, drafts=True)

    def _compared(self, head: nn.Module, states: Tensor, total: Tensor, drafts: bool = False) -> tuple[Tensor, Tensor]:
        """Return the loss of states that predict the slots' tokens, by `total` [1], and its sum; hits of `drafts`."""
        task = self.task
        weights, targets = slot_weights(task.valid, self.options.gamma), task.scores

        def terms(
            states: Tensor, tokens: Tensor, weights: Tensor, uniforms: Tensor, teacher: Tensor | None
        ) -> Tensor:  # [n, 1]
            tokens, weights, logits, distribution = tokens[:, 0], weights[:, 0], head(states), None
            with torch.no_grad():
                if teacher is not None and targets is not None:
                    distribution = target_probs(targets.logits(teacher), **self.config.sampling or {})
                if drafts:
                    self._hits.append(self._drafts(logits.detach(), uniforms[:, 0]) == tokens)
            losses = slot_losses(logits, tokens, distribution, self.options.loss)
            return (losses.masked_fill(weights == 0, 0.0) * weights)[:, None]

        values = [task.tokens[..., None], weights[..., None], task.uniforms[..., None], targets and targets.states]
        loss, (summed,) = chunked_sums(terms, head, [LossSegment(states, values, 1 / total)], self.config.vocab_size)
        return loss, summed

    def _drafts(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Return what slots with logits [n, v] draft; categorical ones pick with the uniforms of their targets."""
        likely = logits.argmax(-1)
        if self.config.predicts_tokens:
            return likely
        return torch.where(uniforms < 0, likely, pick(uniforms.clamp(min=0), logits.double().softmax(-1)))


class MaskReader(SlotReader):
    """The loss of mask slots (Samragh et al. 2025, arXiv 2507.11851): backbone's head, sampler head, and LCM.

    The sampler head learns from ordinary tokens, too: those whose states predict the same tokens as the masks. Latent
    consistency matching (LCM) is the mean of |z_mask - z_token|^2 over masks, z_token being such a detached state.
    """

    def __init__(self, model: PTPForCausalLM, *args: Any) -> None:
        super().__init__(*args)
        self.model = model

    def _of_slots(self, head: nn.Module, slots: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        anchors = self.task.anchors
        assert anchors is not None
        # the sampler's states come first: a loss in chunks goes backward at once, and then frees gathered shards
        sampled = self._sampled(slots, anchors.to(slots))
        parts = [self._compared(head, slots, total, drafts=not sampled), self._matched(slots, anchors, total)]
        parts += [self._compared(head, states, total, drafts=index == 0) for index, states in enumerate(sampled)]
        losses, sums = zip(*parts)
        return torch.stack(losses).sum(0), torch.stack(sums).sum(0)

    def _sampled(self, slots: Tensor, anchors: Tensor) -> list[Tensor]:
        """Return the sampler head's states for masks and for ordinary tokens; none without such a head."""
        if self.model.sampler is None:
            return []
        before = self.model.get_input_embeddings()(self.task.before)
        return [self.model.sampler(states, before) for states in (slots, anchors)]

    def _matched(self, slots: Tensor, anchors: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of latent consistency matching, and its sum [1]."""
        weights = slot_weights(self.task.valid, self.options.gamma).to(slots.device)
        wide = torch.promote_types(slots.dtype, torch.float32)
        distances = (slots.to(wide) - anchors.to(slots.device, wide)).square().sum(-1)
        summed = self.config.lcm_weight * (distances.masked_fill(weights == 0, 0.0) * weights).sum()[None]
        return (summed / total.to(summed)).sum(), summed.detach()
