"""What is imported on demand: optional dependencies, with the extra that installs them, and names of a package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class MissingExtraError(ModuleNotFoundError):
    """A package that an extra of `tokenahead` installs is missing."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Wrap imports of packages that an extra installs.

    Args:
        extra: Name of the extra.
        what: What needs it.

    Raises:
        MissingExtraError: A package was not found; the message says what to install.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "tokenahead"):  # a defect of this package, not a missing extra
            raise
        message = f"{what} needs the package {package!r}: pip install 'tokenahead[{extra}]'"
        raise MissingExtraError(message, name=error.name) from error


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that imports the module of a name at its first use.

    Args:
        package: The package's `__name__`.
        homes: By name, the submodule that defines it.

    Returns:
        The function; it raises AttributeError for unknown names.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{homes[name]}", package), name)

    return find
