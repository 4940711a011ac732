"""Constraints that are automata: every token after the prompt changes a state, which tells what may come next.

Automata on the host cost a wait for every drafted token; tables of states and tokens stay on the device.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LogitsProcessor

from ..tensors.masks import cached_arange, numbers, to_device
from .sequences import Sequences


@runtime_checkable
class OffersAutomaton(Protocol):
    """A logits processor whose mask depends on a state; `start` is that after the prompt, and states are hashable."""

    start: Any

    def step(self, state: Any, token: int) -> Any:
        """Return the state after a token that `allowed(state)` allows."""
        ...

    def allowed(self, state: Any, /) -> Tensor:
        """Return which tokens may come next, [v] bool; tokens beyond its length may not."""
        ...


class _Free:
    """The state after an end or an excluded token: it excludes nothing, and what follows is never used."""


class _Remembered:
    """An automaton that ends after an excluded token, and remembers the masks and successors of its states."""

    def __init__(self, automaton: OffersAutomaton, ends: frozenset[int] = frozenset()) -> None:
        self.automaton, self.ends = automaton, ends
        self.mask, self.step = lru_cache(1024)(self._mask), lru_cache(1024)(self._step)

    def _mask(self, state: Hashable, size: int) -> Tensor:
        """Return the tokens that may come next, [size] bool on the host."""
        if state is _Free:
            return torch.ones(size).bool()
        return fitted(self.automaton.allowed(state), size, self.automaton).cpu()

    def _step(self, state: Hashable, token: int, size: int) -> Hashable:
        """Return the state after a token."""
        is_free = state is _Free or token in self.ends or not 0 <= token < size
        is_free = is_free or not bool(self.mask(state, size)[token])
        return _Free if is_free else self.automaton.step(state, token)


class AutomatonProcessor(LogitsProcessor):
    """A constraint that is an automaton; a subclass adds `start`, `step` and `allowed` (`OffersAutomaton`).

    In plain decoding, ids that are not those of the last call and one more start over. So take a new object where a
    prompt is the output of the last call of `generate`; where drafts are made, its end always has the state `start`.
    """

    start: Any = None
    _followed: tuple[_Remembered, dict[tuple[int, ...], Hashable]] | None = None

    def step(self, state: Any, token: int) -> Any:
        raise NotImplementedError

    def allowed(self, state: Any, /) -> Tensor:
        raise NotImplementedError

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Exclude the tokens that are not `allowed`; after an excluded token, as padding is, exclude nothing."""
        automaton, known = self._followed or (_Remembered(self), {})
        sequences, size = [tuple(ids) for ids in input_ids.tolist()], scores.shape[-1]
        if all(ids[:-1] in known for ids in sequences):
            known = {ids: automaton.step(known[ids[:-1]], ids[-1], size) for ids in sequences}
        else:
            known = dict.fromkeys(sequences, self.start)
        self._followed = automaton, known
        mask = torch.stack([automaton.mask(known[ids], size) for ids in sequences])  # [B, v]
        return scores.masked_fill(~mask.to(scores.device), -torch.inf)


class TableAutomaton(AutomatonProcessor):
    """An automaton of few states as tables, which drafts and their verification read without a wait.

    Args:
        next_states: [S, v] integers, the state after each token; not read where a token is not allowed.
        allowed: [S, v] bool.
        start: The state after the prompt.
    """

    def __init__(self, next_states: Tensor, allowed: Tensor, start: int = 0) -> None:
        states = torch.where(allowed, next_states, 0)  # [S, v]
        low, high = (int(bound) for bound in states.aminmax())
        if min(low, start) < 0 or max(high, start) >= len(states):
            raise ValueError(f"start={start} and next_states ({low} to {high}) must be states 0 to {len(states) - 1}")
        self.next_states, self.masks, self.start = states.int(), allowed, start
        self._prepared = dict[tuple[torch.device, frozenset[int], int], tuple[Tensor, Tensor]]()

    def step(self, state: int, token: int) -> int:
        return int(self.next_states[state, token])

    def allowed(self, state: int, /) -> Tensor:
        return self.masks[state]

    def prepared(self, device: torch.device, ends: frozenset[int], size: int) -> tuple[Tensor, Tensor]:
        """Return masks [S + 1, v], and the states after every token [S + 1, v + 1], on a device.

        State S follows an end or an excluded token, and excludes nothing; the last column, token -1, changes nothing.
        """
        key = device, ends, size
        if key not in self._prepared:
            masks = fitted(to_device(self.masks, device), size, self)
            end_ids = numbers(tuple(sorted(token for token in ends if token < size)), device)
            width, sink = self.next_states.shape[1], len(masks)
            following = pad(to_device(self.next_states, device)[:, :size], (0, max(size - width, 0)))  # [S, v]
            following = following.masked_fill(~masks.index_fill(1, end_ids, False), sink)  # to the sink
            following = pad(following, (0, 0, 0, 1), value=sink)  # [S + 1, v]
            same = torch.arange(sink + 1, dtype=torch.int32, device=device)[:, None]  # [S + 1, 1]
            self._prepared = {key: (pad(masks, (0, 0, 0, 1), value=True), torch.cat([following, same], dim=1))}
        return self._prepared[key]


def fitted(mask: Tensor, size: int, processor: object) -> Tensor:
    """Return a mask [..., w] over `size` tokens; tokens that it lacks are excluded."""
    if mask.dtype != torch.bool or (mask.shape[-1] > size and bool(mask[..., size:].any())):
        found = f"{mask.dtype} of {mask.shape[-1]}, not bool of the {size} tokens that may follow"
        raise ValueError(f"allowed of {type(processor).__name__} is {found}")
    return mask if mask.shape[-1] == size else pad(mask[..., :size], (0, max(size - mask.shape[-1], 0)))


class HostAutomatonState:
    """The states of an automaton along the sequences of a call, on the host; it reads what follows `begin` ids."""

    def __init__(
        self, automaton: OffersAutomaton, ends: frozenset[int], size: int, tokens: Sequences, begin: int
    ) -> None:
        self.automaton, self.size = _Remembered(automaton, ends), size
        self.states, self.lengths = [automaton.start] * len(tokens.lengths), [begin] * len(tokens.lengths)

    def allowed(self, tokens: Sequences, paths: Tensor) -> Tensor:
        """Return masks [B, P, v] after paths [B, P, J] int64, which -1 may fill up."""
        self._follow(tokens)
        after = [self._after(state, path) for state, found in zip(self.states, paths.tolist()) for path in found]
        masks = torch.stack([self.automaton.mask(state, self.size) for state in after])
        return to_device(masks, paths.device).view(*paths.shape[:2], self.size)  # [B, P, v]

    def likely(self, tokens: Sequences, paths: Tensor) -> list[int | None]:
        """Return, for the first path of every sequence, the token that an automaton says is likely next, if any."""
        self._follow(tokens)
        guess = getattr(self.automaton.automaton, "likely", lambda state: None)
        after = [self._after(state, path[0]) for state, path in zip(self.states, paths.tolist())]
        return [None if state is _Free else guess(state) for state in after]

    def _follow(self, tokens: Sequences) -> None:
        """Read the new tokens of every sequence."""
        counts, new = [now - old for old, now in zip(self.lengths, tokens.lengths)], tokens.newest_on_host
        if not any(counts):
            return
        if counts != list(map(len, new)):  # more than one cycle, or a loop that does not set it
            newest = tokens.newest(max(counts)).tolist()
            new = [ids[len(ids) - count :] for ids, count in zip(newest, counts)]
        self.states = [self._after(state, ids) for state, ids in zip(self.states, new)]
        self.lengths = list(tokens.lengths)

    def _after(self, state: Hashable, path: list[int]) -> Hashable:
        for token in path:
            if token >= 0:
                state = self.automaton.step(state, token, self.size)
        return state


class DeviceAutomatonState:
    """The states of a table along the sequences of a call, on the device; arguments as for `HostAutomatonState`."""

    def __init__(
        self, automaton: TableAutomaton, ends: frozenset[int], size: int, tokens: Sequences, begin: int
    ) -> None:
        self.masks, self.following = automaton.prepared(tokens.ids.device, ends, size)
        self.states = torch.full_like(tokens.ends, automaton.start, dtype=torch.int32)  # [B]
        self.lengths, self.begun = [begin] * len(tokens.lengths), torch.full_like(tokens.ends, begin)

    def allowed(self, tokens: Sequences, paths: Tensor) -> Tensor:
        new = max(now - old for old, now in zip(self.lengths, tokens.lengths))
        if new:
            source = self.begun[:, None] + cached_arange(new, tokens.ids.device)  # [B, n]
            ids = tokens.at(source).masked_fill(source >= tokens.ends[:, None], -1)  # [B, n]
            self.states = self._after(self.states, ids)  # [B]
            self.lengths, self.begun = list(tokens.lengths), tokens.ends
        return self.masks[self._after(self.states[:, None].expand(paths.shape[:2]), paths)]  # [B, P, v]

    def _after(self, states: Tensor, paths: Tensor) -> Tensor:
        for token in paths.unbind(-1):
            states = self.following[states, token]
        return states
