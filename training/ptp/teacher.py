"""The teacher of parallel token prediction: the law of every token of completions, and texts to complete.

A teacher is the student's own backbone, any other causal language model with the same vocabulary, or any module whose
call with `input_ids`, `attention_mask` and `position_ids` gives an object with `logits`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...configuration.ptp import PTPConfig
from ...modeling.ptp.masks import additive_mask, packed_mask, packed_positions, token_mask, token_positions
from ...modeling.sampling import pick
from .completions import (
    Completions,
    Sequences,
    at_columns,
    before_eos,
    completion_tokens,
    draw_starts,
    token_intervals,
)
from .losses import target_law
from .rows import PackedRows


class Teacher:
    """Laws from a model.

    Args:
        model: The teacher.
        sampling: `temperature`, `top_k` and `top_p` of the law that decoding verifies.
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

    def of_sequences(self, sequences: Sequences) -> torch.Tensor:
        """Logits [B, T, v] of a batch."""
        documents = sequences.documents
        return self.logits(sequences.tokens, token_mask(documents), token_positions(documents))

    def pieces(
        self,
        sequences: Sequences,
        logits: torch.Tensor,
        starts: torch.Tensor,
        exists: torch.Tensor,
        length: int,
        with_law: bool,
    ) -> Completions:
        """Pieces of the sequences as completions, judged by the logits [B, T, v] of the sequences."""
        columns, tokens, known, scored = completion_tokens(sequences, starts, exists, length)
        low, high = token_intervals(logits[:, :-1], sequences.tokens[:, 1:], self.sampling)
        low, high = (at_columns(edge, columns - 1) for edge in (low, high))
        law = target_law(at_columns(logits, columns - 1), **self.sampling) if with_law else None
        return Completions(starts, tokens, known, scored, low, high, law)

    def drafts(
        self, sequences: Sequences, starts: torch.Tensor, exists: torch.Tensor, tokens: torch.Tensor, with_law: bool
    ) -> Completions:
        """Completions [B, C, K] that somebody else wrote, judged in one forward with all of them packed."""
        documents, length = sequences.documents, sequences.tokens.shape[1]
        mask = packed_mask(documents, starts, tokens.shape[2])
        positions = packed_positions(documents, starts, tokens.shape[2], offset=0)
        logits = self.logits(torch.cat([sequences.tokens, tokens.flatten(1)], dim=1), mask, positions)
        own = logits[:, length:].unflatten(1, tokens.shape[1:])
        logits = torch.cat([at_columns(logits, starts - 1)[:, :, None], own[:, :, :-1]], dim=2)
        low, high = token_intervals(logits, tokens, self.sampling)
        known = exists[..., None] & before_eos(tokens, eos_ids(self.model))
        law = target_law(logits, **self.sampling) if with_law else None
        return Completions(starts, tokens, known, known, low, high, law)

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
        starts, exists = draw_starts(sequences.startable, 1)
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
    """How a model writes `length` tokens of the law that decoding verifies, one at a time."""
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
def student_drafts(rows: PackedRows, logits: torch.Tensor, config: PTPConfig) -> torch.Tensor:
    """Completions that the student writes from uniform noise, in one forward.

    Args:
        rows: The batch, read.
        logits: [B, T, v] of its tokens.
        config: The student's. One-hot slots write L tokens; categorical ones L, behind the backbone's own.

    Returns:
        [B, C, L] int64 (L + 1 for categorical slots).
    """
    slots = config.num_slots
    uniforms = torch.rand(*rows.starts.shape, slots + 1, device=logits.device)
    behind = rows.slots(uniforms[..., :slots])
    if config.predicts_tokens:
        return behind.argmax(-1)
    if config.variant == "one_hot":
        return pick(uniforms[..., :slots], behind.double().softmax(-1))
    own = pick(uniforms[..., 0], target_law(at_columns(logits, rows.starts - 1), **config.sampling))
    return torch.cat([own[..., None], pick(uniforms[..., 1:], behind.double().softmax(-1))], dim=-1)
