"""Optional dependencies: where one is missing, the error says which extra of this package brings it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class MissingExtraError(ModuleNotFoundError):
    """A package that an extra of `tokenahead` would have installed is not there."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Around imports that an extra provides.

    Args:
        extra: Its name.
        what: What cannot be done without it.

    Raises:
        MissingExtraError: An import inside the block did not find its package; the message says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "tokenahead"):  # a defect of this package, which no extra would mend
            raise
        message = f"{what} needs the package {package!r}: pip install 'tokenahead[{extra}]'"
        raise MissingExtraError(message, name=error.name) from error


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
