"""Ends a save before one of its operations on files: by an error, by Ctrl-C, or as a kill does."""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_NAMES = ("rename", "replace", "link", "symlink", "unlink", "remove", "mkdir", "rmdir", "fsync")


class Killed(BaseException):
    """Raised by every operation from the kill on: nothing that runs afterwards changes the disk."""


def writes(args: tuple, kwargs: dict) -> bool:
    return bool(set(str(kwargs.get("mode", args[1] if len(args) > 1 else "r"))) & set("wax+"))


@contextmanager
def before_operation(number: int, error: BaseException) -> Iterator[list[int]]:
    """Raise before the operation of this number, from 0; yield their count so far, in a list."""
    count = [0]

    def wrapped(function, is_open):
        def counted(*args, **kwargs):
            if not is_open or writes(args, kwargs):
                count[0] += 1
                if count[0] == number + 1 or (count[0] > number and isinstance(error, Killed)):
                    raise error
            return function(*args, **kwargs)

        return counted

    places = [(os, name) for name in _NAMES] + [(builtins, "open"), (io, "open")]
    before = [getattr(place, name) for place, name in places]
    for (place, name), function in zip(places, before):
        setattr(place, name, wrapped(function, name == "open"))
    try:
        yield count
    finally:
        for (place, name), function in zip(places, before):
            setattr(place, name, function)


def killed(save: Callable[[], object], number: int) -> bool:
    """Save, as if killed before the operation of this number; return whether it came so far.

    Locks end with the descriptors that hold them, which leaving `save` closes, as the end of a process does.
    """
    with before_operation(number, Killed()) as count, suppress(Killed):
        save()
    return count[0] > number


def no_space() -> OSError:
    return OSError(28, "No space left on device")


def stop() -> KeyboardInterrupt:
    return KeyboardInterrupt()
