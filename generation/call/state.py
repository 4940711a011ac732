"""State of logits processors that their calls move on: grammar matchers, counters, penalties that remember.

Such a processor must be called once for every token, in order. Which ones do is seen by what is reachable from them:
attributes, lists, tensors, closures, and names of the module that their functions read. What a call leaves as it was is
no state. Objects of compiled extensions cannot be looked into; matchers among them are known by their methods.
"""

from __future__ import annotations

import logging
import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.generation import logits_process as library

_STATEFUL = (library.DiaEOSDelayPatternLogitsProcessor, library.WhisperNoSpeechDetection)
_MOST = 5000
"""Objects that are looked at for one processor, the nearest first."""
_SMALL = 2**14
"""Elements that are compared; of larger tensors the version is, and of other containers the length."""
_COPIED = 2**22
"""Elements of a tensor that are copied, to be put back."""
_CONTAINERS = dict, list, deque, bytearray, set
_PLAIN = str | bytes | int | float | complex | bool | None
_OPAQUE = nn.Module, PreTrainedTokenizerBase, PreTrainedConfig, ModuleType, logging.Logger, type
"""What no call is expected to change but for caches."""
_ADVANCING = ("accept_token", "accept_tokens", "consume_token", "consume_tokens", "try_consume_tokens", "commit_token")
"""Methods of grammar matchers of compiled extensions (xgrammar, llguidance)."""
_MISSING = object()


def is_stateless(processor: object) -> bool:
    """Return whether a processor is known to depend on ids and scores alone: most of transformers' own are, and a
    user's says so by `counts_calls = False`."""
    is_own = type(processor).__module__ == library.__name__ and not isinstance(processor, _STATEFUL)
    return is_own or getattr(processor, "counts_calls", None) is False


class _Held:
    """What an object holds, as it was, and how to put it back."""

    def __init__(self, owner: object, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self.owner, self.read, self.write = owner, read, write
        self.value = read()

    def is_same(self) -> bool:
        """Return whether the object holds what it held."""
        return _is_same(self.value, self.read())


def _is_same(before: object, now: object) -> bool:
    if before is now:
        return True
    if isinstance(before, tuple) and isinstance(now, tuple):
        if len(before) != len(now):
            return False
        return all(map(operator.is_, before, now)) or all(map(_is_same, before, now))
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        return before.shape == now.shape and bool(torch.equal(before, now))
    return type(before) is type(now) and isinstance(before, _PLAIN) and (before == now or before != before)


class StateWatch:
    """The state that is reachable from processors.

    Attributes:
        name: The class of the processor whose state moved last, or is known to move.
        has_matcher: Whether any holds an object that is known to move, and cannot be looked into.
    """

    def __init__(self, processors: Iterable[object]) -> None:
        self.processors, self.name, self.has_matcher = list(processors), "", False
        self.held: list[tuple[str, list[_Held]]] = []

    def note(self) -> None:
        """Remember the state before a call."""
        if not self.held or self.moved() is not None:
            self.held, self.has_matcher = [], False
            for processor in self.processors:
                name = getattr(processor, "__name__", type(processor).__name__)
                self.held.append((name, list(self._walk(processor, name))))

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
        for _, every in self.held:
            for held in every:
                if not held.is_same():
                    held.write(held.value)

    def moved(self) -> str | None:
        """Return the class of a processor whose state is not the one that `note` remembered; None: there is none."""
        return next((name for name, every in self.held if not all(held.is_same() for held in every)), None)

    def _walk(self, root: object, name: str) -> Iterator[_Held]:
        """Yield what can change, of the objects that are reachable from a processor."""
        seen, queue = set[int](), deque([root, *_classes(root)])
        while queue and len(seen) < _MOST:
            found = queue.popleft()
            if id(found) in seen or isinstance(found, _PLAIN):
                continue
            seen.add(id(found))
            if any(hasattr(type(found), method) for method in _ADVANCING) or _is_iterator(found):
                self.has_matcher, self.name = True, name
            for held in _parts(found, root):
                yield held
                queue.extend(held.value if isinstance(held.value, tuple) else ())
            queue.extend(_links(found))


def _classes(root: object) -> list[type]:
    """Return the user's classes that a processor is of: their methods may read names, and they have attributes."""
    own = [kind for kind in type(root).__mro__ if kind.__module__ not in (library.__name__, "builtins")]
    return [kind for kind in own if kind is not LogitsProcessor and not isinstance(root, FunctionType)]


def _is_iterator(found: object) -> bool:
    """Return whether an object is an iterator that cannot be looked into, as generators and counters are."""
    return hasattr(type(found), "__next__") and not hasattr(found, "__dict__") and not hasattr(found, "read")


def _links(found: object) -> Iterable[object]:
    """Return objects that another one refers to as long as it lives."""
    if isinstance(found, partial):
        return found.func, found.args, found.keywords
    if isinstance(found, MethodType):
        return found.__self__, found.__func__
    if isinstance(found, FunctionType):
        return *(found.__closure__ or ()), found.__defaults__, found.__kwdefaults__
    return found if isinstance(found, tuple | frozenset) else ()


def _parts(found: Any, root: object) -> Iterator[_Held]:
    """Yield what an object holds itself."""
    if isinstance(found, type) and found in type(root).__mro__:
        attributes = [name for name in vars(found) if not name.startswith("__") or name == "__call__"]
        yield _fields(found, attributes)
    elif isinstance(found, Tensor):
        yield from _tensor(found)
    elif isinstance(found, np.ndarray):
        yield _Held(found, lambda: found.tobytes(), lambda held: _write_array(found, held))
    elif isinstance(found, np.random.Generator):
        state = found.bit_generator.state
        yield _Held(
            found,
            lambda: repr(found.bit_generator.state),
            lambda _: setattr(found.bit_generator, "state", state),
        )
    elif isinstance(found, torch.Generator):
        yield _Held(found, found.get_state, found.set_state)
    elif isinstance(found, random.Random):
        yield _Held(found, found.getstate, found.setstate)
    elif isinstance(found, CellType):
        yield _fields(found, ["cell_contents"])
    elif isinstance(found, _CONTAINERS) and len(found) > _SMALL:
        yield _Held(found, lambda: len(found), lambda _: None)
    elif isinstance(found, dict):
        yield _Held(found, lambda: (*found, *found.values()), lambda held: _write_dict(found, held))
    elif isinstance(found, list | deque | bytearray):
        yield _Held(found, lambda: tuple(found), lambda held: _write_items(found, held))
    elif isinstance(found, set):
        yield _Held(found, lambda: tuple(found), lambda held: (found.clear(), found.update(held)))
    elif isinstance(found, FunctionType):
        names = [name for name in found.__code__.co_names if name in found.__globals__]
        shown = found.__globals__
        yield _Held(shown, lambda: tuple(shown.get(n) for n in names), lambda held: shown.update(zip(names, held)))
    elif not isinstance(found, _OPAQUE):
        if hasattr(found, "__dict__"):
            yield from _parts(vars(found), root)
        slots = [name for kind in type(found).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
        if slots:
            yield _fields(found, slots)


def _names(slots: str | Iterable[str]) -> list[str]:
    return [name for name in ([slots] if isinstance(slots, str) else slots) if name not in ("__dict__", "__weakref__")]


def _fields(owner: object, names: list[str]) -> _Held:
    """Return the attributes of an object; of a class, its own."""

    def read() -> tuple[object, ...]:
        if isinstance(owner, type):
            return tuple(vars(owner).get(name, _MISSING) for name in names)
        return tuple(_of_slot(owner, name) for name in names)

    def write(values: tuple[object, ...]) -> None:
        for name, value, now in zip(names, values, read()):
            if value is not now:
                delattr(owner, name) if value is _MISSING else setattr(owner, name, value)

    return _Held(owner, read, write)


def _of_slot(owner: object, name: str) -> object:
    try:
        return getattr(owner, name, _MISSING)
    except ValueError:  # an empty cell
        return _MISSING


def _tensor(found: Tensor) -> Iterator[_Held]:
    """Yield a tensor's values, or its version where they are many; models' weights are not looked at."""
    if isinstance(found, nn.Parameter) or found.is_meta:
        return
    is_compared = found.device.type == "cpu" and found.numel() <= _SMALL
    if is_compared or found.is_inference():
        yield _Held(found, lambda: found.detach().clone(), lambda held: found.detach().copy_(held))
        return
    values = found.detach().clone() if found.numel() <= _COPIED else found.detach()
    yield _Held(found, lambda: found._version, lambda _: found.detach().copy_(values))


def _write_array(found: np.ndarray, held: bytes) -> None:
    found[...] = np.frombuffer(held, found.dtype).reshape(found.shape)


def _write_dict(found: dict[object, object], held: tuple[object, ...]) -> None:
    half = len(held) // 2
    found.clear()
    found.update(zip(held[:half], held[half:]))


def _write_items(found: Any, held: tuple[object, ...]) -> None:
    found.clear()
    found.extend(held)
