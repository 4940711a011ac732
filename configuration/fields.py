"""Fields of configurations: which are known, and how far positions go. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import get_annotations
from typing import Any

from transformers import PreTrainedConfig


def check_options(
    given: Iterable[str], config_class: type[PreTrainedConfig], owner: str, without: Iterable[str] = ()
) -> None:
    """Refuse options that a configuration would only store: a misspelt one would silently have no effect.

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


def field(config: PreTrainedConfig | None, name: str) -> Any:
    """Return a field that not every configuration has; None where it is missing."""
    return getattr(config, name, None)


def learned_positions(config: PreTrainedConfig | None) -> int | None:
    """Return the size of a backbone's table of positions; None where positions are computed and have no limit."""
    return None if field(config, "rope_parameters") is not None else field(config, "max_position_embeddings")


def rotary_border(config: PreTrainedConfig | None) -> tuple[str, int] | None:
    """Return the rope type of a backbone whose rotary frequencies depend on the length, and the length up to which not.

    Two of transformers' types take them from the longest position of a forward: `"dynamic"` and `"longrope"` (Phi-3).
    None: positions have the same frequencies at every length.
    """
    rope = field(config, "rope_parameters") or {}
    layers = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = [part for part in layers if part.get("rope_type") in ("dynamic", "longrope")]
    if not kinds:
        return None
    length = field(config, "max_position_embeddings") or 0
    borders = [part.get("original_max_position_embeddings") or length for part in kinds]
    return kinds[0]["rope_type"], min(borders)
