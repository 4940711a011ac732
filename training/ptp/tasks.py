"""The targets of a batch's slots: completions, uniforms that pick them, and states that they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...configuration.ptp import PTPConfig
from ...modeling.ptp.embedding import GREEDY
from .completions import (
    Completions,
    FixedDraws,
    RandomDraws,
    Scores,
    Sequences,
    at_columns,
    completion_tokens,
    draw_starts,
)
from .forwards import PackedBatch, SlotInputs, Teacher, student_drafts
from .losses import PTPOptions, slot_weights


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


class TaskMaker:
    """Makes tasks from batches, for slots that learn a teacher's distribution (`is_own`: the student's backbone)."""

    def __init__(self, config: PTPConfig, options: PTPOptions, teacher: Teacher, is_own: bool) -> None:
        self.config, self.options, self.teacher, self.is_own = config, options, teacher, is_own
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
        needs_states = options.sequences == "student" or options.method == "inverse"
        needs_states = needs_states or not self.config.reads_uniforms
        own = packed.read() if self.is_own or reads or needs_states else None
        shares = draws.shares(starts, self.length)
        if options.method == "inverse" and own is not None:
            completions, (u, reached) = _inverse(packed, sequences, own, exists, shares)
        else:
            chosen = self._greedy_indices(starts)
            others = exists if chosen is None else exists.index_fill(1, chosen, False)
            completions = self._completions(packed, own, others)
            u, reached = completions.place(shares)
            if chosen is not None:
                completions, u, reached = self._with_greedy(packed, own, exists, chosen, completions, u, reached)
        # a categorical slot predicts the token after its own; a one-hot one its own, with probability 1
        with_distribution = options.loss != "ce" and not self.config.predicts_tokens
        slots = SlotInputs(u[..., : self.config.num_slots], are_masks=not self.config.reads_uniforms)
        task = Task(sequences, packed, slots, completions, u, reached, int(not self.is_one_hot), with_distribution)
        if not self.config.reads_uniforms and own is not None:
            columns = starts[..., None] + torch.arange(self.config.num_slots, device=starts.device)
            task.anchors = at_columns(own.states, columns.clamp(max=sequences.tokens.shape[1] - 1))
        return task

    def _completions(self, packed: PackedBatch, own: Scores | None, exists: Tensor) -> Completions:
        sequences, starts = packed.sequences, packed.starts
        if self.options.sequences == "student" and own is not None:
            noise = torch.rand(*starts.shape, self.config.num_slots + 1, device=starts.device)
            written = student_drafts(packed, own, self.config, SlotInputs(noise))
            return self.teacher.drafts(sequences, starts, exists, written)
        scores = own if self.is_own and own is not None else self.teacher.of_sequences(sequences)
        return self.teacher.pieces(sequences, scores, starts, exists, self.length)

    def _with_greedy(
        self,
        packed: PackedBatch,
        own: Scores | None,
        exists: Tensor,
        chosen: Tensor,
        completions: Completions,
        u: Tensor,
        reached: Tensor,
    ) -> tuple[Completions, Tensor, Tensor]:
        """Replace the chosen completions, [G] indices, by the most likely continuations."""
        starts = packed.starts[:, chosen]
        if self.is_own and own is not None:
            tokens, scores = packed.most_likely(own.at(starts - 1), starts, self.length)
        else:
            tokens, scores = self.teacher.most_likely(packed.sequences, starts, self.length)
        known = exists[:, chosen, None] & self.teacher.belong(tokens)
        joined = replace(
            completions,
            tokens=completions.tokens.index_copy(1, chosen, tokens),
            known=completions.known.index_copy(1, chosen, known),
            scored=completions.scored.index_copy(1, chosen, known),
            scores=None if completions.scores is None else completions.scores.replaced(chosen, scores),
        )
        return joined, u.index_fill(1, chosen, GREEDY), reached.index_copy(1, chosen, known)

    def _greedy_indices(self, starts: Tensor) -> Tensor | None:
        """Return the indices of greedy completions, [G] int64: evenly spread, whatever their number."""
        share = self.options.greedy_share if self.config.greedy else 0.0
        chosen = [index for index in range(starts.shape[1]) if int((index + 1) * share) > int(index * share)]
        return torch.tensor(chosen, device=starts.device) if chosen else None


def _inverse(
    packed: PackedBatch, sequences: Sequences, own: Scores, exists: Tensor, shares: Tensor
) -> tuple[Completions, tuple[Tensor, Tensor]]:
    _, tokens, known, scored = completion_tokens(sequences, packed.starts, exists, shares.shape[-1])
    placed = packed.invert(own.at(packed.starts - 1), tokens, known, shares)
    nowhere = torch.zeros_like(shares)
    return Completions(packed.starts, tokens, known, scored, nowhere, nowhere), placed
