"""Logits processors at several positions after the sequences of a batch. Knows neither drafters nor models.

transformers' own run once over all positions. Where the list holds any other, it runs length by length, with all B
sequences of the batch in their order, so that a processor may know them by their index; sequences of another length
pass their newest ids (after padding, where they are shorter), and their result is dropped.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as library

from ..contract import DraftTree
from ..tensors.masks import numbers
from .constraints import (
    KNOWN,
    POINTWISE,
    Constraints,
    Positions,
    Processor,
    allowed_ids,
    apply_pointwise,
    is_automaton,
    offers_automaton,
    offers_mask,
)
from .sequences import Sequences
from .state import StateWatch, is_stateless

_COUNTING = (library.UnbatchedClassifierFreeGuidanceLogitsProcessor, library.SynthIDTextWatermarkLogitsProcessor)


def counts_calls(processor: LogitsProcessor) -> bool:
    """Return whether a processor must be called once for every token, as a user's says by `counts_calls = True`."""
    return isinstance(processor, _COUNTING) or bool(getattr(processor, "counts_calls", False))


class Processing:
    """Applies the processors that transformers prepared for a call, in their order.

    `pad` is an id of the vocabulary, for where a sequence has no token; after `ends` no processor is called.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        pad: int = 0,
        ends: frozenset[int] = frozenset(),
        prompt_length: int | None = None,
    ) -> None:
        self.processors: list[Processor] = list(processors)
        self.pad, self.ends = pad, ends
        self.pointwise = [p for p in self.processors if type(p) in POINTWISE]
        self.is_known = all(type(p) in KNOWN or is_automaton(p) for p in self.processors)
        self.reads_ids = any(type(p) is library.SuppressTokensLogitsProcessor for p in self.pointwise)
        self.is_pointwise = len(self.pointwise) == len(self.processors)
        self.constraints = Constraints(self.processors, ends, prompt_length)

    def __call__(self, tokens: Sequences, logits: Tensor, tree: DraftTree, done: list[bool]) -> Tensor:
        """Return the target's scores [B, m + 1, v] of logits after a draft; arbitrary for sequences that are done."""
        if not self.processors:
            return logits
        if not self.is_known:
            return self._by_length(tokens, logits, tree, done)[0]
        positions, flat = Positions(tokens, logits.shape[-1], tree), logits.flatten(0, 1)
        for processor in self.processors:
            flat = self.constraints.applied(processor, positions, flat, None)
        return flat.view(logits.shape)

    def until(
        self, tokens: Sequences, logits: Tensor, tree: DraftTree, done: list[bool], has_moved: Callable[[], bool]
    ) -> tuple[Tensor, list[int]]:
        """Return scores as plain decoding has them until `has_moved` after a call, and how many tokens they verify."""
        scores, end = self._by_length(tokens, logits, tree, done, has_moved)
        return scores, [max(end - length, 0) for length in tokens.lengths]

    def in_step(self, tokens: Sequences, logits: Tensor, done: list[bool]) -> Tensor:
        """Return scores [B, 1, v] as plain decoding does, once for every length that all open sequences have.

        Those of sequences that are further on, whose logits [B, m + 1, v] follow later tokens, are arbitrary.
        """
        lengths, scores = [n for n, ended in zip(tokens.lengths, done) if not ended], logits[:, 0]
        if not lengths:
            return logits[:, :1]
        ids, empty = tokens.columns(0, min(lengths), self.pad), DraftTree.chain(tokens.ids[:, :0])
        for processor in self.processors:
            if is_automaton(processor):
                paths = Positions(tokens, self.pad, empty).paths
                mask = self.constraints.of_automaton(processor, tokens, paths, scores.shape[-1])[:, 0]  # [B, v]
                scores = scores.masked_fill(~mask, -torch.inf)
            else:
                scores = processor(ids, scores)  # [B, v]
        return scores[:, None]

    def watch(self) -> StateWatch | None:
        """Return what notices processors with state; None: no processor may have any."""
        unknown = [p for p in self.processors if not (is_stateless(p) or offers_automaton(p) or offers_mask(p))]
        return StateWatch(unknown) if unknown else None

    def _by_length(
        self, tokens: Sequences, logits: Tensor, tree: DraftTree, done: list[bool], is_over: Callable[[], bool] = bool
    ) -> tuple[Tensor, int]:
        """Apply the whole list at one length after the other, along paths until they meet an end or an excluded token.

        Return also the length after which it `is_over`, or more than any.
        """
        positions, size = Positions(tokens, self.pad, tree), logits.shape[-1]
        output, ids, offered = logits.clone(), positions.ids, dict[int, Tensor]()
        for processor in self.processors:
            if is_automaton(processor):
                offered[id(processor)] = self.constraints.of_automaton(processor, tokens, positions.paths, size)
        depths, parents = _on_host(tree)
        possible = [[True] * logits.shape[1] for _ in done]
        every = torch.arange(len(done), device=logits.device)  # [B]
        for length, chosen in _layers(tokens.lengths, depths, done):
            used = [index for index, position in chosen.items() if possible[index][position]]
            if not used:
                continue
            here = every, torch.tensor([chosen.get(index, 0) for index in range(len(done))], device=logits.device)
            prefixes, scores = ids[..., ids.shape[2] - length :][here], logits[here]  # [B, length], [B, v]
            index = torch.tensor(used, device=logits.device)  # [b]
            for processor in self.processors:
                if id(processor) in offered:
                    scores = scores.masked_fill(~offered[id(processor)][here], -torch.inf)  # [B, v]
                else:
                    scores = _applied(processor, chosen, used, prefixes, scores)
            if is_over():
                return output, length
            output[index, here[1][index]] = scores[index].to(output.dtype)
            self._close(possible, used, chosen, parents, scores, tree.tokens)
        return output, sys.maxsize

    def _close(
        self,
        possible: list[list[bool]],
        used: list[int],
        chosen: dict[int, int],
        parents: list[list[int]],
        scores: Tensor,
        drafted: Tensor,
    ) -> None:
        """Mark the positions that follow a token which the scores exclude, or an end, as impossible."""
        if not drafted.shape[1]:
            return
        is_end = (drafted[..., None] == numbers(tuple(sorted(self.ends)), drafted.device)).any(-1)  # [B, m]
        allowed = ((scores.gather(-1, drafted) > -torch.inf) & ~is_end).tolist()
        for index in used:
            for node, parent in enumerate(parents[index]):
                if parent + 1 == chosen[index]:
                    possible[index][node + 1] = allowed[index][node]
                elif not possible[index][parent + 1]:
                    possible[index][node + 1] = False

    def warp(self, probs: Tensor, allowed: Tensor | None = None) -> Tensor:
        """Return draft probabilities [..., v] after the processors of scores alone, within `allowed` [..., v].

        A mask replaces those that read prefixes. Where no allowed token is possible, the result is uniform over them.
        """
        if not self.pointwise and allowed is None:
            return probs
        if allowed is not None:
            probs = probs.masked_fill(~allowed, 0)
            total = probs.sum(-1, keepdim=True)  # [..., 1]
            probs = torch.where((total == 0) & allowed, 1.0, probs)
            if not self.pointwise:
                return probs / torch.where(total == 0, allowed.sum(-1, keepdim=True), total)
        flat = probs.flatten(0, -2).log()  # [N, v]
        for processor in self.pointwise:
            flat = apply_pointwise(processor, flat)
        return flat.softmax(-1).view(probs.shape)


def _applied(processor: Processor, chosen: dict[int, int], used: list[int], ids: Tensor, scores: Tensor) -> Tensor:
    """Return the scores of all sequences after one processor; a prefix function is called for `used` sequences alone.

    One that allows nothing is an error after a sequence itself, and not after its draft.
    """
    if not isinstance(processor, library.PrefixConstrainedLogitsProcessor):
        return processor(ids, scores)
    index, empty = torch.tensor(used, device=ids.device), list[int]()

    def allowed(number: int, prefix: Tensor) -> list[int]:
        tokens = allowed_ids(processor, used[number], prefix)
        if tokens or not chosen[used[number]]:
            return tokens
        empty.append(used[number])
        return [0]

    constraint: Processor = library.PrefixConstrainedLogitsProcessor(allowed, 1)
    output = scores.index_copy(0, index, constraint(ids[index], scores[index]))  # [B, v]
    output[empty] = -torch.inf
    return output


def _on_host(tree: DraftTree) -> tuple[list[list[int]], list[list[int]]]:
    """Return the depths of positions and the parents of nodes of every sequence; those of a chain without a wait."""
    batch, length = tree.tokens.shape
    if tree.is_chain:
        return [list(range(length + 1))] * batch, [list(range(-1, length - 1))] * batch
    return tree.positions().tolist(), tree.parents.tolist()


def _layers(lengths: list[int], depths: list[list[int]], done: list[bool]) -> list[tuple[int, dict[int, int]]]:
    """Return rising lengths, with one position of that length for some sequences, until all of open ones have come."""
    layers: dict[tuple[int, int], dict[int, int]] = {}
    for index, (length, of_sequence) in enumerate(zip(lengths, depths)):
        met = Counter[int]()
        for position, depth in enumerate([] if done[index] else of_sequence):
            layers.setdefault((length + depth, met[depth]), {})[index] = position
            met[depth] += 1
    return [(key[0], layers[key]) for key in sorted(layers)]
