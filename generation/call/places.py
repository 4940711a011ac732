"""Positions after ragged sequences, as rows of their own, and the processors of transformers on them.

A position follows a sequence and then a path of drafted tokens: those of a tree that is verified (`TreePlaces`), or
those whose next tokens are to be drafted (`PathPlaces`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as library

from ...modeling.masks import cached_arange
from ..trees.contract import DraftTree
from .sequences import Sequences

POINTWISE = (
    library.TemperatureLogitsWarper,
    library.TopKLogitsWarper,
    library.TopPLogitsWarper,
    library.TopHLogitsWarper,
    library.MinPLogitsWarper,
    library.TypicalLogitsWarper,
    library.EpsilonLogitsWarper,
    library.EtaLogitsWarper,
    library.LogitNormalization,
    library.InfNanRemoveLogitsProcessor,
    library.SuppressTokensLogitsProcessor,
)
"""Processors that look at scores alone."""


BY_HISTORY = (
    library.RepetitionPenaltyLogitsProcessor,
    library.NoRepeatNGramLogitsProcessor,
    library.SequenceBiasLogitsProcessor,
    library.NoBadWordsLogitsProcessor,
)
"""Processors that look at each sequence's own ids, and for which an id beyond the vocabulary is no token."""


BY_LENGTH = (
    library.MinLengthLogitsProcessor,
    library.MinNewTokensLengthLogitsProcessor,
    library.ForcedBOSTokenLogitsProcessor,
    library.ForcedEOSTokenLogitsProcessor,
    library.ExponentialDecayLengthPenalty,
    library.SuppressTokensAtBeginLogitsProcessor,
)
"""Processors that look at the number of ids."""


KNOWN = frozenset(POINTWISE + BY_HISTORY + BY_LENGTH)


class Places:
    """Positions after sequences.

    Args:
        tokens: The sequences.
        size: P, places after each of them.
        depths: How many drafted tokens places may come after.
        fill: An id, shown where a sequence has no token.
    """

    def __init__(self, tokens: Sequences, size: int, depths: range, fill: int) -> None:
        self.tokens, self.size, self.depths, self.fill = tokens, size, depths, fill

    @cached_property
    def paths(self) -> Tensor:
        """The drafted tokens before every place, [B, P, J] int64, and -1 after the end of a path."""
        raise NotImplementedError

    @cached_property
    def ids(self) -> Tensor:
        """The ids before every place, right-aligned after `fill`: [B, P, W]."""
        raise NotImplementedError

    @property
    def lengths(self) -> Tensor:
        """Ids before every place, [B P]."""
        raise NotImplementedError

    def rows(self, longest: int) -> Tensor:
        """The sequences themselves, right-aligned after `fill`: [B, W]."""
        tokens = self.tokens
        rows = tokens.ids[:, :longest]
        if min(tokens.lengths) == longest:
            return rows
        source = cached_arange(longest, rows.device) - (longest - tokens.ends)[:, None]
        return rows.gather(1, source.clamp(min=0)).masked_fill_(source < 0, self.fill)

    def by_length(self) -> Iterator[tuple[int, Tensor]]:
        """Lengths, and which of the B P places have them."""
        lengths = self.lengths
        for length in sorted({n + depth for n in self.tokens.lengths for depth in self.depths}):
            yield length, lengths == length


class PathPlaces(Places):
    """The ends of paths of one length.

    Args:
        tokens: The sequences.
        paths: [B, P, J] int64, drafted tokens.
        fill: An id, shown where a sequence has no token.
    """

    def __init__(self, tokens: Sequences, paths: Tensor, fill: int) -> None:
        size, depth = paths.shape[1:]
        super().__init__(tokens, size, range(depth, depth + 1), fill)
        vars(self)["paths"] = paths

    @cached_property
    def ids(self) -> Tensor:
        """See `Places`."""
        rows = self.rows(max(self.tokens.lengths))[:, None].expand(-1, self.size, -1)
        return torch.cat([rows, self.paths], dim=-1) if self.paths.shape[2] else rows

    @property
    def lengths(self) -> Tensor:
        """See `Places`."""
        return (self.tokens.ends + self.paths.shape[2]).repeat_interleave(self.size)


class TreePlaces(Places):
    """Every place of a tree, b's first.

    Args:
        tokens: The sequences.
        tree: The draft after them, m nodes.
        fill: An id, shown where a sequence has no token.
    """

    def __init__(self, tokens: Sequences, tree: DraftTree, fill: int) -> None:
        super().__init__(tokens, tree.tokens.shape[1] + 1, range(tree.depth + 1), fill)
        self.tree = tree

    @cached_property
    def paths(self) -> Tensor:
        """See `Places`."""
        nodes, tree = self.tree.paths()[..., 1:] - 1, self.tree
        found = tree.tokens.gather(1, nodes.clamp(min=0).flatten(1)).view(nodes.shape) if self.size > 1 else nodes
        behind = cached_arange(nodes.shape[2], nodes.device) >= tree.positions()[..., None]
        return found.masked_fill(behind, -1)

    @cached_property
    def ids(self) -> Tensor:
        """See `Places`."""
        tokens, tree = self.tokens, self.tree
        longest = max(tokens.lengths)
        if self.size == 1:  # nothing is drafted
            return self.rows(longest)[:, None]
        steps = torch.arange(longest + tree.depth, device=tokens.ids.device)
        ends = tokens.ends[:, None] + tree.positions()
        source = steps - (len(steps) - ends)[..., None]  # [B, m + 1, W]: each column's place in its own text
        texts = torch.cat([tokens.ids[:, :longest], tree.tokens], dim=1)
        behind = (source - tokens.ends[:, None, None] + 1).clamp(min=0, max=tree.depth)
        nodes = longest - 1 + tree.paths().gather(2, behind)
        source = torch.where(source < tokens.ends[:, None, None], source, nodes)
        found = texts[:, None].expand(-1, self.size, -1).gather(2, source.clamp(min=0))
        return found.masked_fill_(source < 0, self.fill)

    @property
    def lengths(self) -> Tensor:
        """See `Places`."""
        return (self.tokens.ends[:, None] + self.tree.positions()).flatten()


def apply_known(processor: Any, places: Places, flat: Tensor) -> Tensor:
    """Scores [B P, v] after one of transformers' processors that are known here."""
    if type(processor) in POINTWISE:
        return processor(places.tokens.ids[:, :0], flat)
    if type(processor) in BY_HISTORY:
        ids = places.ids.flatten(0, 1)
        ignored = getattr(processor, "prompt_ignore_length", None)
        if ignored is not None:
            processor = copy.copy(processor)
            processor.prompt_ignore_length = None
            ids = _without_prompt(ids, places, ignored)
        return processor(ids, flat)
    result = flat
    for length, chosen in places.by_length():
        ids = places.tokens.ids[:1, :1].expand(len(flat), length)  # it looks at their number only
        result = torch.where(chosen[:, None], processor(ids, flat.clone()), result)
    return result


def _without_prompt(ids: Tensor, places: Places, ignored: int | Tensor) -> Tensor:
    """Right-aligned ids [B P, W] of which the first `ignored` (per sequence, where a tensor) are no tokens."""
    if isinstance(ignored, Tensor):
        ignored = ignored.to(ids.device).repeat_interleave(places.size)
    start = ids.shape[1] - places.lengths + ignored
    return ids.masked_fill(cached_arange(ids.shape[1], ids.device) < start[:, None], places.fill)
