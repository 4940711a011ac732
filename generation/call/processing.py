"""Logits processors over several places of ragged sequences. Knows neither drafters nor models.

transformers' processors take the ids so far [B, L] and the scores of one position [B, v]. Here a row has scores for
several places, each after ids of its own, and rows have different lengths. The library's own processors run once over
all places. As soon as one of the list is not known here, the list runs length by length: it is shown all B rows of the
batch in their order, so that what it knows of rows stays true, and the rows of which another length is known are shown
their newest ids (after padding, where they are shorter); what it says of those is dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as library

from ..trees.contract import DraftTree
from .sequences import Sequences

_POINTWISE = (
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


_BY_HISTORY = (
    library.RepetitionPenaltyLogitsProcessor,
    library.NoRepeatNGramLogitsProcessor,
    library.SequenceBiasLogitsProcessor,
    library.NoBadWordsLogitsProcessor,
)
"""Processors that look at each sequence's own ids, and for which an id beyond the vocabulary is no token."""


_BY_LENGTH = (
    library.MinLengthLogitsProcessor,
    library.MinNewTokensLengthLogitsProcessor,
    library.ForcedBOSTokenLogitsProcessor,
    library.ForcedEOSTokenLogitsProcessor,
    library.ExponentialDecayLengthPenalty,
    library.SuppressTokensAtBeginLogitsProcessor,
)
"""Processors that look at the number of ids."""


_COUNTING = (
    library.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    library.SynthIDTextWatermarkLogitsProcessor,
)


def counts_calls(processor: Any) -> bool:
    """Whether a processor must be called once for every token, and cannot be asked about tokens that may be rejected.

    The library's own are known; a user's processor says so by an attribute `counts_calls = True`.
    """
    return isinstance(processor, _COUNTING) or bool(getattr(processor, "counts_calls", False))


class Processing:
    """Applies a list of logits processors in its order.

    Args:
        processors: The list that transformers prepared for this call of `generate`.
        pad: An id of the vocabulary, shown where a row has no token.
    """

    def __init__(self, processors: LogitsProcessorList, pad: int = 0) -> None:
        self.processors, self.pad = list(processors), pad
        self.pointwise = [p for p in self.processors if type(p) in _POINTWISE]
        known = _POINTWISE + _BY_HISTORY + _BY_LENGTH
        self.is_known = all(type(p) in known for p in self.processors)
        self.is_pointwise = len(self.pointwise) == len(self.processors)

    def __call__(self, tokens: Sequences, logits: torch.Tensor, tree: DraftTree, done: list[bool]) -> torch.Tensor:
        """Scores of the target.

        Args:
            tokens: The rows.
            logits: [B, m + 1, v] float32; place 0 comes after the last token of its row.
            tree: The draft after them, m nodes.
            done: Sequences that have ended; their scores are arbitrary.

        Returns:
            [B, m + 1, v] processed scores.
        """
        if not self.processors:
            return logits
        if not self.is_known:
            return self._by_length(tokens, logits, tree, done)
        places, flat = _Places(tokens, tree, logits.shape[-1]), logits.flatten(0, 1)
        for processor in self.processors:
            flat = _apply_known(processor, places, flat)
        return flat.view(logits.shape)

    def _by_length(self, tokens: Sequences, logits: torch.Tensor, tree: DraftTree, done: list[bool]) -> torch.Tensor:
        """The whole list at one length after the other, along paths until they meet a token that it excludes.

        What follows such a token is never used, and a constraint need not know what to say of it.
        """
        output, ids = logits.clone(), _Places(tokens, tree, self.pad).ids
        positions, parents = _on_host(tree)
        possible = [[True] * logits.shape[1] for _ in done]
        every = torch.arange(len(done), device=logits.device)
        for length, chosen in _layers(tokens.lengths, positions, done):
            asked = [row for row, place in chosen.items() if possible[row][place]]
            if not asked:
                continue
            place = torch.tensor([chosen.get(row, 0) for row in range(len(done))], device=logits.device)
            shown, scores = ids[every, place, ids.shape[2] - length :], logits[every, place]
            for processor in self.processors:
                scores = _ask(processor, asked, shown, scores)
            rows = torch.tensor(asked, device=logits.device)
            output[rows, place[rows]] = scores[rows].to(output.dtype)
            self._close(possible, asked, chosen, parents, scores.softmax(-1), tree.tokens)
        return output

    @staticmethod
    def _close(
        possible: list[list[bool]],
        asked: list[int],
        chosen: dict[int, int],
        parents: list[list[int]],
        distribution: torch.Tensor,
        drafted: torch.Tensor,
    ) -> None:
        """Marks the children of the places that were asked about as impossible where the distribution excludes them."""
        if not drafted.shape[1]:
            return
        allowed = (distribution.gather(-1, drafted) > 0).tolist()
        for row in asked:
            for node, parent in enumerate(parents[row]):
                if parent + 1 == chosen[row]:
                    possible[row][node + 1] = allowed[row][node]
                elif not possible[row][parent + 1]:
                    possible[row][node + 1] = False

    def warp(self, probs: torch.Tensor) -> torch.Tensor:
        """Draft distributions [..., v] after the processors that look at scores alone; probabilities in, probabilities
        out.

        A draft's distribution may be any distribution, so the processors that read prefixes are left out.
        """
        if not self.pointwise:
            return probs
        flat = probs.flatten(0, -2).log()
        for processor in self.pointwise:
            flat = processor(None, flat)
        return flat.softmax(-1).view(probs.shape)


class _Places:
    """Every place of every sequence as a row of its own.

    Attributes:
        size: Places per sequence, m + 1.
    """

    def __init__(self, tokens: Sequences, tree: DraftTree, fill: int) -> None:
        self.tokens, self.tree, self.fill = tokens, tree, fill
        self.size = tree.tokens.shape[1] + 1
        self._ids: torch.Tensor | None = None

    @property
    def ids(self) -> torch.Tensor:
        """The ids before every place, right-aligned after `fill`: [B, m + 1, W]."""
        if self._ids is None:
            tokens, tree = self.tokens, self.tree
            longest = max(tokens.lengths)
            if self.size == 1:  # nothing is drafted
                self._ids = self._rows(longest)[:, None]
                return self._ids
            steps = torch.arange(longest + tree.depth, device=tokens.ids.device)
            ends = tokens.ends[:, None] + tree.positions()
            source = steps - (len(steps) - ends)[..., None]  # [B, m + 1, W]: each column's place in its own text
            texts = torch.cat([tokens.ids[:, :longest], tree.tokens], dim=1)
            behind = (source - tokens.ends[:, None, None] + 1).clamp(min=0, max=tree.depth)
            nodes = longest - 1 + tree.paths().gather(2, behind)
            source = torch.where(source < tokens.ends[:, None, None], source, nodes)
            found = texts[:, None].expand(-1, self.size, -1).gather(2, source.clamp(min=0))
            self._ids = found.masked_fill_(source < 0, self.fill)
        return self._ids

    def _rows(self, longest: int) -> torch.Tensor:
        """The rows themselves, right-aligned after `fill`: [B, W]."""
        tokens = self.tokens
        rows = tokens.ids[:, :longest]
        if min(tokens.lengths) == longest:
            return rows
        source = torch.arange(longest, device=rows.device) - (longest - tokens.ends)[:, None]
        return rows.gather(1, source.clamp(min=0)).masked_fill_(source < 0, self.fill)

    @property
    def lengths(self) -> torch.Tensor:
        """Ids before every place, [B (m + 1)]."""
        return (self.tokens.ends[:, None] + self.tree.positions()).flatten()

    def by_length(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Lengths, and which of the B (m + 1) places have them."""
        depths = range(self.tree.depth + 1)
        lengths = self.lengths
        for length in sorted({n + depth for n in self.tokens.lengths for depth in depths}):
            yield length, lengths == length


def _apply_known(processor: Any, places: _Places, flat: torch.Tensor) -> torch.Tensor:
    """Scores [B (m + 1), v] after one processor."""
    if type(processor) in _POINTWISE:
        return processor(places.tokens.ids[:, :0], flat)
    if type(processor) in _BY_HISTORY:
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


def _without_prompt(ids: torch.Tensor, places: _Places, ignored: int | torch.Tensor) -> torch.Tensor:
    """Right-aligned ids [B (m + 1), W] of which the first `ignored` (per sequence, where a tensor) are no tokens."""
    if isinstance(ignored, torch.Tensor):
        ignored = ignored.to(ids.device).repeat_interleave(places.size)
    start = ids.shape[1] - places.lengths + ignored
    return ids.masked_fill(torch.arange(ids.shape[1], device=ids.device) < start[:, None], places.fill)


def _ask(processor: Any, asked: list[int], ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores of all sequences after one processor; a constraint on prefixes is asked about its own rows only."""
    if not isinstance(processor, library.PrefixConstrainedLogitsProcessor):
        return processor(ids, scores)
    allowed, rows = processor._prefix_allowed_tokens_fn, torch.tensor(asked, device=ids.device)
    of_rows = library.PrefixConstrainedLogitsProcessor(lambda index, prefix: allowed(asked[index], prefix), 1)
    return scores.index_copy(0, rows, of_rows(ids[rows], scores[rows]))


def _on_host(tree: DraftTree) -> tuple[list[list[int]], list[list[int]]]:
    """Positions of the places and parents of the nodes of every sequence; those of a chain are known without asking."""
    batch, length = tree.tokens.shape
    if tree.is_chain:
        return [list(range(length + 1))] * batch, [list(range(-1, length - 1))] * batch
    return tree.positions().tolist(), tree.parents.tolist()


def _layers(lengths: list[int], positions: list[list[int]], done: list[bool]) -> Iterator[tuple[int, dict[int, int]]]:
    """Lengths in rising order, with one place of that length for each of some rows; all places of open sequences
    come."""
    layers: dict[tuple[int, int], dict[int, int]] = {}
    for row, (length, own) in enumerate(zip(lengths, positions)):
        met: dict[int, int] = {}
        for place, position in enumerate([] if done[row] else own):
            total = length + position
            layers.setdefault((total, met.get(total, 0)), {})[row] = place
            met[total] = met.get(total, 0) + 1
    for (total, _), chosen in sorted(layers.items(), key=lambda item: item[0]):
        yield total, chosen
