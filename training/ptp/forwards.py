"""The forwards of training: slots after the tokens of a batch in a `PTPForCausalLM`, and distributions of a teacher.

A teacher is the student's own backbone, any other causal language model with the same vocabulary, or any module whose
call with `input_ids`, `attention_mask` and `position_ids` returns an object with `logits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache

from ...configuration.cache_names import CACHE, cache_of
from ...configuration.ptp import PTPConfig
from ...generation.tensors.masks import additive_mask
from ...generation.tensors.sampling import interval, pick
from ...modeling import PTPForCausalLM
from ...modeling.common.chunks import rows_per_chunk
from ...modeling.heads.losses import IGNORE
from ...modeling.ptp.inputs import packed_mask, packed_positions, stepwise_mask, token_mask, token_positions
from ..utils import eos_ids
from .losses import target_probs

_GOLDEN = 0.6180339887498949
_SILVER = 0.7548776662466927  # the plastic number's inverse: a second sequence, independent of the first
_LAST = 1 - 2**-24  # the last float32 below 1
_T = TypeVar("_T")
Read = Callable[[Tensor, nn.Module], _T]
"""From last hidden states and the head to a result; see `PTPForCausalLM.forward`."""


def uniform_between(low: Tensor, high: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return u [...] float32 in [low, high) float64, at the share z in [0, 1], and which intervals hold a float32."""
    first, last = low.float(), high.float()
    # rounding to float32 may have left the interval, on either side
    first = torch.where(first.double() < low, torch.nextafter(first, torch.ones_like(first)), first)
    last = torch.where(last.double() >= high, torch.nextafter(last, torch.zeros_like(last)), last)
    u = (low + (high - low) * z.double()).float()
    inside = torch.minimum(torch.maximum(u, first), last)
    return inside.clamp(0, _LAST), (low < high) & (first <= last)


def at_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Return `values[b, columns[b]]` for values [B, T, ...] and columns [B, ...]."""
    index = torch.arange(len(values), device=values.device).view(-1, *[1] * (columns.dim() - 1))
    return values[index, columns]


@dataclass(frozen=True)
class Scores:
    """Logits [B, ..., v = `size`] that are computed when they are used, in chunks, from the input of the head.

    Without a head, `states` [B, ..., D] are the logits themselves.
    """

    states: Tensor
    head: nn.Module | None
    size: int

    def at(self, columns: Tensor) -> Scores:
        return Scores(at_columns(self.states, columns), self.head, self.size)

    def __getitem__(self, index: tuple[slice | int | Tensor, ...]) -> Scores:
        return Scores(self.states[index], self.head, self.size)

    def replaced(self, indices: Tensor, other: Scores) -> Scores:
        """Return a copy with other scores of the same model at indices [G] of axis 1."""
        return Scores(self.states.index_copy(1, indices, other.states), self.head, self.size)

    def logits(self, states: Tensor) -> Tensor:
        return states if self.head is None else self.head(states)

    @torch.no_grad()
    def mapped(self, function: Callable[..., tuple[Tensor, ...]], *values: Tensor) -> list[Tensor]:
        """Return the tensors [B, ...] of a function of logits [n, v] and of chunks [n] of values [B, ...]."""
        shape, size = self.states.shape[:-1], rows_per_chunk(self.size, self.states.device)
        chunks = zip(self.states.flatten(0, -2).split(size), *(each.flatten().split(size) for each in values))
        results = [function(self.logits(states), *parts) for states, *parts in chunks]
        return [torch.cat(parts).unflatten(0, shape) for parts in zip(*results)]

    def likeliest(self) -> Tensor:
        return self.mapped(lambda logits: (logits.argmax(-1),))[0]


@dataclass(frozen=True)
class Sequences:
    """A batch of sequences: `tokens` [B, T], and their position ids.

    Attributes:
        documents: [B, T] int64, 0 for padding, else the number of the document that a token belongs to.
        scored: [B, T] bool, tokens that may be targets.
    """

    tokens: Tensor
    documents: Tensor
    scored: Tensor
    positions: Tensor

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> Sequences:
        """Read `input_ids` and, optionally, `attention_mask`, `labels` (-100: no target) and `position_ids`.

        A document begins where position ids do not grow by one, or the number in the attention mask changes.
        """
        tokens = inputs["input_ids"]
        if (missing := 2 - tokens.shape[1]) > 0:  # sequences of one token have nothing to complete
            inputs = {"attention_mask": torch.ones_like(tokens), **inputs}
            inputs = {name: nn.functional.pad(each, (0, missing)) for name, each in inputs.items()}
            tokens = inputs["input_ids"]
        documents, positions, labels = map(inputs.get, ("attention_mask", "position_ids", "labels"))
        documents = torch.ones_like(tokens) if documents is None else documents.long()
        if positions is None:
            positions = token_positions(documents)
        else:
            positions, real = positions.expand_as(tokens), documents > 0
            continues = (positions[:, 1:] == positions[:, :-1] + 1) & real[:, :-1]
            documents = (nn.functional.pad(~continues, (1, 0), value=True) & real).long().cumsum(1) * real
        scored = documents > 0
        return cls(tokens, documents, scored if labels is None else scored & (labels != IGNORE), positions.clamp(min=0))

    @property
    def startable(self) -> Tensor:
        """Columns that a completion may start at: a target with context in its document, [B, T] bool."""
        before = nn.functional.pad(self.documents[:, :-1], (1, 0))
        return self.scored & (self.documents == before)


@dataclass(frozen=True)
class Completions:
    """C completions per sequence, from columns `starts` [B, C] on: `tokens` [B, C, K], and `uniforms` that pick them.

    Attributes:
        scored: [B, C, K] bool, tokens that may be targets.
        reached: [B, C, K] bool, tokens that uniforms determine: none from the first one on that does not exist or that
            no uniform picks, as later ones would belong to another sequence.
        scores: [B, C, K], of the verified distribution of each token, if a loss needs it.
    """

    starts: Tensor
    tokens: Tensor
    scored: Tensor
    uniforms: Tensor
    reached: Tensor
    scores: Scores | None = None


def unbroken(valid: Tensor) -> Tensor:
    """Return which of [..., K] come before the first one that is not valid."""
    return valid.long().cumprod(-1).bool()


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
    """Draws from torch's global generator; shares are Beta(b, b), with b the concentration: 1 is uniform."""

    def __init__(self, concentration: float) -> None:
        self.concentration = concentration

    def keys(self, documents: Tensor) -> Tensor:
        """Return sort keys of columns, [B, T] in [0, 1)."""
        return torch.rand(documents.shape, device=documents.device)

    def shares(self, starts: Tensor, length: int) -> Tensor:
        """Return positions in intervals, as shares of them, [B, C, length] float64."""
        shape = *starts.shape, length
        if self.concentration == 1:
            return torch.rand(shape, device=starts.device, dtype=torch.float64)
        concentration = torch.full(shape, self.concentration, dtype=torch.float64, device=starts.device)
        one, other = (torch._standard_gamma(concentration) for _ in range(2))
        return (one / (one + other)).nan_to_num(nan=0.5)


class FixedDraws:
    """For evaluation, points of low-discrepancy sequences by a token's position alone, whatever the batches."""

    def __init__(self, documents: Tensor) -> None:
        self.order = (documents > 0).long().cumsum(1)

    def keys(self, documents: Tensor) -> Tensor:
        return (self.order.double() * _GOLDEN).frac()

    def shares(self, starts: Tensor, length: int) -> Tensor:
        steps = torch.arange(1, length + 1, device=starts.device)
        first = self.order.gather(1, starts).double()[..., None] * _GOLDEN
        return (first + steps * _SILVER).frac()


class PackedBatch:
    """A batch in a `PTPForCausalLM`: its tokens are read once, then the slots of all completions in one forward.

    Completions start at columns `starts` [B, C]; their slots have uniforms [B, C, L], which masks do not read.
    """

    def __init__(self, model: nn.Module, sequences: Sequences, starts: Tensor, config: PTPConfig) -> None:
        self.model, self.sequences, self.starts, self.config = model, sequences, starts, config
        self.offset = -int(config.is_one_hot)
        self.cache: Cache | None = None

    @torch.no_grad()
    def read(self) -> Scores:
        """Return the backbone's own scores [B, T]; keys and values stay in a cache for the slots."""
        mask = token_mask(self.sequences.documents)
        return self._run(self.sequences.tokens, mask, self.sequences.positions, _scores)

    def slots(self, uniforms: Tensor, read: Read[_T]) -> _T:
        """Return `read` of the slots' hidden states [B, C L, D] after the cached tokens, and of the head."""
        mask, positions = self._layout(uniforms.shape[2])
        length = self.sequences.tokens.shape[1]
        result = self._run(None, mask[:, :, length:], positions[:, length:], read, uniforms)
        self.crop(positions.shape[1] - length)
        return result

    def everything(self, uniforms: Tensor, read: Read[_T]) -> _T:
        """Return `read` of the hidden states [B, T + C L, D] of tokens and slots, for a backbone that learns too."""
        return self._run(self.sequences.tokens, *self._layout(uniforms.shape[2]), read, uniforms, use_cache=False)

    def _run(
        self,
        tokens: Tensor | None,
        mask: Tensor,
        positions: Tensor,
        read: Read[_T],
        uniforms: Tensor | None = None,
        use_cache: bool = True,
    ) -> _T:
        slots: dict[str, Tensor] = {}
        if uniforms is not None and self.config.reads_uniforms:
            slots["uniforms"] = uniforms.flatten(1)
        elif uniforms is not None:
            slots["masks"] = torch.arange(uniforms.shape[2], device=uniforms.device).repeat(uniforms.shape[1])[None]
        outputs = self.model(
            input_ids=self.sequences.tokens[:, :0] if tokens is None else tokens,
            attention_mask=mask,
            position_ids=positions,
            **{CACHE: self.cache if use_cache else None},
            use_cache=use_cache,
            read=read,
            **slots,
        )
        self.cache = cache_of(outputs) if use_cache else self.cache
        return outputs.read

    @torch.no_grad()
    def most_likely(self, first: Scores, starts: Tensor, length: int) -> tuple[Tensor, Scores]:
        """Return the backbone's greedy completions [B, C, K] and their scores, after `first` [B, C] of `read`."""
        scores, tokens = [first], [first.likeliest()]
        for step in range(length - 1):
            scores.append(self.following(step, starts, tokens=tokens[-1]))
            tokens.append(scores[-1].likeliest())
        self.crop((length - 1) * starts.shape[1])
        stacked = torch.stack([part.states for part in scores], dim=2)
        return torch.stack(tokens, dim=-1), Scores(stacked, first.head, first.size)

    def following(
        self, step: int, starts: Tensor, uniforms: Tensor | None = None, tokens: Tensor | None = None
    ) -> Scores:
        """Return the scores [B, C] after one more slot, or token, of C completions; it stays in the cache."""
        mask = stepwise_mask(self.sequences.documents, starts, step)
        return self._run(tokens, mask, at_columns(self.sequences.positions, starts) + step, _scores, uniforms)

    def crop(self, count: int) -> None:
        assert self.cache is not None
        self.cache.crop(-count)

    @torch.no_grad()
    def written(self, scores: Scores, noise: Tensor) -> Tensor:
        """Return the completions [B, C, ...] that the student writes from noise [B, C, L + 1], after `read`."""
        flat = self.slots(noise[..., :-1], _scores)
        drafted = Scores(flat.states.unflatten(1, (noise.shape[1], -1)), flat.head, flat.size)
        if self.config.is_one_hot:
            return drafted.likeliest()

        def picked(scores: Scores, uniforms: Tensor, **sampling: Any) -> Tensor:
            return scores.mapped(lambda logits, u: (pick(u, target_probs(logits, **sampling)),), uniforms)[0]

        own = picked(scores.at(self.starts - 1), noise[..., 0], **self.config.sampling)  # the token before the slots'
        return torch.cat([own[..., None], picked(drafted, noise[..., 1:])], dim=-1)

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
    def scores(self, tokens: Tensor, mask: Tensor, positions: Tensor) -> Scores:
        """Return the scores of tokens [B, Q] under a dense bool mask [B, 1, Q, Q]."""
        weight = next(self.model.parameters(), None)
        mask = additive_mask(mask, torch.float32 if weight is None else weight.dtype)
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, "use_cache": False}
        if isinstance(self.model, PTPForCausalLM):
            return self.model(**given, read=_scores).read
        logits = self.model(**given).logits
        return Scores(logits, None, logits.shape[-1])

    def of_sequences(self, sequences: Sequences) -> Scores:
        return self.scores(sequences.tokens, token_mask(sequences.documents), sequences.positions)

    def pieces(
        self, sequences: Sequences, scores: Scores, starts: Tensor, exists: Tensor, shares: Tensor
    ) -> Completions:
        """Return pieces of sequences with scores [B, T], and uniforms at shares [B, C, K] of their intervals."""
        columns, tokens, known, scored = completion_tokens(sequences, starts, exists, shares.shape[-1])
        read = torch.zeros_like(sequences.scored)  # a column of several completions is computed once
        read.scatter_(1, torch.where(known, columns, 0).flatten(1), True)  # column 0 has no context
        low, high = token_intervals(scores[:, :-1], sequences.tokens[:, 1:], read[:, 1:], self.sampling)
        u, valid = uniform_between(at_columns(low, columns - 1), at_columns(high, columns - 1), shares)
        return Completions(starts, tokens, scored, u, unbroken(valid & known), scores.at(columns - 1))

    def drafts(
        self, sequences: Sequences, starts: Tensor, exists: Tensor, tokens: Tensor, shares: Tensor
    ) -> Completions:
        """Return completions of tokens [B, C, K], verified in one forward with all of them packed."""
        scores = self._of_completions(sequences, starts, tokens)
        known = exists[..., None] & self.belong(tokens)
        u, valid = uniform_between(*token_intervals(scores, tokens, known, self.sampling), shares)
        return Completions(starts, tokens, known, u, unbroken(valid & known), scores)

    def belong(self, tokens: Tensor) -> Tensor:
        """Return which tokens [..., K] of completions come no later than their end, [..., K] bool."""
        ends = torch.tensor(eos_ids(self.model), device=tokens.device, dtype=tokens.dtype)
        ended = torch.isin(tokens, ends).long().cumsum(-1)
        return nn.functional.pad(ended[..., :-1], (1, 0)) == 0

    def _of_completions(self, sequences: Sequences, starts: Tensor, tokens: Tensor) -> Scores:
        documents, length = sequences.documents, sequences.tokens.shape[1]
        mask = packed_mask(documents, starts, tokens.shape[2])
        positions = packed_positions(documents, starts, tokens.shape[2], 0, sequences.positions)
        found = self.scores(torch.cat([sequences.tokens, tokens.flatten(1)], dim=1), mask, positions)
        own = found.states[:, length:].unflatten(1, tokens.shape[1:])
        states = torch.cat([at_columns(found.states, starts - 1)[:, :, None], own[:, :, :-1]], dim=2)
        return Scores(states, found.head, found.size)

    def most_likely(self, sequences: Sequences, starts: Tensor, length: int) -> tuple[Tensor, Scores]:
        """Return greedy completions [B, C, K] and their scores, a forward per token; `PackedBatch` has a cache."""
        tokens = torch.zeros(*starts.shape, length, dtype=torch.long, device=starts.device)
        scores = self._of_completions(sequences, starts, tokens)
        for step in range(length):
            scores = scores if step == 0 else self._of_completions(sequences, starts, tokens)
            tokens[..., step] = scores[:, :, step].likeliest()
        return tokens, scores
