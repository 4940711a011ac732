"""Sequences with completions behind them, in the rows of a `PTPForCausalLM`: the forwards that training needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...modeling.ptp.inputs import packed_mask, packed_positions, stepwise_mask, token_mask
from ...modeling.uniforms import place
from .columns import at_columns
from .completions import Sequences
from .scores import Scores

Read = Callable[[torch.Tensor, nn.Module], Any]
"""What is made of last hidden states and the head; see `PTPForCausalLM.forward`."""


@dataclass(frozen=True)
class SlotInputs:
    """What the slots of C completions read.

    Attributes:
        uniforms: [B, C, L] float32.
        states: [B, C, D] last verified hidden states, or None.
        gaps: [B, C] int64, tokens between a state's own and its completion; 0 where there is none.
        are_masks: Slots read the masks of their places, and no uniforms.
    """

    uniforms: torch.Tensor
    states: torch.Tensor | None = None
    gaps: torch.Tensor | None = None
    are_masks: bool = False

    def flat(self) -> dict[str, torch.Tensor]:
        """Arguments of `PTPForCausalLM.forward`, all slots in a row."""
        completions, slots = self.uniforms.shape[1:]
        if self.are_masks:
            return {"masks": torch.arange(slots, device=self.uniforms.device).repeat(completions)[None]}
        beside = {"slot_states": self.states, "slot_gaps": self.gaps}
        repeated = {name: x.repeat_interleave(slots, dim=1) for name, x in beside.items() if x is not None}
        return {"uniforms": self.uniforms.flatten(1)} | repeated


class PackedRows:
    """One batch in a model: its tokens are read once, then the slots of all completions in one forward.

    Args:
        model: A `PTPForCausalLM`, perhaps wrapped for distribution.
        sequences: The batch.
        starts: [B, C] int64.
        is_one_hot: Layout of the slots.
    """

    def __init__(self, model: nn.Module, sequences: Sequences, starts: torch.Tensor, is_one_hot: bool) -> None:
        self.model, self.sequences, self.starts = model, sequences, starts
        self.offset = -int(is_one_hot)
        self.cache: Any = None

    @torch.no_grad()
    def read(self) -> Scores:
        """The backbone's own scores [B, T]; keys and values stay in a cache for the slots."""
        outputs = self.model(
            input_ids=self.sequences.tokens,
            attention_mask=token_mask(self.sequences.documents),
            position_ids=self.sequences.positions,
            use_cache=True,
            read=_states_and_head,
        )
        self.cache = outputs.past_key_values
        states, head = outputs.read
        return Scores(states, head, head.weight.shape[0])

    def slots(self, inputs: SlotInputs, read: Read | None = None) -> Any:
        """Logits [B, C, L, v] of slots behind what `read` left in the cache; or what a function makes of them.

        Args:
            inputs: Of the slots.
            read: Gets hidden states [B, C L, D] and the head.
        """
        mask, positions = self._layout(inputs.uniforms.shape[2])
        length = self.sequences.tokens.shape[1]
        found = self._behind(inputs.flat(), mask[:, :, length:], positions[:, length:], False, read)
        return found if read else found.unflatten(1, inputs.uniforms.shape[1:])

    def everything(self, inputs: SlotInputs, read: Read) -> Any:
        """Tokens and slots in one forward without a cache, for a backbone that learns too.

        Args:
            inputs: Of the slots.
            read: Gets hidden states [B, T + C L, D] and the head.
        """
        mask, positions = self._layout(inputs.uniforms.shape[2])
        return self.model(
            input_ids=self.sequences.tokens,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            read=read,
            **inputs.flat(),
        ).read

    @torch.no_grad()
    def invert(
        self,
        first: Scores,
        tokens: torch.Tensor,
        known: torch.Tensor,
        shares: torch.Tensor,
        beside: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Uniforms that make the student itself write the completions (PTP paper, Algorithm 3).

        u_k lies in the interval of token k under the student's distribution given u_0..u_{k-1}: one forward per token,
        with one new slot for every completion at once.

        Args:
            first: [B, C], of the completions' first tokens, from `read`.
            tokens: [B, C, K] int64.
            known: [B, C, K] bool.
            shares: [B, C, K], where in the intervals.
            beside: What slots read beside their uniforms, by the names of `SlotInputs`.

        Returns:
            u [B, C, K] float32, and reached [B, C, K] bool, as `Completions.place`.
        """

        def placed(logits: torch.Tensor, own: torch.Tensor, share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return place(own, logits.double().softmax(-1), share)

        found, scores, count = [], first, tokens.shape[2]
        for step in range(count):
            found.append(scores.mapped(placed, tokens[..., step], shares[..., step]))
            if step < count - 1:
                scores = self._next(step, self.starts, slots=SlotInputs(found[-1][0][..., None], **beside))
        self.cache.crop(-(count - 1) * self.starts.shape[1])
        u, valid = (torch.stack(parts, dim=-1) for parts in zip(*found))
        return u, (valid & known).long().cumprod(-1).bool()

    @torch.no_grad()
    def most_likely(self, first: Scores, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, Scores]:
        """The backbone's own greedy completions, found token by token behind the cache.

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
        """Scores [B, C] behind one more slot, or token, of C completions; it stays in the cache."""
        outputs = self.model(
            input_ids=self.sequences.tokens[:, :0] if tokens is None else tokens,
            attention_mask=stepwise_mask(self.sequences.documents, starts, step),
            position_ids=at_columns(self.sequences.positions, starts) + step,
            past_key_values=self.cache,
            use_cache=True,
            read=_states_and_head,
            **({} if slots is None else slots.flat()),
        )
        states, head = outputs.read
        return Scores(states, head, head.weight.shape[0])

    def _layout(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        documents = self.sequences.documents
        positions = packed_positions(documents, self.starts, slots, self.offset, self.sequences.positions)
        return packed_mask(documents, self.starts, slots), positions

    def _behind(
        self,
        inputs: dict[str, torch.Tensor],
        mask: torch.Tensor,
        positions: torch.Tensor,
        keep: bool,
        read: Read | None,
    ) -> Any:
        """Logits [B, A, v] of slots behind the cache, which keeps them or not; or what `read` makes of them."""
        outputs = self.model(
            input_ids=self.sequences.tokens[:, :0],
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            read=read,
            **inputs,
        )
        if not keep:
            self.cache.crop(-positions.shape[1])
        return outputs.read if read else outputs.logits


def _states_and_head(hidden: torch.Tensor, head: nn.Module) -> tuple[torch.Tensor, nn.Module]:
    return hidden, head
