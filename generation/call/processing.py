"""Logits processors over several places of ragged sequences. Knows neither drafters nor models.

transformers' processors take the ids so far [B, L] and the scores of one position [B, v]. Here a row has scores for
several places, each after ids of its own, and rows have different lengths. The library's own processors run once over
all places. As soon as one of the list is not known here, the list runs length by length: it is shown all B rows of the
batch in their order, so that what it knows of rows stays true, and the rows of which another length is known are shown
their newest ids (after padding, where they are shorter); what it says of those is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as library
from transformers.utils import logging

from ...modeling.masks import numbers
from ..trees.contract import DraftTree
from .automata import fitted
from .constraints import Constraints, DraftMasks, allowed_ids, is_automaton, offers_automaton, offers_mask
from .positions import KNOWN, POINTWISE, TreePositions
from .sequences import Sequences

logger = logging.get_logger(__name__)

_COUNTING = (
    library.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    library.SynthIDTextWatermarkLogitsProcessor,
)


def counts_calls(processor: Any) -> bool:
    """Whether a processor must be called once for every token, and cannot be asked about tokens that may be rejected.

    The library's own are known; a user's processor says so by an attribute `counts_calls = True`.
    """
    return isinstance(processor, _COUNTING) or bool(getattr(processor, "counts_calls", False))


_CHECKED = 4
"""How often a mask that a processor offers is compared with what the processor excludes."""


class Processing:
    """Applies a list of logits processors in its order.

    Args:
        processors: The list that transformers prepared for this call of `generate`.
        pad: An id of the vocabulary, shown where a row has no token.
        ends: Ids that end a sequence; nobody is asked what follows them.
        prompt_length: Ids of the prompt; None: what the sequences say.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        pad: int = 0,
        ends: frozenset[int] = frozenset(),
        prompt_length: int | None = None,
    ) -> None:
        self.processors, self.pad, self.ends = list(processors), pad, ends
        self.pointwise = [p for p in self.processors if type(p) in POINTWISE]
        self.is_known = all(type(p) in KNOWN or is_automaton(p) for p in self.processors)
        self.is_pointwise = len(self.pointwise) == len(self.processors)
        self.constraints = Constraints(self.processors, ends, prompt_length)
        self.unchecked = _CHECKED

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
        places, flat = TreePositions(tokens, tree, logits.shape[-1]), logits.flatten(0, 1)
        for processor in self.processors:
            flat = self.constraints.applied(processor, places, flat, None)
        return flat.view(logits.shape)

    def masks(self, tokens: Sequences, is_warped: bool) -> DraftMasks | None:
        """See `Constraints.masks`."""
        return self.constraints.masks(tokens, is_warped) if self.constraints.all else None

    def _by_length(self, tokens: Sequences, logits: torch.Tensor, tree: DraftTree, done: list[bool]) -> torch.Tensor:
        """The whole list at one length after the other, along paths until they meet a token that it excludes.

        What follows such a token, or an end, is never used, and a constraint need not know what to say of it.
        """
        places, size = TreePositions(tokens, tree, self.pad), logits.shape[-1]
        output, ids, offered = logits.clone(), places.ids, dict[int, torch.Tensor]()
        for processor in self.processors:
            if is_automaton(processor) or (self.unchecked and offers_automaton(processor)):
                offered[id(processor)] = self.constraints.of_automaton(processor, tokens, places.paths, size)
        positions, parents = _on_host(tree)
        possible = [[True] * logits.shape[1] for _ in done]
        every = torch.arange(len(done), device=logits.device)
        for length, chosen in _layers(tokens.lengths, positions, done):
            asked = [row for row, place in chosen.items() if possible[row][place]]
            if not asked:
                continue
            place = torch.tensor([chosen.get(row, 0) for row in range(len(done))], device=logits.device)
            shown, scores = ids[every, place, ids.shape[2] - length :], logits[every, place]
            rows = torch.tensor(asked, device=logits.device)
            for processor in self.processors:
                mask = offered[id(processor)][every, place] if id(processor) in offered else None
                if mask is not None and is_automaton(processor):
                    scores = scores.masked_fill(~mask, -torch.inf)
                    continue
                before = scores.clone() if self.unchecked else scores
                scores = _ask(processor, chosen, asked, shown, scores)
                if self.unchecked and (mask is not None or offers_mask(processor)):
                    offer = processor.allowed(shown[rows]) if mask is None else mask[rows]
                    self._compare(processor, fitted(offer, size, processor), before[rows], scores[rows])
            output[rows, place[rows]] = scores[rows].to(output.dtype)
            self._close(possible, asked, chosen, parents, scores.softmax(-1), tree.tokens)
        self.unchecked = max(self.unchecked - 1, 0)
        return output

    def _compare(self, processor: Any, offer: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        """Warns of a processor whose mask is not what it excludes [N, v]; its drafts are worse, and the text is not."""
        excluded = after == -torch.inf
        if bool(((excluded == offer) & (before > -torch.inf)).any()):
            logger.warning_once(
                f"{type(processor).__name__} excludes other tokens than its `allowed` says: drafts follow `allowed`, "
                "the text follows the processor, and fewer drafts are accepted than could be"
            )

    def _close(
        self,
        possible: list[list[bool]],
        asked: list[int],
        chosen: dict[int, int],
        parents: list[list[int]],
        distribution: torch.Tensor,
        drafted: torch.Tensor,
    ) -> None:
        """Marks places after the children of those that were asked about as impossible: after tokens that the
        distribution excludes, and after ends."""
        if not drafted.shape[1]:
            return
        is_end = (drafted[..., None] == numbers(tuple(sorted(self.ends)), drafted.device)).any(-1)
        allowed = ((distribution.gather(-1, drafted) > 0) & ~is_end).tolist()
        for row in asked:
            for node, parent in enumerate(parents[row]):
                if parent + 1 == chosen[row]:
                    possible[row][node + 1] = allowed[row][node]
                elif not possible[row][parent + 1]:
                    possible[row][node + 1] = False

    def warp(self, probs: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """Draft distributions [..., v] after the processors that look at scores alone; probabilities in, probabilities
        out.

        A draft's distribution may be any distribution, so the processors that read prefixes are left out: what they
        exclude is told by a mask.

        Args:
            probs: [..., v].
            allowed: [..., v] bool, tokens that may be drafted; uniform where the distribution has none of them.
        """
        if not self.pointwise and allowed is None:
            return probs
        if allowed is not None:
            probs = probs.masked_fill(~allowed, 0)
            total = probs.sum(-1, keepdim=True)
            probs = torch.where((total == 0) & allowed, 1.0, probs)
            if not self.pointwise:
                return probs / torch.where(total == 0, allowed.sum(-1, keepdim=True), total)
        flat = probs.flatten(0, -2).log()
        for processor in self.pointwise:
            flat = processor(None, flat)
        return flat.softmax(-1).view(probs.shape)


def _ask(
    processor: Any, chosen: dict[int, int], asked: list[int], ids: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    """Scores of all sequences after one processor; a constraint on prefixes is asked about its own rows only.

    One that allows nothing is refused where the text has come so far; after a draft it need not.
    """
    if not isinstance(processor, library.PrefixConstrainedLogitsProcessor):
        return processor(ids, scores)
    rows, empty = torch.tensor(asked, device=ids.device), list[int]()

    def allowed(index: int, prefix: torch.Tensor) -> list[int]:
        found = allowed_ids(processor, asked[index], prefix, scores.shape[-1])
        if found:
            return found
        if not chosen[asked[index]]:
            raise ValueError(
                f"prefix_allowed_tokens_fn allows nothing after the {len(prefix)} ids of row {asked[index]}"
            )
        empty.append(asked[index])
        return [0]

    of_rows = library.PrefixConstrainedLogitsProcessor(allowed, 1)(ids[rows], scores[rows])
    scores = scores.index_copy(0, rows, of_rows)
    for row in empty:
        scores[row] = -torch.inf
    return scores


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
