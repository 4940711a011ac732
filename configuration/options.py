"""Fields of configurations: reading those that only some models have, and refusing unknown ones. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import get_annotations
from typing import Any

from transformers import PreTrainedConfig


def config_field(config: PreTrainedConfig | None, name: str, default: Any = None) -> Any:
    """Return a field of a configuration that not every model has; `default` where it is missing."""
    return getattr(config, name, default)


def check_options(
    given: Iterable[str], config_class: type[PreTrainedConfig], owner: str, without: Iterable[str] = ()
) -> None:
    """Refuses options that a configuration would only store: a misspelt one would silently have no effect.

    Args:
        given: Names of the options.
        config_class: The class whose own fields are the options.
        owner: Who takes them, for the message.
        without: Fields that the owner fills in itself.

    Raises:
        TypeError: An unknown option.
    """
    known = [name for name in get_annotations(config_class) if name not in set(without)]
    for name in given:
        if name not in known:
            raise TypeError(f"{owner} has no option {name!r}; it takes {', '.join(known)}")
