"""Errors of values that a config.json holds, and that no model can have: named by file and field, whoever met them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class ConfigError(ValueError, StrictDataclassError):
    """A config.json with a value that its field cannot have."""


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_dtype(value: Any) -> bool:
    return isinstance(value, str) and isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < float("inf")


def _is_one_of(known: Any) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in known


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "dtype|torch_dtype": (_is_dtype, "the name of a dtype of torch"),
    "rope_type": (_is_one_of({"default", *ROPE_INIT_FUNCTIONS}), f"one of default, {', '.join(ROPE_INIT_FUNCTIONS)}"),
    "hidden_act|hidden_activation": (_is_one_of(ACT2FN), "the name of an activation"),
    "model_type|layout|_name_or_path|base_model_type": (lambda value: isinstance(value, str), "a text"),
    "backbone_config": (lambda value: isinstance(value, dict) and "model_type" in value, "fields with a model_type"),
    "architectures": (lambda value: isinstance(value, list), "a list of names"),
    "rope_parameters|rope_scaling|loss_options|quantization_config|id2label|label2id": (
        lambda value: isinstance(value, dict),
        "fields",
    ),
    r"num_\w*heads|num_\w*layers|\w*(hidden|vocab|intermediate|window)_size|head_dim|window": (
        lambda value: all(map(_is_size, value)) if isinstance(value, list) and value else _is_size(value),
        "a whole number of at least 1",
    ),
    r"\w+_eps|rope_theta|factor|initializer_range": (_is_number, "a number above 0"),
    r"(use|tie|is)_\w+|\w+_bias": (lambda value: isinstance(value, bool), "true or false"),
}
"""What fields hold, by their names, where they are not null; asked once something has failed."""
_VAGUE = re.compile("shapes that config.json says")
_IMPOSSIBLE = re.compile("negative dimension|greater or equal to 0|[Oo]verflow|division|modulo")


def _faults(fields: Any) -> Iterator[tuple[str, str]]:
    """Yield names of fields, and why they cannot hold what they do."""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        for pattern, (holds, wanted) in _WANTED.items():
            is_unset = value is None and not name.startswith("rope_t")  # the rope's own fields are read as they are
            if re.fullmatch(pattern, name) and not is_unset and not holds(value):
                yield name, f"{name}={str(value)[:80]!r}, where {wanted} is right"
        yield from _faults(value)


@contextmanager
def naming_field(name: str | PathLike[str]) -> Iterator[None]:
    """Turn errors that a value in config.json is the cause of into one that names the file and the field.

    Raises:
        ConfigError: There is such a value; any other error is raised as it is.
    """
    try:
        yield
    except Exception as error:
        words, where = " ".join(str(error).split()), f"{name}: config.json"
        says_file = isinstance(error, (ValueError, NotImplementedError)) and str(name) in words
        if isinstance(error, (ConfigError, OSError)) or (says_file and not _VAGUE.search(words)):
            raise
        try:
            fields = PreTrainedConfig.get_config_dict(name, local_files_only=True)[0]
        except Exception:  # it is no config.json that could be read: what was raised says more
            raise error from None
        faults = [*_faults(fields)]
        named = [fault for field, fault in faults if re.search(rf"\b{field}\b", words)]
        is_strict = isinstance(error, StrictDataclassError)
        if faults and not (named and is_strict):
            raise ConfigError(f"{where} has {(named or [fault for _, fault in faults])[0]} ({words[:200]})") from error
        if is_strict or (isinstance(error, ValueError) and "the config of" in words):
            raise ConfigError(f"{where}: {words}") from error
        if isinstance(error, (RuntimeError, TypeError, ArithmeticError)) and _IMPOSSIBLE.search(words):
            raise ConfigError(f"{where} has sizes that no model can have: {words[:200]}") from error
        quoted = re.findall(r"'(\w+)'", words)
        for field, value in fields.items() if isinstance(error, (TypeError, LookupError)) else ():
            if isinstance(value, dict) and any(each in value for each in quoted):
                raise ConfigError(f"{where} has {field}={str(value)[:80]}: {words[:200]}") from error
        raise
