"""Where runs of tokens stand in the text that was read, and what came next.

A text is an array of tokens. The places where a pair of tokens ends, and those of a token, are chains, newest first:

    position      0  1  2  3  4  5  6
    token         a  b  a  c  a  b  d
    same pair                 4        positions back to where the pair "a b" ended before
    same token          2     2  4

Sequences of a batch are written by turns, so that every token knows how far back the one before it is, and how far
ahead the next one. When the arrays are full, the oldest tokens are overwritten.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

_PIECE = 1 << 15
"""Tokens that are linked at once; more need much memory for a moment."""
_FEWEST = 256
"""Tokens that there is room for at first."""
_NEWEST = 32
"""Places of a run whose continuations are counted."""
_VISITED = 4 * _NEWEST
"""Links that are followed for these: others with the same hash are skipped."""
_ODD, _ALSO_ODD, _WORD = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, (1 << 64) - 1

Allowed = Callable[[int], bool] | None


class Reader:
    """The position of one sequence: its last tokens, and where the newest of them stands in the text (-1: nowhere)."""

    def __init__(self) -> None:
        self.tail: list[int] = []
        self.last = -1

    def follow(self, tokens: Sequence[int], depth: int) -> None:
        """Move on to the next tokens of the sequence, and store nothing."""
        self.tail = [*self.tail, *tokens][-(depth - 1) :]


class SuffixTable:
    """Continuations of the last tokens of a sequence, by how often they came next.

    Several threads may read and look up at once.

    Args:
        depth: Tokens of the longest run.
        max_tokens: Tokens that are remembered; one takes 28 bytes, and up to 56 where their number is no power of two.
    """

    def __init__(self, depth: int, max_tokens: int) -> None:
        self.depth, self.max_tokens, self.used = depth, max_tokens, 0
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget all text."""
        self.bounds = 0, 0  # the smallest and the largest token that was read
        self._written, self._capacity = 0, 0
        self._tokens, self._before, self._after = (np.zeros(0, np.int32) for _ in range(3))
        self._links, self._heads = np.zeros((2, 0), np.int32), np.zeros((2, 0), np.int64)

    @property
    def size(self) -> int:
        """Tokens that are remembered."""
        return min(self._written, self._capacity)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def read(self, readers: Sequence[Reader], texts: Sequence[Sequence[int]]) -> None:
        """Store the next tokens of sequences."""
        piece = max(1, min(_PIECE, self.max_tokens // (2 * max(len(texts), 1))))
        with self._lock:
            for start in range(0, max(map(len, texts), default=0), piece):
                parts = [(reader, text[start : start + piece]) for reader, text in zip(readers, texts)]
                self._read([(reader, part) for reader, part in parts if part])

    def _read(self, parts: list[tuple[Reader, Sequence[int]]]) -> None:
        tokens = np.fromiter(chain.from_iterable(part for _, part in parts), np.int32)  # [N]
        self._reserve(len(tokens))
        before, left = np.ones_like(tokens), np.empty(len(tokens), np.int64)  # [N]
        left[1:] = tokens[:-1]
        start, forgotten = 0, max(self._written + len(tokens) - self._capacity, 0)
        for reader, part in parts:
            before[start] = self._written + start - reader.last if reader.last >= forgotten else 0
            left[start] = reader.tail[-1] if reader.tail else -1
            start += len(part)
            reader.last = self._written + start - 1
            reader.follow(part, self.depth)
        positions = np.arange(self._written, self._written + len(tokens))  # [N]
        self._written += len(tokens)
        places, follows = positions % self._capacity, before > 0
        self._tokens[places], self._before[places], self._after[places] = tokens, before, 0
        self._after[(positions - before)[follows] % self._capacity] = before[follows]
        self._link(positions, tokens, left)
        lowest, highest = min(min(part) for _, part in parts), max(max(part) for _, part in parts)
        low, high = self.bounds if self._written > len(tokens) else (lowest, highest)
        self.bounds = min(low, lowest), max(high, highest)

    def _reserve(self, number: int) -> None:
        """Make room for more tokens, while there may be more; what is there is linked again, by longer hashes."""
        if (wanted := self._written + number) <= self._capacity or self._capacity == self.max_tokens:
            return
        self._capacity = min(max(1 << (wanted - 1).bit_length(), _FEWEST), self.max_tokens)
        more = (0, self._capacity - len(self._tokens))
        self._tokens, self._before, self._after = (
            np.pad(each, more) for each in (self._tokens, self._before, self._after)
        )
        self._links = np.zeros((2, self._capacity), np.int32)
        self._heads = np.full((2, 1 << (self._capacity // 2 - 1).bit_length()), -1)
        for start in range(0, self._written, _PIECE):
            positions = np.arange(start, min(start + _PIECE, self._written))
            before = self._before[positions]
            left = np.where(before > 0, self._tokens[positions - before].astype(np.int64), -1)
            self._link(positions, self._tokens[positions], left)

    def _link(self, positions: NDArray[np.int64], tokens: NDArray[np.int32], left: NDArray[np.int64]) -> None:
        """Chain tokens [N], and the pairs with those to their left, to the places before with the same hash."""
        buckets, number = self._heads.shape[1], len(tokens)
        keys = np.empty((2, number), np.uint64)  # [2, N]
        np.multiply(tokens, np.uint64(_ALSO_ODD), out=keys[1], dtype=np.uint64, casting="unsafe")
        np.multiply(left, np.uint64(_ODD), out=keys[0], dtype=np.uint64, casting="unsafe")
        keys[0] += keys[1]
        keys >>= np.uint64(65 - buckets.bit_length())
        keys[1] += np.uint64(buckets)
        flat = keys.reshape(-1)
        order = flat.argsort(kind="stable")  # [2 N]
        flat, places = flat[order], positions[order % number]
        starts, earlier = np.ones(2 * number + 1, bool), np.empty(2 * number, np.int64)
        np.not_equal(flat[1:], flat[:-1], out=starts[1:-1])
        heads, ends = self._heads.reshape(-1), starts[1:]
        earlier[1:] = places[:-1]
        firsts = starts[:-1]
        earlier[firsts] = heads[flat[firsts]]
        distance = places - earlier
        distance[(earlier < 0) | (distance >= self._capacity)] = 0
        self._links.reshape(-1)[order // number * self._capacity + places % self._capacity] = distance
        heads[flat[ends]] = places[ends]

    def draft(
        self,
        tail: Sequence[int],
        length: int,
        nodes: int,
        width: int,
        factor: float,
        least: float,
        allowed: Allowed = None,
    ) -> tuple[list[tuple[int, int]], float]:
        """Return a likely continuation of the last tokens, and how many tokens of it should be accepted by the counts.

        A draft is at most `nodes` tokens, and the numbers of their parents (-1: the last token of `tail`), in paths of
        at most `length`, with at most `width` children each. Of the runs that end the sequence, the one whose draft is
        expected to be accepted furthest is followed; long runs may draft more than short ones (SuffixDecoding, Oliaro
        et al. 2024, section 4). A draft begins with an `allowed` token.
        """
        best, expected = list[tuple[int, int]](), 0.0
        with self._lock:
            if not self._written:
                return best, expected
            view = _View(self._tokens, self._before, self._after, self._written)
            for matched, ends in self._matches(view, tail[-(self.depth - 1) :]):
                size = min(nodes, int(factor * matched))
                if size <= expected:  # a token adds at most 1
                    break
                draft, score = _grown(view, ends, length, size, width, least, allowed)
                if score > expected:
                    best, expected = draft, score
        return best, expected

    def _matches(self, view: _View, tail: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield how many of the last tokens stand elsewhere, most first, and where these places end."""
        found: dict[int, int] = {}
        for kind in (0, 1) if len(tail) > 1 else (1,) if tail else ():
            found |= self._places(view, kind, tail)
            for matched in sorted(set(found.values()), reverse=True):
                if matched > 1 or kind == 1:
                    yield matched, [end for end, number in found.items() if number >= matched]

    def _places(self, view: _View, kind: int, tail: Sequence[int]) -> dict[int, int]:
        """Return the newest places where the last pair (kind 0) or token (1) ends, and how many tokens match there."""
        pair = tail[-2] * _ODD if kind == 0 else 0
        key = ((pair + tail[-1] * _ALSO_ODD) & _WORD) >> (65 - self._heads.shape[1].bit_length())
        links, end, found = self._links[kind].data, self._heads.item(kind, key), dict[int, int]()
        for _ in range(_VISITED):
            if end <= view.forgotten or len(found) == _NEWEST:
                break
            if view.follows(end) and (matched := view.matched(end, tail)) > 1 - kind:
                found[end] = matched
            if not (step := links[end % len(links)]):
                break
            end -= step
        return found

    def texts(self) -> list[list[int]]:
        """Return what is remembered of every text, oldest first."""
        texts = list[list[int]]()
        with self._lock:
            view = _View(self._tokens, self._before, self._after, self._written)
            for position in range(view.forgotten + 1, self._written):
                if view.previous(position) < 0:
                    texts.append([view.token(each) for each in view.onwards(position)])
        return texts


class _View:
    """The arrays of a table, as plain numbers."""

    def __init__(
        self, tokens: NDArray[np.int32], before: NDArray[np.int32], after: NDArray[np.int32], written: int
    ) -> None:
        self._tokens, self._before, self._after = tokens.data, before.data, after.data
        self._size = len(tokens)
        self.forgotten = max(written - self._size, 0) - 1  # the newest position that is overwritten; -1: none

    def token(self, position: int) -> int:
        return self._tokens[position % self._size]

    def previous(self, position: int) -> int:
        """Return the position of the token before; -1: there is none, or it is forgotten."""
        step = self._before[position % self._size]
        return position - step if step and position - step > self.forgotten else -1

    def follows(self, position: int) -> int:
        """Return how far ahead the next token is; 0: there is none."""
        return self._after[position % self._size]

    def onwards(self, position: int) -> Iterator[int]:
        """Yield this position, and those of all tokens that follow."""
        step = 1
        while step:
            yield position
            step = self.follows(position)
            position += step

    def next_places(self, ends: list[int]) -> dict[int, list[int]]:
        """Return the tokens that follow places, and where they stand."""
        tokens, after, size, places = self._tokens, self._after, self._size, dict[int, list[int]]()
        for end in ends:
            if step := after[end % size]:
                end += step
                places.setdefault(tokens[end % size], []).append(end)
        return places

    def matched(self, end: int, tail: Sequence[int]) -> int:
        """Return how many of the last tokens stand before and at a position."""
        tokens, before, size, number = self._tokens, self._before, self._size, 0
        for token in reversed(tail):
            place = end % size
            if tokens[place] != token:
                break
            number += 1
            step = before[place]
            end -= step
            if not step or end <= self.forgotten:
                break
        return number


def _grown(
    view: _View, ends: list[int], length: int, size: int, width: int, least: float, allowed: Allowed
) -> tuple[list[tuple[int, int]], float]:
    """Return the likeliest tokens after some places, best first, and how many are expected to be accepted."""
    draft, score = list[tuple[int, int]](), 0.0
    waiting = _children(view, ends, 1.0, -1, 1, width, allowed)
    heapq.heapify(waiting)
    while waiting and len(draft) < size:
        chance, _, _, token, parent, depth, ends = heapq.heappop(waiting)
        if -chance < least:
            break
        draft.append((token, parent))
        score -= chance
        if depth < length:
            for child in _children(view, ends, -chance, len(draft) - 1, depth + 1, width):
                heapq.heappush(waiting, child)
    return draft, score


def _children(
    view: _View, ends: list[int], chance: float, parent: int, depth: int, width: int, allowed: Allowed = None
) -> list[tuple[float, int, int, int, int, int, list[int]]]:
    """Return the likeliest next tokens, in the order of a heap; of equal ones smaller tokens are first."""
    places = view.next_places(ends)
    if allowed is not None:
        places = {token: found for token, found in places.items() if allowed(token)}
    total = sum(map(len, places.values()))
    # most continuations are the only ones
    likeliest = sorted(places, key=lambda token: (-len(places[token]), token))[:width] if len(places) > 1 else places
    return [
        (-chance * len(places[token]) / total, parent, rank, token, parent, depth, places[token])
        for rank, token in enumerate(likeliest)
    ]
