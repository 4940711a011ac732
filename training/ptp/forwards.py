"""The forwards of training: slots after the tokens of a batch in a `PTPForCausalLM`, and distributions of a teacher.

A teacher is the student's own backbone, any other causal language model with the same vocabulary, or any module whose
call with `input_ids`, `attention_mask` and `position_ids` returns an object with `logits`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...modeling.masks import additive_mask
from ...modeling.ptp.inputs import packed_mask, packed_positions, stepwise_mask, token_mask
from .completions import (
    Completions,
    Scores,
    Sequences,
    at_columns,
    before_eos,
    completion_tokens,
    token_intervals,
)

Read = Callable[[torch.Tensor, nn.Module], Any]
"""What is computed from last hidden states and the head; see `PTPForCausalLM.forward`."""
SlotContext = tuple[torch.Tensor | None, torch.Tensor | None]
"""The states and gaps of `SlotInputs`."""


@dataclass(frozen=True)
class SlotInputs:
    """What the slots of C completions read.

    Attributes:
        uniforms: [B, C, L] float32.
        states: [B, C, D] last verified hidden states, or None.
        gaps: [B, C] int64, tokens between a state's own and its completion; 0 if there is none.
        are_masks: Whether slots read the masks of their positions, and no uniforms.
    """

    uniforms: torch.Tensor
    states: torch.Tensor | None = None
    gaps: torch.Tensor | None = None
    are_masks: bool = False

    def flat(self) -> dict[str, torch.Tensor]:
        """Return the arguments of `PTPForCausalLM.forward`, all slots in one sequence."""
        completions, slots = self.uniforms.shape[1:]
        if self.are_masks:
            return {"masks": torch.arange(slots, device=self.uniforms.device).repeat(completions)[None]}
        context = {"slot_states": self.states, "slot_gaps": self.gaps}
        repeated = {name: x.repeat_interleave(slots, dim=1) for name, x in context.items() if x is not None}
        return {"uniforms": self.uniforms.flatten(1)} | repeated


class PackedRows:
    """A batch in a model: its tokens are read once, then the slots of all completions in one forward.

    Args:
        model: A `PTPForCausalLM`, perhaps wrapped for distribution.
        sequences: The batch.
        starts: [B, C] int64.
        is_one_hot: Whether slots are one-hot, which decides their positions.
    """

    def __init__(self, model: nn.Module, sequences: Sequences, starts: torch.Tensor, is_one_hot: bool) -> None:
        self.model, self.sequences, self.starts = model, sequences, starts
        self.offset = -int(is_one_hot)
        self.cache: Any = None

    @torch.no_grad()
    def read(self) -> Scores:
        """Return the backbone's own scores [B, T]; keys and values stay in a cache for the slots."""
        mask = token_mask(self.sequences.documents)
        return self._run(self.sequences.tokens, mask, self.sequences.positions, _scores)

    def slots(self, inputs: SlotInputs, read: Read) -> Any:
        """Return what a function computes of the slots after the cached tokens: hidden states [B, C L, D], the head."""
        mask, positions = self._layout(inputs.uniforms.shape[2])
        length = self.sequences.tokens.shape[1]
        found = self._run(None, mask[:, :, length:], positions[:, length:], read, inputs)
        self.cache.crop(length - positions.shape[1])
        return found

    def everything(self, inputs: SlotInputs, read: Read) -> Any:
        """Run tokens and slots in one forward without a cache, for a backbone that learns too.

        Args:
            inputs: Inputs of the slots.
            read: Takes hidden states [B, T + C L, D] and the head.
        """
        return self._run(self.sequences.tokens, *self._layout(inputs.uniforms.shape[2]), read, inputs, use_cache=False)

    def _run(
        self,
        tokens: torch.Tensor | None,
        mask: torch.Tensor,
        positions: torch.Tensor,
        read: Read,
        slots: SlotInputs | None = None,
        use_cache: bool = True,
    ) -> Any:
        """Return what `read` computes of new rows; with a cache, they stay in it."""
        outputs = self.model(
            input_ids=self.sequences.tokens[:, :0] if tokens is None else tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache if use_cache else None,
            use_cache=use_cache,
            read=read,
            **({} if slots is None else slots.flat()),
        )
        self.cache = outputs.past_key_values if use_cache else self.cache
        return outputs.read

    @torch.no_grad()
    def most_likely(self, first: Scores, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, Scores]:
        """Return the backbone's own greedy completions, computed token by token with the cache.

        Args:
            first: [B, C], of the completions' first tokens, from `read`.
            starts: [B, C] int64.
            length: K.

        Returns:
            tokens [B, C, K] int64, and their scores [B, C, K].
        """
        scores, tokens = [first], []
        for step in range(length):
            tokens.append(scores[-1].mapped(lambda logits: (logits.argmax(-1),))[0])
            if step < length - 1:
                scores.append(self._next(step, starts, tokens=tokens[-1]))
        self.cache.crop(-(length - 1) * starts.shape[1])
        stacked = torch.stack([part.states for part in scores], dim=2)
        return torch.stack(tokens, dim=-1), Scores(stacked, first.head, first.size)

    def _next(
        self, step: int, starts: torch.Tensor, slots: SlotInputs | None = None, tokens: torch.Tensor | None = None
    ) -> Scores:
        """Return the scores [B, C] after one more slot, or token, of C completions; it stays in the cache."""
        mask = stepwise_mask(self.sequences.documents, starts, step)
        return self._run(tokens, mask, at_columns(self.sequences.positions, starts) + step, _scores, slots)

    def _layout(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        documents = self.sequences.documents
        positions = packed_positions(documents, self.starts, slots, self.offset, self.sequences.positions)
        return packed_mask(documents, self.starts, slots), positions


def _scores(hidden: torch.Tensor, head: Any) -> Scores:
    return Scores(hidden, head, head.weight.shape[0])


class Teacher:
    """Distributions of a model.

    Args:
        model: The teacher.
        sampling: `temperature`, `top_k` and `top_p` of the distribution that decoding verifies.
    """

    def __init__(self, model: Any, sampling: dict[str, Any]) -> None:
        self.model, self.sampling = model, sampling

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, Q, v] of tokens [B, Q] under a dense bool mask [B, 1, Q, Q]."""
        weight = next(self.model.parameters(), None)
        dtype = torch.float32 if weight is None else weight.dtype
        return self.model(
            input_ids=tokens, attention_mask=additive_mask(mask, dtype), position_ids=positions, use_cache=False
        ).logits

    def of_sequences(self, sequences: Sequences) -> Scores:
        """Return the scores [B, T] of a batch."""
        documents = sequences.documents
        return Scores.of_logits(self.logits(sequences.tokens, token_mask(documents), sequences.positions))

    def pieces(
        self, sequences: Sequences, scores: Scores, starts: torch.Tensor, exists: torch.Tensor, length: int
    ) -> Completions:
        """Return pieces of the sequences as completions, verified by the scores [B, T] of the sequences."""
        columns, tokens, known, scored = completion_tokens(sequences, starts, exists, length)
        low, high = token_intervals(scores[:, :-1], sequences.tokens[:, 1:], self.sampling)
        low, high = (at_columns(edge, columns - 1) for edge in (low, high))
        return Completions(starts, tokens, known, scored, low, high, scores.at(columns - 1))

    def belong(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return which tokens [..., K] of completions come no later than their end, [..., K] bool."""
        return before_eos(tokens, eos_ids(self.model))

    def _of_completions(self, sequences: Sequences, starts: torch.Tensor, tokens: torch.Tensor) -> Scores:
        """Return the scores [B, C, K] of completions [B, C, K]."""
        documents, length = sequences.documents, sequences.tokens.shape[1]
        mask = packed_mask(documents, starts, tokens.shape[2])
        positions = packed_positions(documents, starts, tokens.shape[2], 0, sequences.positions)
        logits = self.logits(torch.cat([sequences.tokens, tokens.flatten(1)], dim=1), mask, positions)
        own = logits[:, length:].unflatten(1, tokens.shape[1:])
        return Scores.of_logits(torch.cat([at_columns(logits, starts - 1)[:, :, None], own[:, :, :-1]], dim=2))

    def most_likely(self, sequences: Sequences, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, Scores]:
        """Return greedy completions [B, C, K] and their scores, a forward per token; `PackedRows` has a cache."""
        tokens = torch.zeros(*starts.shape, length, dtype=torch.long, device=starts.device)
        scores = self._of_completions(sequences, starts, tokens)
        for step in range(length):
            scores = scores if step == 0 else self._of_completions(sequences, starts, tokens)
            tokens[..., step] = scores.states[:, :, step].argmax(-1)
        return tokens, scores


def eos_ids(model: Any) -> list[int]:
    """Return the end-of-text ids of a model's generation config; none if it has none."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
