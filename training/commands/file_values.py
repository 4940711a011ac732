"""Values of a file of settings, compared with the types of their fields before a parser reads them.

The parser looks at what is text alone, and hands numbers, lists and mappings on as they are. Knows no field by name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from .sections import fitting

_TRUTHS = ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0")


def check_values(path: str, values: dict[str, Any], kind: type, types: dict[str, Any] | None = None) -> None:
    """Refuses values of another type than the fields of a dataclass have.

    Args:
        path: What the values are called in messages, such as the file.
        values: By field; those of other dataclasses may be among them.
        kind: The dataclass.
        types: Types that count in the place of the fields' own.

    Raises:
        ValueError: Such a value; the message names the field, and says what would be right.
    """
    hints = get_type_hints(kind) | (types or {})
    for entry in fields(kind):
        if entry.name not in values:
            continue
        value, hint, name = values[entry.name], hints[entry.name], f"{path}: {entry.name}"
        if value is None and entry.default is None:
            continue
        if value == "":
            raise ValueError(f"{name} is empty: give a value, or leave it out")
        if hint is not Any:
            _check(name, value, hint, entry.metadata.get("choices"))


def _check(name: str, value: Any, hint: Any, choices: Sequence[str] | None) -> None:
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    if get_origin(hint) is list:
        kinds = [hint]
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)]
    if names := [each.value for enum in enums for each in enum] or choices:
        _check_choice(name, value, names)
    elif isinstance(value, str):
        _check_text(name, value, hint, kinds)
    elif shapes := [kind for kind in kinds if is_dataclass(kind)]:
        _check_mapping(name, value, shapes[0])
    else:
        fitting(name, value, hint)
        shapes = [each for kind in kinds if get_origin(kind) is list for each in get_args(kind) if is_dataclass(each)]
        for place, each in enumerate(value if shapes else ()):
            _check_mapping(f"{name}[{place}]", each, shapes[0])


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value in [*choices]:  # which may be a set, where a list has no hash
        return
    hint = "; YAML reads a bare no as false: put it in quotes" if value is False and "no" in choices else ""
    raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(str, choices))}{hint}")


def _check_text(name: str, value: str, hint: Any, kinds: list[Any]) -> None:
    """Text may be what a field holds, one item of a list of text, or what the parser makes something else of."""
    plain = [get_origin(kind) or kind for kind in kinds]
    if bool in plain and value.lower() in _TRUTHS:
        return
    if any(get_origin(kind) is list and get_args(kind) == (str,) for kind in kinds):
        return
    if dict in plain or any(map(is_dataclass, plain)):
        if not (_is_mapping(value) or Path(value).is_file()):
            raise ValueError(f"{name}={value!r} must be a mapping, one as JSON, or a file that is there")
    else:
        fitting(name, value, hint)


def _is_mapping(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _check_mapping(name: str, value: Any, kind: type) -> None:
    known = [entry.name for entry in fields(kind)]
    required = [entry.name for entry in fields(kind) if entry.default is entry.default_factory is MISSING]
    if not isinstance(value, dict) or not {*required} <= {*value} <= {*known}:
        raise ValueError(f"{name}={value!r} must be a mapping with some of {', '.join(known)}"
                         + (f", {', '.join(required)} among them" if required else ""))  # fmt: skip
    check_values(name, value, kind)
