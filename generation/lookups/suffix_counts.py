"""How often every run of tokens was read, and what came next.

A trie of all runs of at most `depth` tokens that were read: the node of a run counts how often it was read, and its
children are the tokens that came next.

    read a b a c       root -- a (2) -- b (1) -- a (1)
                            |        '- c (1)
                            |- b (1) -- a (1) -- c (1)
                            '- c (1)

It forgets a generation at a time: when the young trie has half of the nodes that are allowed, it becomes the old one,
and the old one goes. Look-ups add the counts of both.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any


class _Node:
    """A run of tokens: how often it was read, and what came next."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count, self.children = 0, dict[int, _Node]()


class Reader:
    """The position of one sequence: its last tokens, and the nodes of the runs that end with the newest of them."""

    def __init__(self) -> None:
        self.tail: list[int] = []
        self.generation, self.nodes = 0, list[_Node]()

    def follow(self, token: int, depth: int) -> None:
        """Move on to the next token of the sequence, and count nothing."""
        self.tail = [*self.tail[-(depth - 2) :], token] if depth > 2 else [token]


class SuffixCounts:
    """Continuations of the last tokens of a sequence, by how often they came next.

    Several threads may read and look up at once.

    Args:
        depth: Tokens of the longest run.
        max_nodes: Nodes of both generations; one takes about 300 bytes.
    """

    def __init__(self, depth: int, max_nodes: int) -> None:
        self.depth, self.max_nodes = depth, max_nodes
        self._young, self._old, self._size, self._generation = _Node(), _Node(), 0, 0
        self._old_size = self.used = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Nodes of both generations."""
        return self._size + self._old_size

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def read(self, reader: Reader, tokens: Sequence[int]) -> None:
        """Count the runs that end with each of the next tokens of a sequence."""
        with self._lock:
            for token in tokens:
                self._read(reader, token)

    def _read(self, reader: Reader, token: int) -> None:
        if self._size + self.depth > self.max_nodes // 2:
            self._old, self._young, self._old_size, self._size = self._young, _Node(), self._size, 0
            self._generation += 1
        if reader.generation != self._generation:
            reader.generation, reader.nodes = self._generation, []
        longer = []
        for node in [self._young, *reader.nodes]:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = _Node()
                self._size += 1
            child.count += 1
            longer.append(child)
        reader.nodes = longer[: self.depth - 1]
        reader.follow(token, self.depth)

    def draft(
        self,
        tail: Sequence[int],
        length: int,
        nodes: int,
        width: int,
        factor: float,
        least: float,
        allowed: Callable[[int], bool] | None = None,
    ) -> tuple[list[tuple[int, int]], float]:
        """Return a likely continuation of the last tokens, and how many tokens of it should be accepted by the counts.

        A draft is at most `nodes` tokens, and the numbers of their parents (-1: the last token of `tail`), in paths of
        at most `length`, with at most `width` children each. Of the runs that end the sequence, the one whose draft is
        expected to be accepted furthest is followed; long runs may draft more than short ones (SuffixDecoding, Oliaro
        et al. 2024, section 4). A draft begins with an `allowed` token.
        """
        best, expected = list[tuple[int, int]](), 0.0
        with self._lock:
            for matched, ends in self._matches(tail):
                size = min(nodes, int(factor * matched))
                if size <= expected:  # a token adds at most 1
                    break
                draft, score = _grown(ends, length, size, width, least, allowed)
                if score > expected:
                    best, expected = draft, score
        return best, expected

    def _matches(self, tail: Sequence[int]) -> Iterator[tuple[int, list[_Node]]]:
        """Yield the runs that end the sequence and have continuations: lengths, long ones first, and nodes."""
        for matched in range(min(len(tail), self.depth - 1), 0, -1):
            nodes = [node for root in (self._young, self._old) if (node := _walk(root, tail[-matched:])) is not None]
            if any(node.children for node in nodes):
                yield matched, nodes

    def bounds(self) -> tuple[int, int]:
        """Return the smallest and the largest token that was read; of none (0, 0)."""
        with self._lock:
            tokens = {*self._young.children, *self._old.children} or {0}
        return min(tokens), max(tokens)

    def flat(self) -> tuple[list[int], list[int], list[int]]:
        """Return tokens, numbers of parents (-1: the root), and counts of all nodes, parents first."""
        tokens, parents, counts = list[int](), list[int](), list[int]()
        with self._lock:
            waiting = [(-1, [self._old, self._young])]
            for parent, nodes in waiting:
                for token in sorted(set(chain.from_iterable(node.children for node in nodes))):
                    below = [node.children[token] for node in nodes if token in node.children]
                    tokens.append(token)
                    parents.append(parent)
                    counts.append(sum(node.count for node in below))
                    waiting.append((len(tokens) - 1, below))
        return tokens, parents, counts

    def load(self, tokens: list[int], parents: list[int], counts: list[int]) -> None:
        """Replace all counts by those that `flat` returned."""
        nodes = [_Node() for _ in tokens]
        with self._lock:
            self._young, self._old, self._generation = _Node(), _Node(), self._generation + 1
            self._old_size, self._size = len(tokens), 0
            for node, token, parent, count in zip(nodes, tokens, parents, counts):
                node.count = count
                (nodes[parent] if parent >= 0 else self._old).children[token] = node


def _walk(root: _Node, run: Sequence[int]) -> _Node | None:
    """Return the node of a run."""
    node: _Node | None = root
    for token in run:
        node = node and node.children.get(token)
    return node


def _grown(
    nodes: list[_Node], length: int, size: int, width: int, least: float, allowed: Callable[[int], bool] | None
) -> tuple[list[tuple[int, int]], float]:
    """Return the likeliest tokens below the nodes of a run, best first, and how many are expected to be accepted."""
    draft, score = list[tuple[int, int]](), 0.0
    waiting = _children(nodes, 1.0, -1, 1, width, allowed)
    heapq.heapify(waiting)
    while waiting and len(draft) < size:
        chance, _, _, token, parent, depth, nodes = heapq.heappop(waiting)
        if -chance < least:
            break
        draft.append((token, parent))
        score -= chance
        if depth < length:
            for child in _children(nodes, -chance, len(draft) - 1, depth + 1, width):
                heapq.heappush(waiting, child)
    return draft, score


def _children(
    nodes: list[_Node], chance: float, parent: int, depth: int, width: int, allowed: Callable[[int], bool] | None = None
) -> list[tuple[float, int, int, int, int, int, list[_Node]]]:
    """Return the likeliest continuations of a run, in the order of a heap; of equal ones smaller tokens are first."""
    counts: dict[int, int] = {}
    for node in nodes:
        for token, child in node.children.items():
            if allowed is None or allowed(token):
                counts[token] = counts.get(token, 0) + child.count
    total = sum(counts.values())
    likeliest = heapq.nsmallest(width, counts, key=lambda token: (-counts[token], token))
    return [
        (-chance * counts[token] / total, parent, rank, token, parent, depth,
         [node.children[token] for node in nodes if token in node.children])
        for rank, token in enumerate(likeliest)
    ]  # fmt: skip
