"""Fields of configurations: reading those that only some models have, positions, unknown options. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from inspect import get_annotations
from math import inf
from typing import Any

from transformers import PreTrainedConfig


def field(config: PreTrainedConfig | None, *names: str, default: object = None) -> Any:
    """Return the first of some fields that a configuration has and that is not None; else `default`."""
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    return default


def masks_padding_alone(config: PreTrainedConfig) -> bool:
    """Return whether a model's masks are those of padding alone: its attention reads all earlier columns, in order."""
    return config.get_text_config().model_type == "glm5_next_text"


def rotates_anew(config: PreTrainedConfig) -> bool:
    """Return whether a model's layers take the rotary embedding of all columns of the cache, and not of new ones."""
    return config.get_text_config().model_type == "qwen4_exp_text"


def chooses_blocks(config: PreTrainedConfig) -> bool:
    """Return whether a model's attention chooses blocks of columns, which begin in certain columns."""
    return "minimax_m3_sparse" in (field(config.get_text_config(), "layer_types") or ())


def compresses_windows(config: PreTrainedConfig) -> bool:
    """Return whether a model's attention reads windows of columns that are compressed to one entry each."""
    return any("compressed" in kind for kind in field(config.get_text_config(), "layer_types") or ())


def has_short_convolutions(config: PreTrainedConfig) -> bool:
    """Return whether a model's layers also have short convolutions, and distances are those of columns."""
    return config.get_text_config().model_type == "inkling_text"


def check_options(
    options: Iterable[str], config_class: type[PreTrainedConfig], owner: str, without: Iterable[str] = ()
) -> None:
    """Refuse options of the method `owner` that are no fields of a configuration, or are among those `without`."""
    known = [name for name in get_annotations(config_class) if name not in set(without)]
    for name in options:
        if name not in known:
            raise TypeError(f"{owner} has no option {name!r}; it takes {', '.join(known)}")


def check_values(
    options: object, choices: Mapping[str, Collection[object]], ranges: Mapping[str, str] | None = None
) -> None:
    """Refuse fields outside their `choices`, or intervals such as `"[0, 1)"`; a default of None passes."""
    for name, allowed in {**choices, **(ranges or {})}.items():
        value = getattr(options, name)
        if value is None and getattr(type(options), name, 0) is None:
            continue
        if not isinstance(allowed, str):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, allowed))}")
            continue
        interval, (low, high) = allowed, map(float, allowed[1:-1].split(","))
        is_border = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
        if not (is_border or (value is not None and low < value < high)):
            allowed = f"be at least {low:g}" if interval.startswith("[") and high == inf else f"lie in {interval}"
            raise ValueError(f"{name}={value!r} must {allowed}")


def refuse(refusals: Iterable[tuple[object, str]]) -> None:
    """Raise a ValueError with the message of the first pair whose condition holds."""
    for refused, message in refusals:
        if refused:
            raise ValueError(message)


_COUNTS = re.compile(r"(\w+_)?(num|n)_(\w+_)?(layers?|blocks|slots|modules|pred_heads)|window|draft_layers")
_SHARED = 256
"""More layers, heads and slots than any model has: some share a tensor, or have none in a drafter."""


def check_counts(owner: object, fields: Mapping[str, Any], tensors: int) -> None:
    """Refuse numbers of layers, heads, blocks and slots that `tensors` tensors cannot hold, before they are built."""
    for name, value in fields.items():
        if isinstance(value, dict):
            check_counts(owner, value, tensors)
        elif isinstance(value, int):
            low, high = (0, tensors + _SHARED) if _COUNTS.fullmatch(name) else (-(2**62), 2**62)
            if not low <= value <= high:
                raise ValueError(f"{owner}: config.json has {name}={value}, but there are {tensors} tensors")


def learned_positions(config: PreTrainedConfig | None) -> int | None:
    """Return the size of a backbone's position table; None where positions are computed, without a limit."""
    if field(config, "rope_parameters") is not None:
        return None
    return field(config, "max_position_embeddings")


def rotary_border(config: PreTrainedConfig | None) -> tuple[str, int] | None:
    """Return the rope type of a backbone whose frequencies depend on a forward's longest position, and up to which not.

    None: positions have the same frequencies in every sequence.
    """
    rope = field(config, "rope_parameters") or {}
    layers = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    scaled = [part for part in layers if part.get("rope_type") in ("dynamic", "longrope")]
    if not scaled:
        return None
    length = field(config, "max_position_embeddings") or 0
    borders = [part.get("original_max_position_embeddings") or length for part in scaled]
    return scaled[0]["rope_type"], min(borders)
