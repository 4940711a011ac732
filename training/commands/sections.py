"""Values of a section of settings, made what their fields hold: YAML reads `1e-1` as text. Knows no field by name."""

from __future__ import annotations

import math
import types
from typing import Any, Union, get_args, get_origin

_WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
}
"""What a field of a type holds, in words. Other types are left to whoever reads them."""


def converted(section: str, values: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    """The values of a section, numbers among them that were written as text converted.

    Args:
        section: Its name, for messages.
        values: By field.
        hints: Types by field; a field without one stays as it is.

    Raises:
        ValueError: A value of another type, or a number that is not finite; the message names section and field.
    """
    return {name: fitting(f"{section}.{name}", value, hints.get(name, Any)) for name, value in values.items()}


def fitting(name: str, value: Any, hint: Any) -> Any:
    """A value that fits a type, converted where it is a number that was written as text.

    Args:
        name: What it is called in messages.
        value: The value; of types that no file holds, it is taken as it is.
        hint: The type.

    Raises:
        ValueError: A value of another type, or a number that is not finite.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = [get_origin(kind) or kind for kind in kinds if kind is not type(None)]
    if not {*plain} <= _WANTED.keys() or (value is None and len(plain) < len(kinds)):
        return value
    if isinstance(value, str) and str not in plain:
        value = _number(value, plain)
    if not any(_fits(value, kind) for kind in plain):
        wanted = dict.fromkeys(_WANTED[kind] for kind in plain if not (kind is int and float in plain))
        raise ValueError(f"{name}={value!r} must be {' or '.join(wanted)}")
    if isinstance(value, list) and (items := [get_args(kind) for kind in kinds if get_origin(kind) is list]):
        return [fitting(f"{name}[{place}]", each, items[0][0]) for place, each in enumerate(value)]
    return value


def _number(text: str, kinds: list[type]) -> Any:
    """The number that a text says, or the text."""
    for kind in (int, float):
        try:
            if kind in kinds:
                return kind(text)
        except ValueError:
            continue
    return text


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, kind)
