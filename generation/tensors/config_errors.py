"""Errors of values that a config.json holds, and that no model can have: named by file and field, whoever met them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class ConfigError(ValueError, StrictDataclassError):
    """A config.json with a value that its field cannot have."""


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


_IS_TEXT, _IS_DICT = (lambda value: isinstance(value, str)), (lambda value: isinstance(value, dict))
_ROPES = "default", *ROPE_INIT_FUNCTIONS
_WANTED = {
    r"dtype|torch_dtype": (
        lambda value: isinstance(getattr(torch, str(value).removeprefix("torch."), None), torch.dtype),
        "the name of a dtype of torch",
    ),
    r"rope_type": (lambda value: value in _ROPES, f"one of {', '.join(_ROPES)}"),
    r"hidden_act|hidden_activation": (lambda value: str(value) in ACT2FN, "the name of an activation"),
    r"backbone_config\.model_type": (lambda value: str(value) in CONFIG_MAPPING, "a type that transformers knows"),
    r"model_type|layout|_name_or_path|base_model_type": (_IS_TEXT, "a text"),
    r"architectures": (lambda value: isinstance(value, list), "a list of names"),
    r"rope_(parameters|scaling)|(loss|quantization|backbone)_(options|config)|id2label|label2id": (_IS_DICT, "fields"),
    r"num_\w*heads|num_\w*layers|\w*(hidden|vocab|intermediate|window)_size|head_dim|window": (
        lambda value: all(map(_is_size, value)) if isinstance(value, list) and value else _is_size(value),
        "a whole number of at least 1",
    ),
    r"\w+_eps|rope_theta|factor|initializer_range": (
        lambda value: isinstance(value, (int, float)) and 0 < value < float("inf"),
        "a number above 0",
    ),
    r"(use|tie|is)_\w+|\w+_bias": (lambda value: isinstance(value, bool), "true or false"),
}
"""What fields hold, by their names, where they are not null; asked once something has failed."""
_IS_READ_AS_NULL = "rope_type", "rope_theta", "backbone_config.model_type"
_VAGUE = "shapes that config.json says"  # of an error that names a file, and no field
_IMPOSSIBLE = re.compile("negative dimension|greater or equal to 0|[Oo]verflow|division|modulo")


def _faults(fields: dict[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """Yield names of fields, and why they cannot hold what they do."""
    for name, value in fields.items():
        if value is not None or f"{within}{name}".endswith(_IS_READ_AS_NULL):
            wanted = (rule for pattern, rule in _WANTED.items() if re.fullmatch(rf"(.+\.)?({pattern})", within + name))
            for right in [right for holds, right in wanted if not holds(value)]:
                yield name, f"{within}{name}={str(value)[:80]!r}, where {right} is right"
        yield from _faults(value, f"{within}{name}.") if isinstance(value, dict) else ()


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
        says_file = isinstance(error, (ValueError, NotImplementedError)) and str(name) in words and _VAGUE not in words
        if isinstance(error, (ConfigError, OSError)) or says_file:
            raise
        try:
            fields = PreTrainedConfig.get_config_dict(name, local_files_only=True)[0]
        except Exception:  # it is no config.json that could be read: what was raised says more
            raise error from None
        faults = dict(_faults(fields))
        named = [fault for field, fault in faults.items() if re.search(rf"\b{field}\b", words)]
        is_strict = isinstance(error, StrictDataclassError)  # it says what is right
        if faults and not (named and is_strict):
            raise ConfigError(f"{where} has {[*named, *faults.values()][0]} ({words[:200]})") from error
        quoted = re.findall(r"'(\w+)'", words) if isinstance(error, (TypeError, LookupError)) else ()
        holders = [field for field, value in fields.items() if isinstance(value, dict) and {*quoted} & value.keys()]
        if is_strict or holders or "the config of" in words or _IMPOSSIBLE.search(words):
            raise ConfigError(": ".join([where, *holders[:1], words])) from error
        raise
