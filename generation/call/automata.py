"""Constraints that are automata: a state, which every token after the prompt moves on, says which tokens may come next.

Automata of the host cost a wait for every drafted token, and what they said of a state is remembered; tables of states
and tokens (`TableAutomaton`) stay on the device.
"""

from __future__ import annotations

from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor

from ...modeling.masks import cached_arange, numbers, to_device
from .sequences import Sequences

_SEEN = 1024
"""States that are remembered."""


@runtime_checkable
class OffersAutomaton(Protocol):
    """A logits processor whose mask depends on a state.

    Attributes:
        start: The state after the prompt; states are hashable.
    """

    start: Any

    def step(self, state: Any, token: int) -> Any:
        """Return the state after a token that `allowed(state)` allows."""
        ...

    def allowed(self, state: Any, /) -> Tensor:
        """Return which tokens may come next, [v] bool; tokens beyond its length may not."""
        ...


class _Free:
    """The state after an end or an excluded token: what follows is never used, and nothing is excluded."""


class _Remembered:
    """An automaton that ends after an excluded token, and remembers what it said of the states that it was in."""

    def __init__(self, automaton: OffersAutomaton, ends: frozenset[int] = frozenset()) -> None:
        self.automaton, self.ends = automaton, ends
        self.masks, self.next = dict[Any, Tensor](), dict[Any, Any]()

    def mask(self, state: Any, size: int) -> Tensor:
        """The tokens that may come next, [size] bool on the host."""
        found = self.masks.get((state, size))
        if found is None:
            free = state is _Free
            found = torch.ones(size).bool() if free else fitted(self.automaton.allowed(state), size, self.automaton)
            _remember(self.masks, (state, size), found := found.cpu())
        return found

    def step(self, state: Any, token: int, size: int) -> Any:
        """The state after a token."""
        if (state, token) not in self.next:
            is_free = state is _Free or token in self.ends or not 0 <= token < size
            is_free = is_free or not bool(self.mask(state, size)[token])
            _remember(self.next, (state, token), _Free if is_free else self.automaton.step(state, token))
        return self.next[state, token]


def _remember(seen: dict[Any, Any], key: Any, value: Any) -> None:
    if len(seen) >= _SEEN:
        seen.clear()
    seen[key] = value


class AutomatonProcessor(LogitsProcessor):
    """A constraint that is an automaton; a subclass adds `start`, `step` and `allowed` (`OffersAutomaton`).

    In plain decoding every row is followed from its prompt on: ids that are not those of the last call and one more
    begin anew. So take a new object where a prompt is what the last call of `generate` wrote, and the state after it
    is to be `start`; where drafts are made, it always is.
    """

    start: Any = None
    _rows: tuple[_Remembered, dict[tuple[int, ...], Any]] | None = None

    def step(self, state: Any, token: int) -> Any:
        """See `OffersAutomaton`."""
        raise NotImplementedError

    def allowed(self, state: Any, /) -> Tensor:
        """See `OffersAutomaton`."""
        raise NotImplementedError

    def __call__(self, input_ids: Tensor, scores: Tensor) -> torch.FloatTensor:
        """Exclude what `allowed` does not name; after an excluded token, as padding is, nothing."""
        automaton, known = self._rows or (_Remembered(self), {})
        rows, size = [tuple(row) for row in input_ids.tolist()], scores.shape[-1]
        if all(row[:-1] in known for row in rows):
            known = {row: automaton.step(known[row[:-1]], row[-1], size) for row in rows}
        else:
            known = dict.fromkeys(rows, self.start)
        self._rows = automaton, known
        mask = torch.stack([automaton.mask(known[row], size) for row in rows])
        return cast(torch.FloatTensor, scores.masked_fill(~mask.to(scores.device), -torch.inf))


class TableAutomaton(AutomatonProcessor):
    """An automaton of few states as tables, which drafts and their verification read without a wait.

    Args:
        next_states: [S, v] integers, the state after each token; not read where a token is not allowed.
        allowed: [S, v] bool.
        start: The state after the prompt.

    Raises:
        ValueError: Tables that do not fit, or a state that is none.
    """

    def __init__(self, next_states: Tensor, allowed: Tensor, start: int = 0) -> None:
        if next_states.dim() != 2 or next_states.shape != allowed.shape or allowed.dtype != torch.bool:
            shapes = f"{tuple(next_states.shape)} and {tuple(allowed.shape)} of {allowed.dtype}"
            raise ValueError(f"next_states and allowed are {shapes}: both must be [states, tokens], the second of bool")
        states = torch.where(allowed, next_states, 0)
        low, high = (int(found) for found in states.aminmax())
        if min(low, start) < 0 or max(high, start) >= len(states):
            raise ValueError(f"start={start} and next_states ({low} to {high}) must be states 0 to {len(states) - 1}")
        self.next_states, self.masks, self.start = states.int(), allowed, start
        self._prepared = dict[tuple[torch.device, frozenset[int], int], tuple[Tensor, Tensor]]()

    def step(self, state: int, token: int) -> int:
        """See `OffersAutomaton`."""
        return int(self.next_states[state, token])

    def allowed(self, state: int, /) -> Tensor:
        """See `OffersAutomaton`."""
        return self.masks[state]

    def prepared(self, device: torch.device, ends: frozenset[int], size: int) -> tuple[Tensor, Tensor]:
        """Return masks [S + 1, v], and the states after every token [S + 1, v + 1], on a device.

        State S follows an end or an excluded token, and excludes nothing; the last column, token -1, changes nothing.
        """
        key = device, ends, size
        if key not in self._prepared:
            masks = fitted(to_device(self.masks, device), size, self)
            goes_on = masks.index_fill(
                1, numbers(tuple(sorted(token for token in ends if token < size)), device), False
            )
            width, sink = self.next_states.shape[1], len(masks)
            following = pad(to_device(self.next_states, device)[:, :size], (0, max(size - width, 0)))
            following = pad(following.masked_fill(~goes_on, sink), (0, 0, 0, 1), value=sink)
            stays = torch.arange(sink + 1, dtype=torch.int32, device=device)[:, None]
            self._prepared = {key: (pad(masks, (0, 0, 0, 1), value=True), torch.cat([following, stays], dim=1))}
        return self._prepared[key]


def fitted(mask: Tensor, size: int, processor: Any) -> Tensor:
    """Return a mask [..., w] over `size` tokens; those that it does not have are excluded.

    Raises:
        ValueError: It is no mask, or allows a token beyond the vocabulary.
    """
    name = f"allowed of {type(processor).__name__}"
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} gives {mask.dtype}: a mask is of bool, True where a token may follow")
    if mask.shape[-1] > size and bool(mask[..., size:].any()):
        token = int(mask.nonzero()[:, -1].max())
        raise ValueError(f"{name} allows token {token}, but the vocabulary ends at {size - 1}")
    return mask if mask.shape[-1] == size else pad(mask[..., :size], (0, max(size - mask.shape[-1], 0)))


class HostWalk:
    """The states of an automaton along the sequences of a call, on the host.

    Args:
        automaton: Says what is allowed.
        ends: Ids that end a sequence.
        size: v, tokens of the vocabulary.
        tokens: The sequences.
        begin: Ids before the first that the automaton reads.
    """

    def __init__(
        self, automaton: OffersAutomaton, ends: frozenset[int], size: int, tokens: Sequences, begin: int
    ) -> None:
        self.automaton, self.size = _Remembered(automaton, ends), size
        self.states, self.lengths = [automaton.start] * len(tokens.lengths), [begin] * len(tokens.lengths)

    def allowed(self, tokens: Sequences, paths: Tensor) -> Tensor:
        """Masks [B, P, v] after paths [B, P, J] int64, which -1 may fill up."""
        self._follow(tokens)
        found = [
            self.automaton.mask(self._after(state, path), self.size)
            for state, row in zip(self.states, paths.tolist())
            for path in row
        ]
        return to_device(torch.stack(found), paths.device).view(*paths.shape[:2], self.size)

    def _follow(self, tokens: Sequences) -> None:
        """Goes on to the end of every sequence."""
        behind = [old for old, now in zip(self.lengths, tokens.lengths) if old < now]
        if not behind:
            return
        counts, new = [now - old for old, now in zip(self.lengths, tokens.lengths)], tokens.newest_on_host
        if counts != list(map(len, new)):  # more than one cycle, or a loop that does not say
            rows = tokens.ids[:, min(behind) : max(tokens.lengths)].tolist()
            new = [ids[old - min(behind) :][:count] for ids, old, count in zip(rows, self.lengths, counts)]
        self.states = [self._after(state, ids[:count]) for state, ids, count in zip(self.states, new, counts)]
        self.lengths = list(tokens.lengths)

    def _after(self, state: Any, path: list[int]) -> Any:
        for token in path:
            if token >= 0:
                state = self.automaton.step(state, token, self.size)
        return state


class TableWalk:
    """The states of a table along the sequences of a call, on the device; arguments as for `HostWalk`."""

    def __init__(
        self, automaton: TableAutomaton, ends: frozenset[int], size: int, tokens: Sequences, begin: int
    ) -> None:
        self.masks, self.following = automaton.prepared(tokens.ids.device, ends, size)
        self.states = torch.full_like(tokens.ends, automaton.start, dtype=torch.int32)
        self.lengths, self.begun = [begin] * len(tokens.lengths), torch.full_like(tokens.ends, begin)

    def allowed(self, tokens: Sequences, paths: Tensor) -> Tensor:
        """See `HostWalk`."""
        new = max(now - old for old, now in zip(self.lengths, tokens.lengths))
        if new:
            source = self.begun[:, None] + cached_arange(new, tokens.ids.device)
            found = tokens.ids.gather(1, source).masked_fill(source >= tokens.ends[:, None], -1)
            self.states = self._after(self.states, found)
            self.lengths, self.begun = list(tokens.lengths), tokens.ends
        return self.masks[self._after(self.states[:, None].expand(paths.shape[:2]), paths)]

    def _after(self, states: Tensor, paths: Tensor) -> Tensor:
        for token in paths.unbind(-1):
            states = self.following[states, token]
        return states
