"""Positions after the sequences of a batch, and the processors of transformers on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.generation import logits_process as library

from ..contract import DraftTree
from ..tensors.masks import cached_arange
from .sequences import Sequences

POINTWISE = (
    library.TemperatureLogitsWarper, library.TopKLogitsWarper, library.TopPLogitsWarper, library.TopHLogitsWarper,
    library.MinPLogitsWarper, library.TypicalLogitsWarper, library.EpsilonLogitsWarper, library.EtaLogitsWarper,
    library.LogitNormalization, library.InfNanRemoveLogitsProcessor, library.SuppressTokensLogitsProcessor,
)  # fmt: skip
"""Processors that look at scores alone."""
BY_HISTORY = (
    library.RepetitionPenaltyLogitsProcessor, library.NoRepeatNGramLogitsProcessor,
    library.SequenceBiasLogitsProcessor, library.NoBadWordsLogitsProcessor,
)  # fmt: skip
"""Processors that look at each sequence's own ids, and for which an id beyond the vocabulary is no token."""
BY_LENGTH = (
    library.MinLengthLogitsProcessor, library.MinNewTokensLengthLogitsProcessor, library.ForcedBOSTokenLogitsProcessor,
    library.ForcedEOSTokenLogitsProcessor, library.ExponentialDecayLengthPenalty,
    library.SuppressTokensAtBeginLogitsProcessor,
)  # fmt: skip
"""Processors that look at the number of ids."""
KNOWN = frozenset(POINTWISE + BY_HISTORY + BY_LENGTH)
ON_DEVICE = frozenset(POINTWISE) - {library.TopHLogitsWarper} | {library.RepetitionPenaltyLogitsProcessor}
"""Processors for which nobody waits."""


Processor = Callable[..., Tensor]
"""A logits processor as it is called: with ids [N, L] and scores [N, v], for scores [N, v]."""


class Positions:
    """P = `size` positions after each sequence; `fill` is an id for gaps.

    Each follows a path of drafted tokens: all positions of a tree, or the ends of `paths` [B, P, J] int64.
    """

    def __init__(
        self, tokens: Sequences, fill: int, tree: DraftTree | None = None, paths: Tensor | None = None
    ) -> None:
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

    def by_length(self) -> Iterator[tuple[int, Tensor]]:
        """Yield every length, and which of the B P positions have it."""
        lengths = self.lengths
        for length in sorted({n + depth for n in self.tokens.lengths for depth in self.depths}):
            yield length, lengths == length


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
    if type(processor) in BY_HISTORY:
        ids = positions.ids.flatten(0, 1)  # [B P, W]
        ignored = getattr(processor, "prompt_ignore_length", None)
        if ignored is not None:
            processor = copy.copy(processor)
            processor.prompt_ignore_length = None
            ids = _without_prompt(ids, positions, ignored)
        return processor(ids, flat)
    result = flat.clone()
    for length, chosen in positions.by_length():
        ids = positions.tokens.ids[:1, :1].expand(len(flat), length)  # it looks at their number only
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
