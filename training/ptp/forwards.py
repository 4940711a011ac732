"""The forwards of training: slots after the tokens of a batch in a `PTPForCausalLM`, and distributions of a teacher.

A teacher is the student's own backbone, any other causal language model with the same vocabulary, or any module whose
call with `input_ids`, `attention_mask` and `position_ids` returns an object with `logits`.

Training draws starts of completions and positions in intervals anew in every step. Evaluation takes points of a
low-discrepancy sequence that depend on nothing but a token's position in its sequence: the same loss every time,
whatever the batches, and no generator is advanced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache

from ...configuration.cache_names import CACHE, cache_of
from ...configuration.ptp import PTPConfig
from ...generation.tensors.masks import additive_mask
from ...generation.tensors.sampling import interval, pick
from ...generation.tensors.uniforms import beta_shares, uniform_between
from ...modeling.common.chunks import rows_per_chunk
from ...modeling.heads.losses import IGNORE
from ...modeling.ptp.inputs import packed_mask, packed_positions, stepwise_mask, token_mask, token_positions
from ..utils import eos_ids
from .losses import target_probs

_GOLDEN = 0.6180339887498949
_SILVER = 0.7548776662466927  # the plastic number's inverse: a second sequence, independent of the first


def at_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Return `values[b, columns[b]]` for values [B, T, ...] and columns [B, ...]."""
    index = torch.arange(len(values), device=values.device).view(-1, *[1] * (columns.dim() - 1))
    return values[index, columns]


@dataclass(frozen=True)
class Scores:
    """Logits that are computed when they are used, in chunks: a large vocabulary never takes memory at once.

    `states` [B, ..., D] are the input of the head, or the logits themselves where there is no head; `size` is v.
    """

    states: Tensor
    head: nn.Module | None
    size: int

    @classmethod
    def of_logits(cls, logits: Tensor) -> Scores:
        return cls(logits, None, logits.shape[-1])

    def at(self, columns: Tensor) -> Scores:
        return Scores(at_columns(self.states, columns), self.head, self.size)

    def __getitem__(self, index: slice | tuple[slice | Tensor, ...]) -> Scores:
        return Scores(self.states[index], self.head, self.size)

    def replaced(self, indices: Tensor, other: Scores) -> Scores:
        """Return a copy with other scores at indices [G] of axis 1; as logits, if the heads differ."""
        if self.head is other.head:
            return Scores(self.states.index_copy(1, indices, other.states), self.head, self.size)
        mine, others = (part.logits(part.states) for part in (self, other))
        return Scores.of_logits(mine.index_copy(1, indices, others.to(mine.dtype)))

    def logits(self, states: Tensor) -> Tensor:
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
            real = documents > 0
            continues = (positions[:, 1:] == positions[:, :-1] + 1) & real[:, :-1]
            begins = nn.functional.pad(~continues, (1, 0), value=True) & real
            documents = begins.long().cumsum(1) * real
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


@dataclass(frozen=True)
class Completions:
    """C completions of K tokens per sequence, and the intervals of uniforms that pick their tokens.

    Attributes:
        starts: [B, C] int64, columns.
        tokens: [B, C, K] int64.
        known: [B, C, K] bool, tokens that exist.
        scored: [B, C, K] bool, tokens that may be targets.
        low: [B, C, K] float64, and `high`, the interval of every token under the verified distribution, or nothing.
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
        """Return uniforms [B, C, K] float32 at these shares of the tokens' intervals, and which are valid.

        None is from the first token on that does not exist or that no uniform picks: later ones would belong to another
        sequence.
        """
        u, valid = uniform_between(self.low, self.high, shares)
        return u, (valid & self.known).long().cumprod(-1).bool()


def draw_starts(startable: Tensor, count: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the startable columns of the largest keys, [B, min(count, T)], and which of them exist, bool."""
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
    """Return low and high [B, ...] float64 of tokens in the verified distribution where `read`; 0 elsewhere."""
    rows = read.nonzero(as_tuple=True)
    found = scores[rows].mapped(lambda logits, own: interval(own, target_probs(logits, **sampling)), tokens[rows])
    low, high = (torch.zeros_like(tokens, dtype=torch.float64).index_put(rows, edge) for edge in found)
    return low, high


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
        return (self.order.double() * _GOLDEN).frac()

    def shares(self, starts: Tensor, length: int) -> Tensor:
        steps = torch.arange(1, length + 1, device=starts.device)
        first = self.order.gather(1, starts).double()[..., None] * _GOLDEN
        return (first + steps * _SILVER).frac()

    def gaps(self, starts: Tensor, most: int) -> Tensor:
        return 1 + self.order.gather(1, starts) % most


_T = TypeVar("_T")
Read = Callable[[Tensor, nn.Module], _T]
"""From last hidden states and the head to a result; see `PTPForCausalLM.forward`."""


@dataclass(frozen=True)
class SlotInputs:
    """The inputs of the slots of C completions: uniforms [B, C, L], or in their stead masks by position."""

    uniforms: Tensor
    are_masks: bool = False

    def flat(self) -> dict[str, Tensor]:
        """Return the arguments of `PTPForCausalLM.forward`, all slots in one sequence."""
        completions, slots = self.uniforms.shape[1:]
        if self.are_masks:
            return {"masks": torch.arange(slots, device=self.uniforms.device).repeat(completions)[None]}
        return {"uniforms": self.uniforms.flatten(1)}


class PackedBatch:
    """A batch in a `PTPForCausalLM`: its tokens are read once, then the slots of all completions in one forward.

    Completions start at columns [B, C]. One-hot slots have other positions than categorical ones.
    """

    def __init__(self, model: nn.Module, sequences: Sequences, starts: Tensor, is_one_hot: bool) -> None:
        self.model, self.sequences, self.starts = model, sequences, starts
        self.offset = -int(is_one_hot)
        self.cache: Cache | None = None

    @torch.no_grad()
    def read(self) -> Scores:
        """Return the backbone's own scores [B, T]; keys and values stay in a cache for the slots."""
        mask = token_mask(self.sequences.documents)
        return self._run(self.sequences.tokens, mask, self.sequences.positions, _scores)

    def slots(self, inputs: SlotInputs, read: Read[_T]) -> _T:
        """Return `read` of the slots' hidden states [B, C L, D] after the cached tokens, and of the head."""
        mask, positions = self._layout(inputs.uniforms.shape[2])
        length = self.sequences.tokens.shape[1]
        result = self._run(None, mask[:, :, length:], positions[:, length:], read, inputs)
        self.crop(positions.shape[1] - length)
        return result

    def everything(self, inputs: SlotInputs, read: Read[_T]) -> _T:
        """Return `read` of the hidden states [B, T + C L, D] of tokens and slots, for a backbone that learns too."""
        return self._run(self.sequences.tokens, *self._layout(inputs.uniforms.shape[2]), read, inputs, use_cache=False)

    def _run(
        self,
        tokens: Tensor | None,
        mask: Tensor,
        positions: Tensor,
        read: Read[_T],
        slots: SlotInputs | None = None,
        use_cache: bool = True,
    ) -> _T:
        """Return `read` of the hidden states of new tokens and slots; with a cache, they stay in it."""
        outputs = self.model(
            input_ids=self.sequences.tokens[:, :0] if tokens is None else tokens,
            attention_mask=mask,
            position_ids=positions,
            **{CACHE: self.cache if use_cache else None},
            use_cache=use_cache,
            read=read,
            **({} if slots is None else slots.flat()),
        )
        self.cache = cache_of(outputs) if use_cache else self.cache
        return outputs.read

    @torch.no_grad()
    def most_likely(self, first: Scores, starts: Tensor, length: int) -> tuple[Tensor, Scores]:
        """Return the backbone's greedy completions [B, C, K] and their scores, after `first` [B, C] of `read`."""
        scores, tokens = [first], []
        for step in range(length):
            tokens.append(scores[-1].mapped(lambda logits: (logits.argmax(-1),))[0])
            if step < length - 1:
                scores.append(self.following(step, starts, tokens=tokens[-1]))
        self.crop((length - 1) * starts.shape[1])
        stacked = torch.stack([part.states for part in scores], dim=2)
        return torch.stack(tokens, dim=-1), Scores(stacked, first.head, first.size)

    def following(
        self, step: int, starts: Tensor, slots: SlotInputs | None = None, tokens: Tensor | None = None
    ) -> Scores:
        """Return the scores [B, C] after one more slot, or token, of C completions; it stays in the cache."""
        mask = stepwise_mask(self.sequences.documents, starts, step)
        return self._run(tokens, mask, at_columns(self.sequences.positions, starts) + step, _scores, slots)

    def crop(self, count: int) -> None:
        assert self.cache is not None
        self.cache.crop(-count)

    def _layout(self, slots: int) -> tuple[Tensor, Tensor]:
        documents = self.sequences.documents
        positions = packed_positions(documents, self.starts, slots, self.offset, self.sequences.positions)
        return packed_mask(documents, self.starts, slots), positions


def _scores(hidden: Tensor, head: nn.Module) -> Scores:
    return Scores(hidden, head, head.get_parameter("weight").shape[0])


class Teacher:
    """Distributions of a model; `sampling`: `temperature`, `top_k` and `top_p` of those that decoding verifies."""

    def __init__(self, model: nn.Module, sampling: dict[str, Any]) -> None:
        self.model, self.sampling = model, sampling

    @torch.no_grad()
    def logits(self, tokens: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [B, Q, v] of tokens [B, Q] under a dense bool mask [B, 1, Q, Q]."""
        weight = next(self.model.parameters(), None)
        dtype = torch.float32 if weight is None else weight.dtype
        return self.model(
            input_ids=tokens, attention_mask=additive_mask(mask, dtype), position_ids=positions, use_cache=False
        ).logits

    def of_sequences(self, sequences: Sequences) -> Scores:
        documents = sequences.documents
        return Scores.of_logits(self.logits(sequences.tokens, token_mask(documents), sequences.positions))

    def pieces(self, sequences: Sequences, scores: Scores, starts: Tensor, exists: Tensor, length: int) -> Completions:
        """Return pieces of the sequences as completions, verified by the scores [B, T] of the sequences."""
        columns, tokens, known, scored = completion_tokens(sequences, starts, exists, length)
        read = torch.zeros_like(sequences.scored)  # a column of several completions is computed once
        read.scatter_(1, torch.where(known, columns, 0).flatten(1), True)  # column 0 has no context
        low, high = token_intervals(scores[:, :-1], sequences.tokens[:, 1:], read[:, 1:], self.sampling)
        low, high = (at_columns(edge, columns - 1) for edge in (low, high))
        return Completions(starts, tokens, known, scored, low, high, scores.at(columns - 1))

    def drafts(self, sequences: Sequences, starts: Tensor, exists: Tensor, tokens: Tensor) -> Completions:
        """Return completions of tokens [B, C, K], verified in one forward with all of them packed."""
        scores = self._of_completions(sequences, starts, tokens)
        known = exists[..., None] & self.belong(tokens)
        low, high = token_intervals(scores, tokens, known, self.sampling)
        return Completions(starts, tokens, known, known, low, high, scores)

    def belong(self, tokens: Tensor) -> Tensor:
        """Return which tokens [..., K] of completions come no later than their end, [..., K] bool."""
        ends = torch.tensor(eos_ids(self.model), device=tokens.device, dtype=tokens.dtype)
        ended = torch.isin(tokens, ends).long().cumsum(-1)
        return nn.functional.pad(ended[..., :-1], (1, 0)) == 0

    def _of_completions(self, sequences: Sequences, starts: Tensor, tokens: Tensor) -> Scores:
        """Return the scores [B, C, K] of completions [B, C, K]."""
        documents, length = sequences.documents, sequences.tokens.shape[1]
        mask = packed_mask(documents, starts, tokens.shape[2])
        positions = packed_positions(documents, starts, tokens.shape[2], 0, sequences.positions)
        logits = self.logits(torch.cat([sequences.tokens, tokens.flatten(1)], dim=1), mask, positions)
        own = logits[:, length:].unflatten(1, tokens.shape[1:])
        return Scores.of_logits(torch.cat([at_columns(logits, starts - 1)[:, :, None], own[:, :, :-1]], dim=2))

    def most_likely(self, sequences: Sequences, starts: Tensor, length: int) -> tuple[Tensor, Scores]:
        """Return greedy completions [B, C, K] and their scores, a forward per token; `PackedBatch` has a cache."""
        tokens = torch.zeros(*starts.shape, length, dtype=torch.long, device=starts.device)
        scores = self._of_completions(sequences, starts, tokens)
        for step in range(length):
            scores = scores if step == 0 else self._of_completions(sequences, starts, tokens)
            tokens[..., step] = scores.states[:, :, step].argmax(-1)
        return tokens, scores


@torch.no_grad()
def student_drafts(packed: PackedBatch, scores: Scores, config: PTPConfig, inputs: SlotInputs) -> Tensor:
    """Return the completions [B, C, L] that the student writes from noise [B, C, L + 1], after `packed.read()`.

    Categorical slots write L tokens after the backbone's own, whose uniform is the first.
    """
    uniforms = inputs.uniforms
    flat = packed.slots(replace(inputs, uniforms=uniforms[..., :-1]), _scores)
    drafted = Scores(flat.states.unflatten(1, (uniforms.shape[1], -1)), flat.head, flat.size)
    if config.predicts_tokens:
        return drafted.mapped(lambda logits: (logits.argmax(-1),))[0]

    def picked(logits: Tensor, u: Tensor) -> tuple[Tensor]:
        return (pick(u, logits.double().softmax(-1)),)

    if config.variant == "one_hot":
        return drafted.mapped(picked, uniforms[..., :-1])[0]
    first = scores.at(packed.starts - 1)
    own = first.mapped(lambda logits, u: (pick(u, target_probs(logits, **config.sampling or {})),), uniforms[..., 0])[0]
    return torch.cat([own[..., None], drafted.mapped(picked, uniforms[..., 1:])[0]], dim=-1)
