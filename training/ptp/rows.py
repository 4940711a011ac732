"""Sequences with completions behind them, in the rows of a `PTPForCausalLM`: the forwards that training needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...modeling.ptp.features import beta_shares, place
from ...modeling.ptp.masks import packed_mask, packed_positions, stepwise_mask, token_mask, token_positions
from .completions import Sequences, at_columns


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
    def read(self) -> torch.Tensor:
        """The backbone's own logits [B, T, v]; keys and values stay in a cache for the slots."""
        outputs = self.model(
            input_ids=self.sequences.tokens,
            attention_mask=token_mask(self.sequences.documents),
            position_ids=token_positions(self.sequences.documents),
            use_cache=True,
        )
        self.cache = outputs.past_key_values
        return outputs.logits

    def slots(self, uniforms: torch.Tensor) -> torch.Tensor:
        """Logits [B, C, L, v] of slots with uniforms [B, C, L], behind what `read` left in the cache."""
        mask, positions = self._layout(uniforms.shape[2])
        length = self.sequences.tokens.shape[1]
        return self._behind(uniforms.flatten(1), mask[:, :, length:], positions[:, length:], keep=False).unflatten(
            1, uniforms.shape[1:]
        )

    def everything(self, uniforms: torch.Tensor, with_tokens: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Tokens and slots in one forward without a cache, for a backbone that learns too.

        Args:
            uniforms: [B, C, L].
            with_tokens: Whether the tokens' logits are wanted.

        Returns:
            Logits of the tokens [B, T, v], or None, and of the slots [B, C, L, v].
        """
        mask, positions = self._layout(uniforms.shape[2])
        flat = uniforms.flatten(1)
        logits = self.model(
            input_ids=self.sequences.tokens,
            uniforms=flat,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=0 if with_tokens else flat.shape[1],
        ).logits
        slots = logits[:, -flat.shape[1] :].unflatten(1, uniforms.shape[1:])
        return logits[:, : -flat.shape[1]] if with_tokens else None, slots

    @torch.no_grad()
    def invert(
        self, first: torch.Tensor, tokens: torch.Tensor, known: torch.Tensor, concentration: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Uniforms that make the student itself write the completions (PTP paper, Algorithm 3).

        u_k lies in the interval of token k under the student's law given u_0..u_{k-1}: one forward per token, with one
        new slot for every completion at once.

        Args:
            first: [B, C, v] logits of the completions' first tokens, from `read`.
            tokens: [B, C, K] int64.
            known: [B, C, K] bool.
            concentration: b of the shares z ~ Beta(b, b).

        Returns:
            u [B, C, K] float32, and reached [B, C, K] bool, as `Completions.place`.
        """
        begun = at_columns(token_positions(self.sequences.documents), self.starts)
        found, logits, count = [], first, tokens.shape[2]
        for step in range(count):
            shares = beta_shares(tokens[..., step], concentration)
            found.append(place(tokens[..., step], logits.double().softmax(-1), shares))
            if step < count - 1:
                mask = stepwise_mask(self.sequences.documents, self.starts, step)
                logits = self._behind(found[-1][0], mask, begun + step, keep=True)
        self.cache.crop(-(count - 1) * self.starts.shape[1])
        u, valid = (torch.stack(parts, dim=-1) for parts in zip(*found))
        return u, (valid & known).long().cumprod(-1).bool()

    def _layout(self, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        documents = self.sequences.documents
        return packed_mask(documents, self.starts, slots), packed_positions(documents, self.starts, slots, self.offset)

    def _behind(self, uniforms: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, keep: bool) -> torch.Tensor:
        """Logits [B, A, v] of slots behind the cache, which keeps them or not."""
        outputs = self.model(
            input_ids=self.sequences.tokens[:, :0],
            uniforms=uniforms,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        if not keep:
            self.cache.crop(-uniforms.shape[1])
        return outputs.logits
