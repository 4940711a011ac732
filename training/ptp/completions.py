"""Completions: pieces of sequences that slots learn to predict, with the uniforms that pick their tokens.

Training draws starts and positions in intervals anew in every step. Evaluation takes points of a low-discrepancy
sequence that depend on nothing but a token's position in its sequence: the same loss every time, whatever the batches,
and no generator is advanced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...generation.tensors.sampling import interval
from ...generation.tensors.uniforms import beta_shares, uniform_between
from ...modeling.common.chunks import rows_per_chunk
from ...modeling.heads.losses import IGNORE
from ...modeling.ptp.inputs import token_positions
from .losses import target_probs

_GOLDEN = 0.6180339887498949
_SILVER = 0.7548776662466927  # the plastic number's inverse: a second sequence, independent of the first


def at_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Return `values[b, columns[b]]` for values [B, T, ...] and columns [B, ...]."""
    index = torch.arange(len(values), device=values.device).view(-1, *[1] * (columns.dim() - 1))
    return values[index, columns]


@dataclass(frozen=True)
class Scores:
    """Logits that are computed when they are used, in chunks, so that a large vocabulary never takes memory at once.

    `states` [B, ..., D] are the input of the head, or the logits themselves where there is no head; `size` is v.
    """

    states: Tensor
    head: nn.Module | None
    size: int

    @classmethod
    def of_logits(cls, logits: Tensor) -> Scores:
        """Return scores of logits that exist already."""
        return cls(logits, None, logits.shape[-1])

    def at(self, columns: Tensor) -> Scores:
        """Return the scores at columns [B, ...] of scores [B, T]."""
        return Scores(at_columns(self.states, columns), self.head, self.size)

    def __getitem__(self, index: slice | tuple[slice | Tensor, ...]) -> Scores:
        """Return the scores at an index that does not touch the last axis."""
        return Scores(self.states[index], self.head, self.size)

    def replaced(self, indices: Tensor, other: Scores) -> Scores:
        """Return a copy with other scores at indices [G] of axis 1; as logits, if the heads differ."""
        if self.head is other.head:
            return Scores(self.states.index_copy(1, indices, other.states), self.head, self.size)
        mine, others = (part.logits(part.states) for part in (self, other))
        return Scores.of_logits(mine.index_copy(1, indices, others.to(mine.dtype)))

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [..., v] of some states."""
        return states if self.head is None else self.head(states)

    @torch.no_grad()
    def mapped(self, function: Callable[..., tuple[Tensor, ...]], *values: Tensor) -> list[Tensor]:
        """Return the tensors [B, ...] of a function of logits [n, v] and of chunks [n] of values [B, ...]."""
        shape, size = self.states.shape[:-1], rows_per_chunk(self.size, self.states.device)
        chunks = zip(self.states.flatten(0, -2).split(size), *(each.flatten().split(size) for each in values))
        results = [function(self.logits(states), *parts) for states, *parts in chunks]
        return [torch.cat(parts).unflatten(0, shape) for parts in zip(*results)]


@dataclass(frozen=True)
class Sequences:
    """A batch of sequences.

    Attributes:
        tokens: [B, T] int64.
        documents: [B, T] int64, 0 for padding, else the number of the document that a token belongs to.
        scored: [B, T] bool, tokens that may be targets.
        position_ids: [B, T] int64; None: counted within their documents.
    """

    tokens: Tensor
    documents: Tensor
    scored: Tensor
    position_ids: Tensor | None = None

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> Sequences:
        """Read `input_ids` and, optionally, `attention_mask`, `labels` (-100: no target) and `position_ids`.

        A packed document begins where position ids do not grow by one, or where the number in the attention mask
        changes; it may begin at any position. Sequences of one token are padded: they have nothing to complete.
        """
        tokens = inputs["input_ids"]
        if (missing := 2 - tokens.shape[1]) > 0:
            inputs = {"attention_mask": torch.ones_like(tokens), **inputs}
            inputs = {name: nn.functional.pad(each, (0, missing)) for name, each in inputs.items()}
            tokens = inputs["input_ids"]
        documents = inputs.get("attention_mask")
        documents = torch.ones_like(tokens) if documents is None else documents.long()
        positions = inputs.get("position_ids")
        if positions is not None:
            positions = positions.expand_as(tokens)
            documents = _documents_of(positions, documents > 0)
        labels = inputs.get("labels")
        scored = documents > 0
        return cls(tokens, documents, scored if labels is None else scored & (labels != IGNORE), positions)

    @property
    def positions(self) -> Tensor:
        """Position ids of the tokens, [B, T] int64."""
        return token_positions(self.documents) if self.position_ids is None else self.position_ids.clamp(min=0)

    @property
    def startable(self) -> Tensor:
        """Columns that a completion may start at: a target with context in its document, [B, T] bool."""
        before = torch.nn.functional.pad(self.documents[:, :-1], (1, 0))
        return self.scored & (self.documents == before)


def _documents_of(positions: Tensor, real: Tensor) -> Tensor:
    """Return the numbers of documents [B, T], 0 for padding; they begin after padding, or where positions jump."""
    continues = (positions[:, 1:] == positions[:, :-1] + 1) & real[:, :-1]
    begins = torch.nn.functional.pad(~continues, (1, 0), value=True) & real
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
        scores: [B, C, K], from which the verified distribution of each token is computed, if a loss needs it.
    """

    starts: Tensor
    tokens: Tensor
    known: Tensor
    scored: Tensor
    low: Tensor
    high: Tensor
    scores: Scores | None = None

    def place(self, shares: Tensor) -> tuple[Tensor, Tensor]:
        """Return uniforms [B, C, K] float32 that pick the tokens, by positions in the intervals, and which are valid.

        None is valid from the first token on that does not exist or that no uniform picks: later uniforms would belong
        to another sequence.
        """
        u, valid = uniform_between(self.low, self.high, shares)
        return u, (valid & self.known).long().cumprod(-1).bool()


def draw_starts(startable: Tensor, count: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the startable columns with the largest keys [B, T], without repetition.

    Returns:
        starts [B, min(count, T)] int64, and exists, bool: False if a sequence has no further column to start at.
    """
    keys = keys.masked_fill(~startable, -1.0)
    values, starts = keys.topk(min(count, startable.shape[1]), dim=1)
    exists = values >= 0
    return torch.where(exists, starts, torch.ones_like(starts)), exists


def completion_tokens(
    sequences: Sequences, starts: Tensor, exists: Tensor, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tokens of sequences from starts [B, C] on: columns, tokens, known and scored [B, C, length]."""
    columns = starts[..., None] + torch.arange(length, device=starts.device)
    inside = columns < sequences.tokens.shape[1]
    columns = columns.clamp(max=sequences.tokens.shape[1] - 1)
    own = at_columns(sequences.documents, starts)[..., None]
    known = inside & exists[..., None] & (at_columns(sequences.documents, columns) == own)
    return columns, at_columns(sequences.tokens, columns), known, known & at_columns(sequences.scored, columns)


def token_intervals(scores: Scores, tokens: Tensor, read: Tensor, sampling: dict) -> tuple[Tensor, Tensor]:
    """Return the intervals of tokens [B, ...] under the verified distribution: low and high [B, ...] float64.

    They are computed where `read` [B, ...] bool, and 0 elsewhere. On an accelerator this waits once, for their number.
    """
    rows = read.nonzero(as_tuple=True)
    found = scores[rows].mapped(lambda logits, own: interval(own, target_probs(logits, **sampling)), tokens[rows])
    low, high = (torch.zeros_like(tokens, dtype=torch.float64).index_put(rows, edge) for edge in found)
    return low, high


def before_eos(tokens: Tensor, eos: list[int]) -> Tensor:
    """Return which tokens [..., K] of a draft come no later than the first end-of-text token, [..., K] bool."""
    ended = torch.isin(tokens, torch.tensor(eos, device=tokens.device, dtype=tokens.dtype)).long().cumsum(-1)
    return torch.nn.functional.pad(ended[..., :-1], (1, 0)) == 0


class RandomDraws:
    """Draws from torch's global generator; shares are Beta(b, b), with b the concentration."""

    def __init__(self, concentration: float) -> None:
        self.concentration = concentration

    def keys(self, documents: Tensor) -> Tensor:
        """Return sort keys of columns, [B, T] in [0, 1)."""
        return torch.rand(documents.shape, device=documents.device)

    def shares(self, starts: Tensor, length: int) -> Tensor:
        """Return positions in intervals, as shares of them, [B, C, length] float64."""
        return beta_shares(starts[..., None].expand(*starts.shape, length), self.concentration)

    def gaps(self, starts: Tensor, most: int) -> Tensor:
        """Return whole numbers in 1..most, [B, C]."""
        return torch.randint(1, most + 1, starts.shape, device=starts.device)


class FixedDraws:
    """Draws that depend on a token's position in its sequence alone; shares are uniform."""

    def __init__(self, documents: Tensor) -> None:
        self.order = (documents > 0).long().cumsum(1)

    def keys(self, documents: Tensor) -> Tensor:
        """See `RandomDraws`."""
        return (self.order.double() * _GOLDEN).frac()

    def shares(self, starts: Tensor, length: int) -> Tensor:
        """See `RandomDraws`."""
        steps = torch.arange(1, length + 1, device=starts.device)
        first = self.order.gather(1, starts).double()[..., None] * _GOLDEN
        return (first + steps * _SILVER).frac()

    def gaps(self, starts: Tensor, most: int) -> Tensor:
        """See `RandomDraws`."""
        return 1 + self.order.gather(1, starts) % most
