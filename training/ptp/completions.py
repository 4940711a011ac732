"""Completions: pieces of sequences that slots learn to predict, with the uniforms that pick them. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...modeling.heads.losses import IGNORE
from ...modeling.ptp.inputs import token_positions
from ...modeling.sampling import interval
from ...modeling.uniforms import place_between
from .columns import at_columns
from .losses import target_probs
from .scores import Scores


@dataclass(frozen=True)
class Sequences:
    """A batch of sequences.

    Attributes:
        tokens: [B, T] int64.
        documents: [B, T] int64, 0 for padding, else the number of the document that a token belongs to.
        scored: [B, T] bool, tokens that may be targets.
        given: [B, T] int64, their positions; None: their places in their documents.
    """

    tokens: torch.Tensor
    documents: torch.Tensor
    scored: torch.Tensor
    given: torch.Tensor | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, torch.Tensor]) -> Sequences:
        """Reads `input_ids`, and where given `attention_mask`, `labels` (-100: no target) and `position_ids`.

        Packed documents are told apart by position ids that do not go on by one, or by numbers in the attention mask;
        a document may begin at any position.

        Raises:
            ValueError: Sequences of one token, which have nothing to complete.
        """
        tokens = inputs["input_ids"]
        if tokens.shape[1] < 2:
            raise ValueError(f"input_ids has {tokens.shape[1]} column; completions need a context and a target, so 2")
        documents = inputs.get("attention_mask")
        documents = torch.ones_like(tokens) if documents is None else documents.long()
        given = inputs.get("position_ids")
        if given is not None:
            given = given.expand_as(tokens)
            documents = _documents_of(given, documents > 0)
        labels = inputs.get("labels")
        scored = documents > 0
        return cls(tokens, documents, scored if labels is None else scored & (labels != IGNORE), given)

    @property
    def positions(self) -> torch.Tensor:
        """Of every token, [B, T] int64."""
        return token_positions(self.documents) if self.given is None else self.given.clamp(min=0)

    @property
    def startable(self) -> torch.Tensor:
        """Columns that a completion may start at: a target with context in its document, [B, T] bool."""
        before = torch.nn.functional.pad(self.documents[:, :-1], (1, 0))
        return self.scored & (self.documents == before)


def _documents_of(positions: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Numbers of documents [B, T], 0 for padding: one begins where positions do not go on by one, or behind padding."""
    goes_on = (positions[:, 1:] == positions[:, :-1] + 1) & real[:, :-1]
    begins = torch.nn.functional.pad(~goes_on, (1, 0), value=True) & real
    return begins.long().cumsum(1) * real


@dataclass(frozen=True)
class Completions:
    """C completions of K tokens per sequence, and the intervals of uniforms that pick their tokens.

    Attributes:
        starts: [B, C] int64, columns.
        tokens: [B, C, K] int64.
        known: [B, C, K] bool, tokens that exist.
        scored: [B, C, K] bool, tokens that may be targets.
        low: [B, C, K] float64, and
        high: the same, the interval of every token under the verified distribution; empty where the distribution
            excludes it.
        scores: [B, C, K], what the verified distribution of each token is made of, where a loss needs it.
    """

    starts: torch.Tensor
    tokens: torch.Tensor
    known: torch.Tensor
    scored: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    scores: Scores | None = None

    def place(self, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Uniforms that pick the tokens, and how far they reach.

        Args:
            shares: [B, C, K], where in the intervals.

        Returns:
            u [B, C, K] float32, and reached [B, C, K] bool: False from the first token on that does not exist or that
            no uniform picks, because uniforms behind it would belong to another text.
        """
        u, valid = place_between(self.low, self.high, shares)
        return u, (valid & self.known).long().cumprod(-1).bool()


def draw_starts(startable: torch.Tensor, count: int, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Starts with the largest keys, without repetition.

    Args:
        startable: [B, T] bool, columns to choose from.
        count: C.
        keys: [B, T] in [0, 1).

    Returns:
        starts [B, min(C, T)] int64, and exists, bool: False where a sequence has no further column to start at.
    """
    keys = keys.masked_fill(~startable, -1.0)
    values, starts = keys.topk(min(count, startable.shape[1]), dim=1)
    exists = values >= 0
    return torch.where(exists, starts, torch.ones_like(starts)), exists


def completion_tokens(
    sequences: Sequences, starts: torch.Tensor, exists: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pieces of sequences from `starts` on.

    Args:
        sequences: The batch.
        starts: [B, C] int64.
        exists: [B, C] bool.
        length: K.

    Returns:
        columns, tokens [B, C, K] int64, known and scored [B, C, K] bool.
    """
    columns = starts[..., None] + torch.arange(length, device=starts.device)
    inside = columns < sequences.tokens.shape[1]
    columns = columns.clamp(max=sequences.tokens.shape[1] - 1)
    own = at_columns(sequences.documents, starts)[..., None]
    known = inside & exists[..., None] & (at_columns(sequences.documents, columns) == own)
    return columns, at_columns(sequences.tokens, columns), known, known & at_columns(sequences.scored, columns)


def token_intervals(scores: Scores, tokens: torch.Tensor, sampling: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Intervals of tokens under the verified distribution.

    Args:
        scores: [B, ...], what predicts each token.
        tokens: [B, ...] int64.
        sampling: Arguments of `target_probs`.

    Returns:
        low and high, [B, ...] float64.
    """
    low, high = scores.mapped(lambda logits, own: interval(own, target_probs(logits, **sampling)), tokens)
    return low, high


def before_eos(tokens: torch.Tensor, eos: list[int]) -> torch.Tensor:
    """Which tokens [..., K] of a drafted text belong to it: those up to the first end-of-text token, with it."""
    ended = torch.isin(tokens, torch.tensor(eos, device=tokens.device, dtype=tokens.dtype)).long().cumsum(-1)
    return torch.nn.functional.pad(ended[..., :-1], (1, 0)) == 0
