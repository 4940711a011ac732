"""The model in the box: how it is loaded, and how it was trained and measured. Names are loaded when they are used."""

from importlib import import_module
from typing import Any

_HOMES = {"BoxDamagedError": "folder", "box_folder": "folder", "load_box": "folder", "load_heads": "folder"}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports what is asked for: reading a box needs less than training one.

    Raises:
        AttributeError: Nothing of this name is offered here.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
