"""The tokens that a call allows: drafts are drawn under the same constraints as the target.

A constraint is a logits processor that excludes tokens by giving them -inf, and tells which without scores: one of
transformers' own, a prefix function, an automaton (`OffersAutomaton`), or one with a mask (`OffersMask`). They are
applied to scores of 0, in the order of the call's list, after every sequence and its drafted path.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.generation import logits_process as library

from ..contract import DraftTree
from ..tensors.masks import cached_arange, numbers, to_device
from .automata import (
    AutomatonProcessor,
    DeviceAutomatonState,
    HostAutomatonState,
    OffersAutomaton,
    TableAutomaton,
    fitted,
)
from .sequences import Sequences

POINTWISE = (
    library.TemperatureLogitsWarper, library.TopKLogitsWarper, library.TopPLogitsWarper, library.TopHLogitsWarper,
    library.MinPLogitsWarper, library.TypicalLogitsWarper, library.EpsilonLogitsWarper, library.EtaLogitsWarper,
    library.LogitNormalization, library.InfNanRemoveLogitsProcessor, library.SuppressTokensLogitsProcessor,
)  # fmt: skip
"""Processors that look at scores alone."""
_BY_HISTORY = (
    library.RepetitionPenaltyLogitsProcessor, library.NoRepeatNGramLogitsProcessor,
    library.SequenceBiasLogitsProcessor, library.NoBadWordsLogitsProcessor,
)  # fmt: skip
"""Processors that look at each sequence's own ids, and for which an id beyond the vocabulary is no token."""
_SPANS: dict[type, Callable[[Any], range]] = {
    library.SuppressTokensLogitsProcessor: lambda p: range(sys.maxsize),
    library.MinLengthLogitsProcessor: lambda p: range(p.min_length),
    library.MinNewTokensLengthLogitsProcessor: lambda p: range(p.prompt_length_to_skip + p.min_new_tokens),
    library.SuppressTokensAtBeginLogitsProcessor: lambda p: range(p.begin_index, p.begin_index + 1),
    library.ForcedBOSTokenLogitsProcessor: lambda p: range(1, 2),
    library.ForcedEOSTokenLogitsProcessor: lambda p: range(p.max_length - 1, p.max_length),
}
"""Processors that exclude tokens by the number of ids alone, and the numbers after which they do."""
_MASKING = (*_SPANS, library.NoRepeatNGramLogitsProcessor, library.NoBadWordsLogitsProcessor)
"""Processors of transformers that exclude tokens, and do nothing else."""
KNOWN = frozenset((*POINTWISE, *_BY_HISTORY, *_SPANS, library.ExponentialDecayLengthPenalty))
"""Processors that are applied at all positions at once; those of no group above look at the number of ids."""
ON_DEVICE = frozenset(POINTWISE) - {library.TopHLogitsWarper} | {library.RepetitionPenaltyLogitsProcessor}
"""Processors for which nobody waits."""


Processor = Callable[..., Tensor]
"""A logits processor as it is called: with ids [N, L] and scores [N, v], for scores [N, v]."""


class Positions:
    """P = `size` positions after each sequence; `fill` is an id for gaps.

    Each follows a path of drafted tokens: all positions of a tree, or the ends of `paths` [B, P, J] int64.
    """

    def __init__(self, tokens: Sequences, fill: int, tree: DraftTree | None, paths: Tensor | None = None) -> None:
        self.tokens, self.fill, self.tree = tokens, fill, tree
        if paths is not None:
            self.size, self.depths = paths.shape[1], range(paths.shape[2], paths.shape[2] + 1)
            vars(self)["paths"] = paths
        elif tree is not None:
            self.size, self.depths = tree.tokens.shape[1] + 1, range(tree.depth + 1)

    @cached_property
    def paths(self) -> Tensor:
        """The drafted tokens before every position, [B, P, J] int64, and -1 after the end of a path."""
        assert (tree := self.tree) is not None
        nodes = tree.paths()[..., 1:] - 1  # [B, P, J]
        ids = tree.tokens.gather(1, nodes.clamp(min=0).flatten(1)).view(nodes.shape) if self.size > 1 else nodes
        is_after = cached_arange(nodes.shape[2], nodes.device) >= tree.positions()[..., None]  # [B, P, J]
        return ids.masked_fill(is_after, -1)

    @cached_property
    def ids(self) -> Tensor:
        """The ids before every position, right-aligned after `fill`: [B, P, W]."""
        ids = self._aligned(self.tokens.longest)[:, None].expand(-1, self.size, -1)  # [B, P, L]
        if not self.depths[-1]:  # nothing is drafted
            return ids
        ids = torch.cat([ids, self.paths], dim=-1)  # [B, P, W]
        if self.tree is None:
            return ids
        missing = self.tree.depth - self.tree.positions()  # [B, P]
        source = cached_arange(ids.shape[2], ids.device) - missing[..., None]  # [B, P, W]
        return ids.gather(2, source.clamp(min=0)).masked_fill_(source < 0, self.fill)

    @property
    def lengths(self) -> Tensor:
        """Ids before every position, [B P]."""
        drafted = self.depths[0] if self.tree is None else self.tree.positions()  # or [1 or B, P]
        return (self.tokens.ends[:, None] + drafted).expand(-1, self.size).flatten()

    def _aligned(self, longest: int) -> Tensor:
        """Return the sequences themselves, right-aligned after `fill`: [B, W]."""
        ids = self.tokens.ids[:, :longest]
        if min(self.tokens.lengths) == longest:
            return ids
        source = cached_arange(longest, ids.device) - (longest - self.tokens.ends)[:, None]  # [B, W]
        return ids.gather(1, source.clamp(min=0)).masked_fill_(source < 0, self.fill)  # [B, W]


class _Fills(TorchFunctionMode):
    """Fills slices with Python's numbers without making tensors of these, which a recording would hold."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__setitem__ and isinstance(args[2], (bool, int, float)):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(place, slice) or place is ... for place in places):
                return args[0][places].fill_(args[2])
        return func(*args, **(kwargs or {}))


def apply_pointwise(processor: Any, scores: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return scores [N, v] after one of the processors that look at scores alone; nobody waits."""
    if type(processor) is library.EtaLogitsWarper:  # there, the distribution that has an entropy checks its numbers
        probs, keep = scores.softmax(-1), min(processor.min_tokens_to_keep, scores.shape[-1])
        entropy = torch.distributions.Categorical(logits=scores, validate_args=False).entropy()[:, None]  # [N, 1]
        least = torch.minimum(processor.epsilon, processor.epsilon.sqrt() * torch.exp(-entropy))
        is_low = (probs < least) & (scores < scores.topk(keep).values[:, -1:])
        return scores.masked_fill(is_low, processor.filter_value)
    with _Fills():
        return processor(ids, scores)


def apply_known(processor: Any, positions: Positions, flat: Tensor) -> Tensor:
    """Return scores [B P, v] after one of transformers' processors that are `KNOWN`."""
    if type(processor) in POINTWISE:
        return apply_pointwise(processor, flat, positions.tokens.ids[:, :0])
    if type(processor) in _BY_HISTORY:
        ids = positions.ids.flatten(0, 1)  # [B P, W]
        ignored = getattr(processor, "prompt_ignore_length", None)
        if ignored is not None:
            processor = copy.copy(processor)
            processor.prompt_ignore_length = None
            ids = _without_prompt(ids, positions, ignored)
        return processor(ids, flat)
    result, lengths = flat.clone(), positions.lengths
    for length in sorted({n + depth for n in positions.tokens.lengths for depth in positions.depths}):
        chosen, ids = lengths == length, positions.tokens.ids[:1, :1].expand(len(flat), length)  # it reads their number
        if flat.device.type == "cpu":  # where nothing waits for their number, only these rows
            rows = chosen.nonzero()[:, 0]
            result[rows] = processor(ids[: len(rows)], flat[rows])
        else:
            result = torch.where(chosen[:, None], processor(ids, flat), result)
    return result


def _without_prompt(ids: Tensor, positions: Positions, ignored: int | Tensor) -> Tensor:
    """Return right-aligned ids [B P, W] without the first `ignored` (per sequence, where a tensor)."""
    if isinstance(ignored, Tensor):
        ignored = ignored.to(ids.device).repeat_interleave(positions.size)
    start = ids.shape[1] - positions.lengths + ignored  # [B P]
    return ids.masked_fill(cached_arange(ids.shape[1], ids.device) < start[:, None], positions.fill)


@runtime_checkable
class OffersMask(Protocol):
    """A logits processor that tells which tokens it allows without scores."""

    def allowed(self, sequences: Tensor, /) -> Tensor:
        """Return which tokens may follow sequences [N, L] int64: [N, v] bool.

        They have the padding of the prompt, as in `__call__`, but are N sequences of any kind in any order.
        """
        ...


def offers_automaton(processor: object) -> TypeGuard[OffersAutomaton]:
    """Return whether a processor is an automaton; attributes of the same names may be anything."""
    return isinstance(processor, OffersAutomaton) and callable(processor.step) and callable(processor.allowed)


def offers_mask(processor: object) -> TypeGuard[OffersMask]:
    """Return whether a processor offers a mask, and is no automaton."""
    return isinstance(processor, OffersMask) and callable(processor.allowed) and not offers_automaton(processor)


def is_automaton(processor: object) -> TypeGuard[AutomatonProcessor]:
    """Return whether a processor does nothing but exclude what its automaton excludes."""
    return isinstance(processor, AutomatonProcessor) and type(processor).__call__ is AutomatonProcessor.__call__


def allowed_ids(processor: library.PrefixConstrainedLogitsProcessor, index: int, prefix: Tensor) -> list[int]:
    """Return the tokens that a prefix function allows after the ids of a sequence."""
    ids = processor._prefix_allowed_tokens_fn(index // processor._num_beams, prefix)
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


class Constraints:
    """The constraints among the processors of a call, in their order; without a `prompt_length`, sequences tell it."""

    def __init__(self, processors: Iterable[Processor], ends: frozenset[int], prompt_length: int | None) -> None:
        self.all = [processor for processor in processors if _excludes(processor)]
        self.ends, self.prompt_length = ends, prompt_length
        self.may_exclude_all = any(type(p) not in _MASKING for p in self.all)  # they may leave no token
        self.walks: dict[tuple[int, int], HostAutomatonState | DeviceAutomatonState] = {}
        self.of_lengths: dict[tuple[int, ...], Tensor] = {}

    def masks(self, tokens: Sequences, is_warped: bool) -> DraftMasks | None:
        """Return the tokens that drafts may hold, `is_warped` by processors of scores alone; None: all."""
        shortest, spans = min(tokens.lengths), map(_span, self.all)
        acting = [p for p, span in zip(self.all, spans) if span is None or shortest < span.stop]
        if all(is_warped and type(p) is library.SuppressTokensLogitsProcessor for p in acting):
            return None
        return DraftMasks(self, acting, tokens)

    def may_force(self, device: torch.device) -> bool:
        """Return whether they may leave one token alone, and the host knows it without waiting for the device."""
        tables = [processor for processor in self.all if isinstance(processor, TableAutomaton)]
        if not tables:
            return self.may_exclude_all
        return device.type == "cpu" and any(bool((table.masks.sum(1) == 1).any()) for table in tables)

    def by_length(self, lengths: list[int], size: int, device: torch.device) -> Tensor | None:
        """Return the mask [B or 1, 1, v] after so many ids where it depends on nothing else, or None; made once."""
        spans, masks = [span for span in map(_span, self.all) if span is not None], []
        if len(spans) < len(self.all):
            return None
        for length in lengths[:1] if len(set(lengths)) == 1 else lengths:
            key = (size, *(length in span for span in spans))
            if key not in self.of_lengths:
                flat, ids = torch.zeros(1, size, device=device), torch.zeros(1, 1, dtype=torch.long, device=device)
                for processor in self.all:
                    flat = processor(ids.expand(1, length), flat)
                self.of_lengths[key] = _or_all(flat > -torch.inf)[None]  # [1, 1, v]
            masks.append(self.of_lengths[key])
        return masks[0] if len(masks) == 1 else torch.cat(masks)  # [B, 1, v]

    def of_automaton(self, processor: OffersAutomaton, tokens: Sequences, paths: Tensor, size: int) -> Tensor:
        """Return the mask [B, P, v] of an automaton after paths [B, P, J], which -1 may fill up."""
        key = id(processor), size
        if key not in self.walks:
            begin = tokens.prompt_length if self.prompt_length is None else self.prompt_length
            kind: Any = DeviceAutomatonState if isinstance(processor, TableAutomaton) else HostAutomatonState
            self.walks[key] = kind(processor, self.ends, size, tokens, begin)
        return self.walks[key].allowed(tokens, paths)

    def applied(self, processor: Processor, positions: Positions, flat: Tensor, alive: Tensor | None) -> Tensor:
        """Return scores [B P, v] after one processor; alive [B, P]: positions that accepted drafts can reach."""
        if type(processor) in KNOWN:  # first, for protocols are slow to check
            return apply_known(processor, positions, flat)
        size = flat.shape[-1]
        if offers_automaton(processor):
            mask = self.of_automaton(processor, positions.tokens, positions.paths, size).flatten(0, 1)  # [B P, v]
        elif isinstance(processor, library.PrefixConstrainedLogitsProcessor):
            mask = to_device(_of_function(processor, positions, size, alive), flat.device)
            # where it leaves nothing of what processors before it allow, it alone counts
            flat = flat.masked_fill((flat.masked_fill(~mask, -torch.inf) == -torch.inf).all(-1, keepdim=True), 0)
        else:
            mask = fitted(_offered(processor, positions), size, processor)
        return flat.masked_fill(~mask, -torch.inf)  # [B P, v]


class DraftMasks:
    """The tokens that may be drafted after every sequence, one token of every path after the other."""

    def __init__(self, constraints: Constraints, processors: list[Processor], tokens: Sequences) -> None:
        self.constraints, self.processors, self.tokens = constraints, processors, tokens
        self.paths, self.alive, self.current = tokens.ids[:, None, :0], None, None  # [B, 1, 0]
        if any(tokens.done):
            self.alive = ~torch.tensor(tokens.done, device=tokens.ids.device)[:, None]  # [B, 1]

    def allowed(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Return the mask of the next tokens of all paths, in the shape of their distributions: [B, v] or [B, P, v].

        After an end or an excluded token, and where none would be, all are allowed: such drafts are never accepted.
        """
        size, (batch, paths, depth) = shape[-1], self.paths.shape
        mask = self.constraints.by_length([n + depth for n in self.tokens.lengths], size, self.paths.device)
        if mask is None:
            positions = Positions(self.tokens, size, None, self.paths)
            flat = torch.zeros(batch * paths, size, device=self.paths.device)  # [B P, v]
            for processor in self.processors:
                flat = self.constraints.applied(processor, positions, flat, self.alive)
            mask = _or_all((flat > -torch.inf).view(batch, paths, size))  # [B, P, v]
            self.current = mask = mask if self.alive is None else mask | ~self.alive[..., None]
        return to_device(mask, device).expand(batch, paths, -1).reshape(shape)

    def forced(self, size: int) -> list[int | None]:
        """Return the token that must follow each sequence and its path, or that a grammar's forced text begins with."""
        mask = self.allowed((len(self.paths), size), self.paths.device)  # [B, v]
        first, counts = torch.stack([mask.to(torch.uint8).argmax(-1), mask.sum(-1)]).tolist()  # one copy to the host
        found = [token if count == 1 else None for token, count in zip(first, counts)]
        for walk in self.constraints.walks.values():
            if isinstance(walk, HostAutomatonState) and None in found:
                guesses = walk.likely(self.tokens, self.paths)
                found = [
                    guess if token is None and guess is not None and guess < size and bool(mask[row, guess]) else token
                    for row, (token, guess) in enumerate(zip(found, guesses))
                ]
        return found

    def extend(self, tokens: Tensor, parents: Tensor | None = None) -> None:
        """Extend the paths [0, P) that are `parents` [B, K] by tokens [B, K]; chains by tokens [B]."""
        tokens = to_device(tokens, self.paths.device).view(len(self.paths), -1)  # [B, K]
        parents = torch.zeros_like(tokens) if parents is None else to_device(parents, tokens.device).clamp(min=0)
        if self.current is not None:
            ends = numbers(tuple(sorted(self.constraints.ends)), tokens.device)
            legal = self.current.flatten(1).gather(1, parents * self.current.shape[-1] + tokens)  # [B, K]
            legal = legal & ~(tokens[..., None] == ends).any(-1)  # nothing follows an end
            self.alive = legal if self.alive is None else legal & self.alive.gather(1, parents)
        before = self.paths.gather(1, parents[..., None].expand(-1, -1, self.paths.shape[2]))  # [B, K, J]
        self.paths = torch.cat([before, tokens[..., None]], dim=-1)  # [B, K, J + 1]


def _excludes(processor: object) -> bool:
    """Return whether a processor is a constraint: it excludes tokens, and tells which without scores."""
    is_known = type(processor) in _MASKING or isinstance(processor, library.PrefixConstrainedLogitsProcessor)
    return is_known or offers_automaton(processor) or offers_mask(processor)


def _or_all(mask: Tensor) -> Tensor:
    """Return a mask [..., v] that allows everything where it allowed nothing."""
    return mask | ~mask.any(-1, keepdim=True)


def _span(processor: object) -> range | None:
    """Return the numbers of ids after which a processor excludes something; None: that depends on the ids."""
    return _SPANS[type(processor)](processor) if type(processor) in _SPANS else None


def _of_function(
    processor: library.PrefixConstrainedLogitsProcessor, positions: Positions, size: int, alive: Tensor | None
) -> Tensor:
    """Return the mask [B P, v] of a prefix function, which is called for positions that may be reached, on the host."""
    tokens, paths = positions.tokens, positions.paths
    mask = torch.ones(len(paths), positions.size, size, dtype=torch.bool)  # [B, P, v]
    reachable = [[not done] * positions.size for done in tokens.done] if alive is None else alive.tolist()
    for index, length in enumerate(tokens.lengths):
        for position in [position for position, is_reachable in enumerate(reachable[index]) if is_reachable]:
            prefix = torch.cat([tokens.ids[index, :length], paths[index, position]])  # [L + J]
            ids = allowed_ids(processor, index, prefix)
            mask[index, position] = False
            mask[index, position, ids] = True
    return mask.flatten(0, 1)


def _offered(processor: Any, positions: Positions) -> Tensor:
    """Return the mask [B P, v] that a processor offers; it is called for sequences of one length at a time."""
    tokens, paths, lengths = positions.tokens, positions.paths, positions.tokens.lengths
    masks: dict[int, Tensor] = {}
    for length in sorted(set(lengths)):
        chosen = [number for number, other in enumerate(lengths) if other == length]
        index = slice(None) if len(chosen) == len(lengths) else numbers(tuple(chosen), paths.device)
        ids = tokens.ids[index, :length][:, None].expand(-1, positions.size, -1)  # [b, P, L]
        mask = processor.allowed(torch.cat([ids, paths[index]], dim=-1).flatten(0, 1))  # [b P, v]
        masks |= dict(zip(chosen, to_device(mask, paths.device).unflatten(0, (len(chosen), -1))))
    return torch.cat([masks[number] for number in range(len(lengths))])  # [B P, v]
