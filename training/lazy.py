"""Names of a room that are loaded when they are asked for. Knows no room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(room: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__` that imports the home of a name at its first use.

    Args:
        room: The module's `__name__`.
        homes: By name, the submodule that defines it.

    Returns:
        The function; it raises AttributeError for a name that is not offered.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}")
        return getattr(import_module(f".{homes[name]}", room), name)

    return find
