"""Tensors of checkpoints that other tools wrote: safetensors, archives of numpy, and pickles of tensors alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

Tensors = dict[str, Tensor]
"""Tensors by name."""
Fields = dict[str, Any]
"""Fields of a JSON file."""
Value = TypeVar("Value")
Names = Sequence[tuple[str, str]]
"""Pairs of templates (in another layout, here) of names, with fields like `{k}` in braces: see `renamed`."""
_NAMES = (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME)


def read_json(file: Path) -> Fields:
    """Return the fields of a JSON file; none where there is no such file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write_json(file: Path, values: Mapping[str, object]) -> None:
    """Write fields as JSON."""
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_tensors(files: Iterable[str | PathLike[str]], prefix: str = "") -> Tensors:
    """Return the tensors of all files whose names begin with `prefix`, which is removed.

    Files are `.safetensors`, `.npz` (numpy), or anything else that `torch.load` reads with `weights_only=True`.
    """
    tensors: Tensors = {}
    for file in map(Path, files):
        with naming(file):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as opened:
                    names = [name for name in opened.keys() if name.startswith(prefix)]  # noqa: SIM118
                    tensors |= {name.removeprefix(prefix): opened.get_tensor(name) for name in names}
            else:
                tensors |= below(_read_npz(file) if file.suffix == ".npz" else read_pickle(file), prefix)
    return tensors


def weight_files(name: str | PathLike[str], variant: str | None = None, pickles: bool = False, **hub: Any) -> list[str]:
    """Return the paths of a checkpoint's weight files: one file, or the shards of its index, fetched from the Hub.

    With `pickles`, `pytorch_model.bin` is accepted where there are no safetensors.
    """
    names = [_with_variant(file, variant) for file in (_NAMES if pickles else _NAMES[:2])]
    for file in names:
        if path := cached_file(name, file, **{"_raise_exceptions_for_missing_entries": False, **hub}):
            return get_checkpoint_shard_files(name, path, **hub)[0] if path.endswith(".json") else [path]
    raise ValueError(f"{name}: no weights; none of {', '.join(names)} exists")


def tensor_dtypes(name: str | PathLike[str], variant: str | None = None, **hub: Any) -> dict[str, str]:
    """Return the names of all tensors of a checkpoint and their safetensors dtypes (`F32`, `BF16`, `F8_E4M3`)."""
    dtypes = {}
    for file in weight_files(name, variant, **hub):
        with naming(file), safe_open(file, framework="pt") as tensors:
            dtypes |= {key: tensors.get_slice(key).get_dtype() for key in tensors.keys()}  # noqa: SIM118
    return dtypes


@contextmanager
def naming(file: str | PathLike[str]) -> Iterator[None]:
    """Turn errors of reading a file into one with the file's name and the reason."""
    try:
        yield
    except FileNotFoundError:
        raise
    except UnpicklingError as error:
        raise ValueError(f"{file} holds more than tensors; save its state_dict as safetensors") from error
    except (SafetensorError, RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"{file} is damaged or cut short ({error}); fetch it again") from error


def read_pickle(file: str | PathLike[str]) -> Tensors:
    """Return the tensors of a pickle, or of its `state_dict`, by name."""
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    loaded = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{file} holds a {type(loaded).__name__}, not tensors by name; save its state_dict")
    return loaded


def below(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`, which is removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


_FIELDS = {"part": "weight|bias", "rest": ".*"}
"""What fields of `Names` match; any other one matches a number."""


@cache
def _pattern(template: str) -> re.Pattern[str]:
    def group(field: re.Match[str]) -> str:
        return f"(?P<{field[1]}>{_FIELDS.get(field[1], '[0-9]+')})"

    return re.compile(re.sub(r"\\{(\w+)\\}", group, re.escape(template)))


def renamed(
    tensors: Mapping[str, Value], names: Names, owner: str | PathLike[str], back: bool = False, **fields: object
) -> dict[str, Value]:
    """Return tensors of another layout under this library's names, or (`back`) the other way round.

    Args:
        tensors: By name; or other values by the names of tensors.
        names: The first pair that matches names a tensor.
        owner: Where the tensors are, for the message.
        back: From this library's names.
        **fields: Fields that the new names have, and the old ones may lack.
    """
    new_names: dict[str, str] = {}
    for name in tensors:
        for old, new in (pair[::-1] if back else pair for pair in names):
            if name not in new_names and (match := _pattern(old).fullmatch(name)):
                new_names[name] = new.format(**fields | match.groupdict())
    refuse_unknown(owner, tensors.keys() - new_names.keys())
    return {new: tensors[name] for name, new in new_names.items()}


def refuse_unknown(owner: str | PathLike[str], names: Iterable[str]) -> None:
    """Refuse tensors that a layout does not know, so that none is skipped silently."""
    if names := sorted(names):
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ValueError(f"{owner}: {len(names)} tensors are not known in this layout: {shown}")


def _read_npz(file: Path) -> Tensors:
    import numpy as np

    with np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def _with_variant(file: str, variant: str | None) -> str:
    """Return transformers' name of a variant's file, which has the variant before its last suffix."""
    stem, _, ending = file.rpartition(".")
    return file if variant is None else f"{stem}.{variant}.{ending}"
