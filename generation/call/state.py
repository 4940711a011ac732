"""State of logits processors that their calls move on: grammar matchers, counters, penalties that remember.

Such a processor must be called once for every token, in order. Which ones do is seen by what is reachable from them:
attributes, containers, tensors, closures, and names of the module that their functions read. Generators, and matchers
of compiled extensions, cannot be put back: they are known to move.
"""

from __future__ import annotations

import gc
import logging
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.generation import logits_process as library

_STATEFUL = (library.DiaEOSDelayPatternLogitsProcessor, library.WhisperNoSpeechDetection)
_MOST = 5000  # objects that are looked at for one processor, the nearest first
_SMALL = 2**14  # elements that are compared; of larger tensors the version is, and of other containers the length
_COPIED = 2**22  # elements of a tensor that are copied, to be put back
_PLAIN = str, bytes, int, float, complex, type(None)
_OPAQUE = nn.Module, nn.Parameter, PreTrainedTokenizerBase, PreTrainedConfig, ModuleType, logging.Logger, type
"""What no call is expected to change but for caches."""
_GENERATORS = random.Random, np.random.Generator, torch.Generator
_ADVANCING = ("accept_token", "accept_tokens", "consume_token", "consume_tokens", "try_consume_tokens", "commit_token")
"""Methods of grammar matchers of compiled extensions (xgrammar, llguidance)."""


def is_stateless(processor: object) -> bool:
    """Return whether a processor is known to depend on ids and scores alone: most of transformers' own are, and a
    user's says so by `counts_calls = False`."""
    is_own = type(processor).__module__ == library.__name__ and not isinstance(processor, _STATEFUL)
    return is_own or getattr(processor, "counts_calls", None) is False


class _Held:
    """What an object holds, as it was, and how to put it back."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.read, self.write, self.value = read, write, read()


def _is_same(before: object, now: object) -> bool:
    if before is now:
        return True
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        return all(map(operator.is_, before, now)) or all(map(_is_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        if before.keys() != now.keys():
            return False
        return all(map(operator.is_, before.values(), now.values())) or all(_is_same(before[k], now[k]) for k in now)
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and bool(torch.equal(before, now))
    return type(before) is type(now) and isinstance(before, _PLAIN) and (before == now or before != before)


class StateWatch:
    """The state that is reachable from processors.

    The one of the class `name` moved last, or `has_matcher`: an object that is known to move, and cannot be put back.
    """

    def __init__(self, processors: Iterable[object]) -> None:
        self.processors, self.name, self.has_matcher = list(processors), "", False
        self.held: list[tuple[str, _Held]] = []

    def note(self) -> None:
        """Remember the state before a call."""
        if not self.held or self.moved() is not None:
            self.held, self.has_matcher = [], False
            for processor in self.processors:
                self._walk(processor, getattr(processor, "__name__", type(processor).__name__))

    def has_moved(self) -> bool:
        """Return whether the state is another one than `note` remembered, or holds a matcher now."""
        moved = self.moved()
        if moved is None:
            return self.has_matcher
        before, self.held = self.held, []
        self.note()  # an object that the call made may be a matcher
        self.held, self.name = before, self.name if self.has_matcher else moved
        return True

    def restore(self) -> None:
        """Put back what `note` remembered."""
        for _, held in self.held:
            if not _is_same(held.value, held.read()):
                held.write(held.value)

    def moved(self) -> str | None:
        """Return the class of a processor whose state is not the one that `note` remembered; None: there is none."""
        return next((name for name, held in self.held if not _is_same(held.value, held.read())), None)

    def _walk(self, root: object, name: str) -> None:
        """Remember what can change, of the objects that are reachable from a processor."""
        seen, queue = set[int](), deque([root])

        def remember(held: _Held) -> None:
            self.held.append((name, held))
            queue.extend(held.value.values() if isinstance(held.value, dict) else ())
            queue.extend(held.value if isinstance(held.value, dict | tuple) else ())

        for kind in () if isinstance(root, FunctionType) else type(root).__mro__:
            if kind.__module__ not in (library.__name__, "builtins"):
                remember(_held_fields(kind))
        while queue and len(seen) < _MOST:
            found = queue.popleft()
            if id(found) in seen or isinstance(found, (*_OPAQUE, *_PLAIN)):
                continue
            seen.add(id(found))
            is_iterator = hasattr(type(found), "__next__") and not hasattr(found, "__dict__")
            if is_iterator or isinstance(found, _GENERATORS) or any(hasattr(type(found), each) for each in _ADVANCING):
                self.has_matcher, self.name = True, name
            if isinstance(found, partial | MethodType | tuple | frozenset):
                queue.extend(gc.get_referents(found))
                continue
            if isinstance(found, FunctionType):
                queue.extend((*(found.__closure__ or ()), found.__defaults__, found.__kwdefaults__))
            queue.append(getattr(found, "__dict__", None))
            remember(_held(found))


def _held(found: Any) -> _Held:
    """Return what an object holds itself, its `__dict__` apart."""
    if isinstance(found, Tensor):  # models' weights are not looked at
        if (found.device.type == "cpu" and found.numel() <= _SMALL) or found.is_inference():
            return _Held(lambda: found.detach().clone(), lambda held: found.detach().copy_(held))
        tensor = found.detach().clone() if found.numel() <= _COPIED else found.detach()
        return _Held(lambda: found._version, lambda _: found.detach().copy_(tensor))
    if isinstance(found, np.ndarray):
        values = found.copy()
        return _Held(found.tobytes, lambda _: np.copyto(found, values))
    if isinstance(found, dict | list | deque | bytearray | set):
        if len(found) > _SMALL:
            return _Held(lambda: len(found), lambda _: None)
        if isinstance(found, dict):
            return _Held(lambda: dict(found), lambda held: (found.clear(), found.update(held)))
        put = found.update if isinstance(found, set) else found.extend
        return _Held(lambda: tuple(found), lambda held: (found.clear(), put(held)))
    if isinstance(found, FunctionType):
        shown, names = found.__globals__, [name for name in found.__code__.co_names if name in found.__globals__]
        return _Held(lambda: {name: shown.get(name) for name in names}, shown.update)
    return _held_fields(found)


def _held_fields(owner: object) -> _Held:
    """Return the attributes of a class itself, what lies in an object's `__slots__`, or the contents of a cell."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(owner).__mro__)
    names = {name for each in slots for name in ([each] if isinstance(each, str) else each)} - {"__weakref__"}

    def read() -> dict[str, object]:
        if isinstance(owner, type):
            return {name: each for name, each in vars(owner).items() if name == "__call__" or not name.startswith("__")}
        fields = dict[str, object]()
        for name in {"cell_contents"} if isinstance(owner, CellType) else names:
            with suppress(AttributeError, ValueError):  # it is empty
                fields[name] = getattr(owner, name)
        return fields

    def write(before: dict[str, object]) -> None:
        now = read()
        for name in {**before, **now}:
            if name not in before:
                delattr(owner, name)
            elif before[name] is not now.get(name, now):
                setattr(owner, name, before[name])

    return _Held(read, write)
