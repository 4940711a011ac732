"""Typed conversion of values from YAML and JSON, by the annotations of the fields that they fill."""

from __future__ import annotations

import inspect
import json
import math
import types
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from transformers.hf_argparser import string_to_bool

_WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}
"""The checked types, in words. Values of other types are returned unchanged."""


def typed_fields(path: str, values: Mapping[str, Any], kind: type, types: Mapping[str, Any] | None = None) -> dict:
    """Return the values that fill fields of a dataclass, converted to the fields' types.

    `path` names the mapping in messages; keys of other dataclasses are left out; `types` replace some annotations.
    """
    hints = get_type_hints(kind) | dict(types or {})
    converted = {}
    for entry in fields(kind):
        if entry.name in values:
            value, name = values[entry.name], f"{path}: {entry.name}"
            if value == "":
                raise ValueError(f"{name} is empty: give a value, or leave it out")
            is_default = value is None and entry.default is None
            hint = hints[entry.name]
            choices = None if hint is Any else entry.metadata.get("choices")
            converted[entry.name] = value if is_default else typed(name, value, hint, choices)
    return converted


def typed_options(section: str, values: Mapping[str, Any], *targets: Callable[..., Any], closed: bool = True) -> dict:
    """Return the options of a section, converted to the types of the parameters of classes or functions that take them.

    `closed` refuses options that no target has; the types of later targets win.
    """
    hints: dict[str, Any] = {}
    for target in targets:
        has_fields = not isinstance(target, type) or is_dataclass(target)
        hints |= get_type_hints(target if has_fields else target.__init__, localns={"torch": torch})
    known = [name for target in targets for name in inspect.signature(target).parameters]
    if closed and (unknown := [name for name in values if name not in known]):
        raise ValueError(f"{section} has no option {unknown[0]!r}; it has {', '.join(known)}")
    return {name: typed(f"{section}.{name}", value, hints.get(name, Any)) for name, value in values.items()}


def typed(name: str, value: Any, hint: Any, choices: Sequence[str] | None = None) -> Any:
    """Return a value of YAML or JSON that fits a type; numbers and truth values in text are converted.

    A value of a type that no file can hold is returned unchanged.

    Raises:
        ValueError: A value of another type, a number that is not finite, or none of the choices (also of an Enum).
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    enums = [each.value for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum) for each in kind]
    if allowed := [*(enums or choices or ())]:
        return _chosen(name, value, allowed)
    shape = next((kind for kind in kinds if is_dataclass(kind)), None)
    plain = {dict if kind is shape else get_origin(kind) or kind for kind in kinds}
    if not plain <= _WANTED.keys() or (isinstance(value, str) and list[str] in kinds):  # one item stands for a list
        return value
    if isinstance(value, str):
        value = _from_text(name, value, plain)
    if not any(_fits(value, kind) for kind in plain):
        wanted = [_WANTED[kind] for kind in plain - ({int} if float in plain else set())]
        raise ValueError(f"{name}={value!r} must be {' or '.join(sorted(wanted))}")
    if isinstance(value, list) and (items := [get_args(kind)[0] for kind in kinds if get_origin(kind) is list]):
        return [typed(f"{name}[{index}]", each, items[0]) for index, each in enumerate(value)]
    return _typed_mapping(name, value, shape) if isinstance(shape, type) and isinstance(value, dict) else value


def _chosen(name: str, value: Any, allowed: list[str]) -> Any:
    if value in allowed:
        return value
    hint = "; YAML reads a bare no as false: put it in quotes" if value is False and "no" in allowed else ""
    raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(map(str, allowed))}{hint}")


def _from_text(name: str, text: str, plain: set[Any]) -> Any:
    """Return the number, truth value or mapping that a text represents, or the text itself."""
    if str in plain and dict not in plain:
        return text
    for convert in (json.loads, float, string_to_bool):
        with suppress(ValueError, ArgumentTypeError):
            if any(_fits(value := convert(text), kind) for kind in plain - {str}):
                return text if str in plain else value
    if dict not in plain or (str in plain and Path(text).is_file()):
        return text
    raise ValueError(f"{name}={text!r} must be a mapping, one as JSON, or the path of a file that has one")


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, kind)


def _typed_mapping(name: str, value: dict[str, Any], kind: type) -> dict[str, Any]:
    known = [entry.name for entry in fields(kind)]
    required = [entry.name for entry in fields(kind) if entry.default is entry.default_factory is MISSING]
    if not {*required} <= {*value} <= {*known}:
        also = f", {', '.join(required)} among them" if required else ""
        raise ValueError(f"{name}={value!r} must be a mapping with some of {', '.join(known)}{also}")
    return typed_fields(name, value, kind)
