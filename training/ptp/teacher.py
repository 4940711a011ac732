"""The teacher of parallel token prediction: the distribution of every token of completions, and texts to complete.

A teacher is the student's own backbone, any other causal language model with the same vocabulary, or any module whose
call with `input_ids`, `attention_mask` and `position_ids` gives an object with `logits`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...configuration.ptp import PTPConfig
from ...modeling.ptp.inputs import additive_mask, packed_mask, packed_positions, token_mask
from ...modeling.sampling import pick
from .columns import at_columns
from .completions import Completions, Sequences, before_eos, completion_tokens, draw_starts, token_intervals
from .losses import target_probs
from .rows import PackedRows, SlotInputs
from .scores import Scores


class Teacher:
    """Distributions from a model.

    Args:
        model: The teacher.
        sampling: `temperature`, `top_k` and `top_p` of the distribution that decoding verifies.
    """

    def __init__(self, model: nn.Module, sampling: dict[str, Any]) -> None:
        self.model, self.sampling = model, sampling

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [B, Q, v] of tokens [B, Q] under a dense bool mask [B, 1, Q, Q]."""
        weight = next(self.model.parameters(), None)
        dtype = torch.float32 if weight is None else weight.dtype
        return self.model(
            input_ids=tokens, attention_mask=additive_mask(mask, dtype), position_ids=positions, use_cache=False
        ).logits

    def of_sequences(self, sequences: Sequences) -> Scores:
        """Scores [B, T] of a batch."""
        documents = sequences.documents
        return Scores.of_logits(self.logits(sequences.tokens, token_mask(documents), sequences.positions))

    def pieces(
        self, sequences: Sequences, scores: Scores, starts: torch.Tensor, exists: torch.Tensor, length: int
    ) -> Completions:
        """Pieces of the sequences as completions, verified by the scores [B, T] of the sequences."""
        columns, tokens, known, scored = completion_tokens(sequences, starts, exists, length)
        low, high = token_intervals(scores[:, :-1], sequences.tokens[:, 1:], self.sampling)
        low, high = (at_columns(edge, columns - 1) for edge in (low, high))
        return Completions(starts, tokens, known, scored, low, high, scores.at(columns - 1))

    def drafts(
        self, sequences: Sequences, starts: torch.Tensor, exists: torch.Tensor, tokens: torch.Tensor
    ) -> Completions:
        """Completions [B, C, K] that somebody else wrote, verified in one forward with all of them packed."""
        scores = self._of_completions(sequences, starts, tokens)
        low, high = token_intervals(scores, tokens, self.sampling)
        known = exists[..., None] & self.belong(tokens)
        return Completions(starts, tokens, known, known, low, high, scores)

    def belong(self, tokens: torch.Tensor) -> torch.Tensor:
        """Which tokens [..., K] of completions stand before their end, [..., K] bool."""
        return before_eos(tokens, eos_ids(self.model))

    def _of_completions(self, sequences: Sequences, starts: torch.Tensor, tokens: torch.Tensor) -> Scores:
        """Scores [B, C, K] of completions [B, C, K]."""
        documents, length = sequences.documents, sequences.tokens.shape[1]
        mask = packed_mask(documents, starts, tokens.shape[2])
        positions = packed_positions(documents, starts, tokens.shape[2], 0, sequences.positions)
        logits = self.logits(torch.cat([sequences.tokens, tokens.flatten(1)], dim=1), mask, positions)
        own = logits[:, length:].unflatten(1, tokens.shape[1:])
        return Scores.of_logits(torch.cat([at_columns(logits, starts - 1)[:, :, None], own[:, :, :-1]], dim=2))

    def most_likely(self, sequences: Sequences, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, Scores]:
        """Greedy completions [B, C, K] and their scores, a forward per token; `PackedRows` has a cache."""
        tokens = torch.zeros(*starts.shape, length, dtype=torch.long, device=starts.device)
        for step in range(length):
            scores = self._of_completions(sequences, starts, tokens)
            tokens[..., step] = scores.states[:, :, step].argmax(-1)
        return tokens, scores

    @torch.no_grad()
    def continued(self, sequences: Sequences, length: int) -> Sequences:
        """The teacher's own texts: it continues a random beginning of every sequence.

        Args:
            sequences: The batch; sequences without a column to start at are all padding in the result.
            length: Tokens to write, at least.

        Raises:
            TypeError: A teacher that cannot generate.
        """
        if not hasattr(self.model, "generate"):
            raise TypeError(f"sequences='teacher' needs a teacher with generate(), not {type(self.model).__name__}")
        keys = torch.rand(sequences.tokens.shape, device=sequences.tokens.device)
        starts, exists = draw_starts(sequences.startable, 1, keys)
        width = int(starts.max())
        columns = starts - width + torch.arange(width, device=starts.device)
        own = at_columns(sequences.documents, starts)
        columns, real = columns.clamp(min=0), (columns >= 0) & exists
        real = real & (at_columns(sequences.documents, columns) == own)
        prompt = at_columns(sequences.tokens, columns).masked_fill(~real, 0)
        # where a sequence has no beginning, its padding is continued; the masks below leave that text out
        text = self.model.generate(
            prompt,
            attention_mask=(real | ~exists).long(),
            generation_config=verified_sampling(self.model, self.sampling, length),
        )
        written = before_eos(text[:, width:], eos_ids(self.model)) & exists
        documents = torch.cat([real, written], dim=1).long()
        scored = torch.cat([torch.zeros_like(real), written], dim=1)
        return Sequences(text, documents, scored)


def verified_sampling(model: Any, sampling: dict[str, Any], length: int) -> GenerationConfig:
    """How a model writes `length` tokens of the distribution that decoding verifies, one at a time."""
    eos = eos_ids(model)
    return GenerationConfig(
        do_sample=True,
        use_mtp=False,
        max_new_tokens=length,
        eos_token_id=eos or None,
        pad_token_id=(eos or [0])[0],
        **sampling,
    )


def eos_ids(model: Any) -> list[int]:
    """Ids that end a text, by a model's generation config; none if it has none."""
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


@torch.no_grad()
def student_drafts(rows: PackedRows, scores: Scores, config: PTPConfig, inputs: SlotInputs) -> torch.Tensor:
    """Completions that the student writes from uniform noise, in one forward.

    Args:
        rows: The batch, read.
        scores: [B, T] of its tokens.
        config: The student's. One-hot slots write L tokens; categorical ones L, behind the backbone's own.
        inputs: Of the slots; the uniforms [B, C, L + 1] have one for the backbone's own token, in front.

    Returns:
        [B, C, L] int64 (L + 1 for categorical slots).
    """
    is_one_hot, uniforms = config.variant == "one_hot", inputs.uniforms
    behind = Scores.of_logits(rows.slots(replace(inputs, uniforms=uniforms[..., :-1])))
    if config.predicts_tokens:
        return behind.states.argmax(-1)

    def picked(logits: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor]:
        return (pick(u, logits.double().softmax(-1)),)

    if is_one_hot:
        return behind.mapped(picked, uniforms[..., :-1])[0]
    first = scores.at(rows.starts - 1)
    own = first.mapped(lambda logits, u: (pick(u, target_probs(logits, **config.sampling)),), uniforms[..., 0])[0]
    return torch.cat([own[..., None], behind.mapped(picked, uniforms[..., 1:])[0]], dim=-1)
