"""Which tokens a call allows: constraints that drafts are drawn under, as the target is along them.

A constraint is a logits processor that excludes tokens by giving them -inf. What it excludes after a draft is known
before the target is asked where the processor is one of transformers' own, a prefix function, an automaton
(`OffersAutomaton`), or offers a mask (`OffersMask`). All of them are applied to scores of 0, in the order of the call's
list, after every sequence and the path that is drafted so far: what is then -inf is not drafted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from transformers.generation import logits_process as library

from ...modeling.masks import numbers, to_device
from .automata import AutomatonProcessor, HostWalk, OffersAutomaton, TableAutomaton, TableWalk, fitted
from .positions import KNOWN, PathPositions, Positions, apply_known
from .sequences import Sequences

_MASKING = (
    library.SuppressTokensLogitsProcessor,
    library.NoRepeatNGramLogitsProcessor,
    library.NoBadWordsLogitsProcessor,
    library.MinLengthLogitsProcessor,
    library.MinNewTokensLengthLogitsProcessor,
    library.ForcedBOSTokenLogitsProcessor,
    library.ForcedEOSTokenLogitsProcessor,
    library.SuppressTokensAtBeginLogitsProcessor,
)
"""Processors of transformers that exclude tokens, and do nothing else."""


@runtime_checkable
class OffersMask(Protocol):
    """A logits processor that says which tokens it allows without being shown scores."""

    def allowed(self, sequences: Tensor, /) -> Tensor:
        """Return which tokens may follow sequences [N, L] int64: [N, v] bool.

        They are shown as `__call__` is shown them, padding of the prompt included, but as N rows of any sequences in
        any order. What is said of ids after an end, or after an excluded token, is not used.
        """
        ...


def offers_automaton(processor: Any) -> TypeGuard[OffersAutomaton]:
    """Whether a processor is an automaton; attributes of the same names may be anything."""
    return isinstance(processor, OffersAutomaton) and callable(processor.step) and callable(processor.allowed)


def offers_mask(processor: Any) -> TypeGuard[OffersMask]:
    """Whether a processor offers a mask, and is no automaton."""
    return isinstance(processor, OffersMask) and callable(processor.allowed) and not offers_automaton(processor)


def is_automaton(processor: Any) -> bool:
    """Whether a processor excludes what its automaton does, and does nothing else."""
    return isinstance(processor, AutomatonProcessor) and type(processor).__call__ is AutomatonProcessor.__call__


def allowed_ids(processor: Any, row: int, prefix: Tensor, size: int) -> list[int]:
    """Return what a prefix function allows after the ids of a row.

    Raises:
        ValueError: An id beyond the vocabulary.
    """
    found = processor._prefix_allowed_tokens_fn(row // processor._num_beams, prefix)
    found = found.tolist() if isinstance(found, Tensor) else list(found)
    if found and not 0 <= min(found) <= max(found) < size:
        wrong = next(token for token in found if not 0 <= token < size)
        raise ValueError(f"prefix_allowed_tokens_fn allows token {wrong} in row {row}: ids go from 0 to {size - 1}")
    return found


class Constraints:
    """What the processors of one call exclude.

    Args:
        processors: The call's.
        ends: Ids that end a sequence.
        prompt_length: Ids of the prompt; None: what the sequences say.

    Attributes:
        all: The processors that exclude tokens, in their order.
        may_exclude_all: Whether they may leave none.
    """

    def __init__(self, processors: Iterable[Any], ends: frozenset[int], prompt_length: int | None) -> None:
        self.all: list[Any] = [
            p
            for p in processors
            if type(p) in _MASKING
            or isinstance(p, library.PrefixConstrainedLogitsProcessor)
            or offers_automaton(p)
            or offers_mask(p)
        ]
        self.ends, self.prompt_length = ends, prompt_length
        self.may_exclude_all = any(type(p) not in _MASKING for p in self.all)
        self.walks: dict[tuple[int, int], HostWalk | TableWalk] = {}
        self.of_lengths: dict[tuple[Any, ...], Tensor] = {}

    def masks(self, tokens: Sequences, is_warped: bool) -> DraftMasks | None:
        """What a draft after every sequence may hold; None: nothing is excluded.

        Args:
            tokens: The sequences.
            is_warped: Drafts are drawn from distributions after processors that look at scores alone.
        """
        shortest, spans = min(tokens.lengths), map(_span, self.all)
        acting = [p for p, span in zip(self.all, spans) if span is None or shortest < span.stop]
        if all(is_warped and type(p) is library.SuppressTokensLogitsProcessor for p in acting):
            return None
        return DraftMasks(self, acting, tokens)

    def by_length(self, lengths: list[int], size: int, device: torch.device) -> Tensor | None:
        """The mask [B or 1, 1, v] after so many ids, of which those that are excluded do not depend; else None.

        It is made once for all lengths at which the same processors act.
        """
        spans, masks = [span for span in map(_span, self.all) if span is not None], []
        if len(spans) < len(self.all):
            return None
        for length in lengths[:1] if len(set(lengths)) == 1 else lengths:
            key = (size, *(length in span for span in spans))
            if key not in self.of_lengths:
                flat, ids = torch.zeros(1, size, device=device), torch.zeros(1, 1, dtype=torch.long, device=device)
                for processor in self.all:
                    flat = processor(ids.expand(1, length), flat)
                self.of_lengths[key] = _or_all(flat > -torch.inf)[None]
            masks.append(self.of_lengths[key])
        return masks[0] if len(masks) == 1 else torch.cat(masks)

    def of_automaton(self, processor: Any, tokens: Sequences, paths: Tensor, size: int) -> Tensor:
        """What an automaton allows after paths [B, P, J], which -1 may fill up: [B, P, v]."""
        key = id(processor), size
        if key not in self.walks:
            begin = tokens.prompt_length if self.prompt_length is None else self.prompt_length
            kind = TableWalk if isinstance(processor, TableAutomaton) else HostWalk
            self.walks[key] = kind(processor, self.ends, size, tokens, begin)
        return self.walks[key].allowed(tokens, paths)

    def applied(self, processor: Any, places: Positions, flat: Tensor, alive: Tensor | None) -> Tensor:
        """Scores [B P, v] after one processor; alive [B, P] are places that a draft can be accepted to reach."""
        if type(processor) in KNOWN:  # looked at first, for protocols are slow to ask
            return apply_known(processor, places, flat)
        size = flat.shape[-1]
        if offers_automaton(processor):
            mask = self.of_automaton(processor, places.tokens, places.paths, size).flatten(0, 1)
        elif isinstance(processor, library.PrefixConstrainedLogitsProcessor):
            mask = to_device(_of_function(processor, places, size, alive), flat.device)
            flat = flat.masked_fill((flat.masked_fill(~mask, -torch.inf) == -torch.inf).all(-1, keepdim=True), 0)
        else:
            mask = fitted(_offered(processor, places), size, processor)
        return flat.masked_fill(~mask, -torch.inf)


class DraftMasks:
    """The tokens that may be drafted after every sequence, one token of every path after the other.

    Args:
        constraints: Of the call.
        processors: Those that exclude something.
        tokens: The sequences.
    """

    def __init__(self, constraints: Constraints, processors: list[Any], tokens: Sequences) -> None:
        self.constraints, self.processors, self.tokens = constraints, processors, tokens
        self.paths, self.alive, self.current = tokens.ids[:, None, :0], None, None
        if any(tokens.done):
            self.alive = ~torch.tensor(tokens.done, device=tokens.ids.device)[:, None]

    def allowed(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """The mask of the next tokens of all paths, in the shape of their distributions: [B, v] or [B, P, v].

        All tokens are allowed after an end or an excluded token, and where none would be: what is drafted there is
        never accepted.
        """
        size, (rows, *_, depth) = shape[-1], self.paths.shape
        mask = self.constraints.by_length([n + depth for n in self.tokens.lengths], size, self.paths.device)
        if mask is None:
            self.current = mask = self._after_paths(size)
        return to_device(mask, device).expand(rows, self.paths.shape[1], -1).reshape(shape)

    def _after_paths(self, size: int) -> Tensor:
        places = PathPositions(self.tokens, self.paths, fill=size)
        flat = torch.zeros(len(self.paths) * places.size, size, device=self.paths.device)
        for processor in self.processors:
            flat = self.constraints.applied(processor, places, flat, self.alive)
        mask = (flat > -torch.inf).view(len(self.paths), places.size, size)
        return _or_all(mask) if self.alive is None else _or_all(mask) | ~self.alive[..., None]

    def extend(self, tokens: Tensor, parents: Tensor | None = None) -> None:
        """Goes on with the paths that drafted tokens end.

        Args:
            tokens: [B, K] int64, or [B] of chains.
            parents: [B, K] int64, the paths [0, P) that they go on from; None: of chains.
        """
        tokens = to_device(tokens, self.paths.device).view(len(self.paths), -1)
        parents = torch.zeros_like(tokens) if parents is None else to_device(parents, tokens.device).clamp(min=0)
        if self.current is not None:
            ends = numbers(tuple(sorted(self.constraints.ends)), tokens.device)
            legal = self.current.flatten(1).gather(1, parents * self.current.shape[-1] + tokens)
            legal = legal & ~(tokens[..., None] == ends).any(-1)
            self.alive = legal if self.alive is None else legal & self.alive.gather(1, parents)
        before = self.paths.gather(1, parents[..., None].expand(-1, -1, self.paths.shape[2]))
        self.paths = torch.cat([before, tokens[..., None]], dim=-1)


def _or_all(mask: Tensor) -> Tensor:
    """A mask [..., v] that allows everything where it allows nothing."""
    return mask | ~mask.any(-1, keepdim=True)


def _span(processor: Any) -> range | None:
    """The numbers of ids after which a processor excludes something; None: that depends on which ids they are."""
    match type(processor):
        case library.SuppressTokensLogitsProcessor:
            return range(sys.maxsize)
        case library.MinLengthLogitsProcessor:
            return range(processor.min_length)
        case library.MinNewTokensLengthLogitsProcessor:
            return range(processor.prompt_length_to_skip + processor.min_new_tokens)
        case library.SuppressTokensAtBeginLogitsProcessor:
            return range(processor.begin_index, processor.begin_index + 1)
        case library.ForcedBOSTokenLogitsProcessor:
            return range(1, 2)
        case library.ForcedEOSTokenLogitsProcessor:
            return range(processor.max_length - 1, processor.max_length)
    return None


def _of_function(processor: Any, places: Positions, size: int, alive: Tensor | None) -> Tensor:
    """Mask [B P, v] of a prefix function, which is asked about places that may be reached, on the host."""
    tokens, paths = places.tokens, places.paths
    mask = torch.ones(len(paths), places.size, size, dtype=torch.bool)
    asked = [[not done] * places.size for done in tokens.done] if alive is None else alive.tolist()
    for row, length in enumerate(tokens.lengths):
        for place in [place for place, is_asked in enumerate(asked[row]) if is_asked]:
            prefix = torch.cat([tokens.ids[row, :length], paths[row, place]])
            found = allowed_ids(processor, row, prefix, size)
            mask[row, place] = False
            mask[row, place, found] = True
    return mask.flatten(0, 1)


def _offered(processor: OffersMask, places: Positions) -> Tensor:
    """Mask [B P, v] that a processor offers; it is shown rows of one length at a time."""
    tokens, paths, lengths = places.tokens, places.paths, places.tokens.lengths
    found: dict[int, Tensor] = {}
    for length in sorted(set(lengths)):
        rows = [row for row, own in enumerate(lengths) if own == length]
        index = numbers(tuple(rows), paths.device)
        ids = tokens.ids[:, :length] if len(rows) == len(lengths) else tokens.ids[index, :length]
        own = paths if len(rows) == len(lengths) else paths[index]
        shown = torch.cat([ids[:, None].expand(-1, places.size, -1), own], dim=-1)
        mask = processor.allowed(shown.flatten(0, 1))
        found |= dict(zip(rows, to_device(mask, paths.device).unflatten(0, (len(rows), -1))))
    return torch.cat([found[row] for row in range(len(lengths))])
