"""Tensors of checkpoints that other tools wrote: safetensors, and pickles of tensors alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from ...configuration.fields import check_counts
from .saving import OF_FILES, unusable

Tensors = dict[str, Tensor]  # tensors by name
Fields = dict[str, Any]  # fields of a JSON file
Value = TypeVar("Value")
Names = Sequence[tuple[str, str]]  # templates (in another layout, here) of names, with fields like `{k}`: see `renamed`
# arguments of `from_pretrained` that locate files
HUB_OPTIONS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download", "proxies")
_MAY_LACK = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
_PLAIN = re.compile(r"[^/\\\\:\x00-\x1f\x7f]+")  # names of files without a directory or a drive
_MOST_SETTINGS, _MOST_ALIASES = 1 << 20, 16  # bytes and aliases of settings in YAML
_NAMES = (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME)


def hub_options(options: Mapping[str, Any]) -> Fields:
    """Return those of some arguments of `from_pretrained` that locate files."""
    return {key: options[key] for key in HUB_OPTIONS if options.get(key) is not None}


def optional_file(name: str | PathLike[str], file: str, hub: Fields) -> str | None:
    """Return the path of a file that a directory or a Hub repository may hold."""
    return cached_file(name, file, **{**hub, **_MAY_LACK})


def read_json(file: Path) -> Fields:
    """Return the fields of a JSON file; an empty dict where there is no such file."""
    with naming(file):
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def read_yaml(file: Path) -> Fields:
    """Return the fields of a YAML file of settings; refuse one that is, or makes, far more than that."""
    with naming(file):
        if (size := file.stat().st_size) > _MOST_SETTINGS:
            raise ValueError(f"it has {size} bytes, more than settings")
        text = file.read_text(encoding="utf-8")
        if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)) > _MOST_ALIASES:
            raise ValueError(f"more than {_MOST_ALIASES} aliases (*name)")
        return dict(yaml.safe_load(text))


def read_index(file: Path) -> dict[str, str]:
    """Return the files of shards, plain ones beside the index, by the names of their tensors; nothing else reads it."""
    index = read_json(file)
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names or not isinstance(index.get("metadata"), dict):
        raise ValueError(f"{file}: an index has metadata and a weight_map of tensors and their files")
    for shard in names.values():
        is_plain = isinstance(shard, str) and _PLAIN.fullmatch(shard) and shard.strip(". ")
        if not is_plain or ((path := file.with_name(shard)).exists() and not path.is_file()):
            raise ValueError(f"{file}: weight_map of this index names {shard!r}, which is no plain file beside it")
    return names


def check_index(name: str | PathLike[str], variant: str | None = None, **hub: Any) -> None:
    """Refuse a checkpoint whose index leads elsewhere (`read_index`), before a loader of transformers follows it."""
    directory = Path(name) / hub.get("subfolder", "")
    if directory.is_dir():
        found = [*directory.glob("*.index*.json")]  # config.json may name any of them
    else:
        paths = (_found(name, [file], variant, hub | {"force_download": False}) for file in _NAMES[::2])
        found = [Path(path) for path in paths if path]
    for file in found:
        read_index(file)


def check_stored(name: str | PathLike[str], config: Any = None, variant: str | None = None, **hub: Any) -> None:
    """Refuse an index that leads elsewhere, and counts (of `config`, or the directory's) that tensors cannot have."""
    check_index(name, variant, **hub)
    if names := tensor_names(name, variant, **hub):
        is_read = isinstance(config, PreTrainedConfig)
        fields = config.to_dict() if is_read else PreTrainedConfig.get_config_dict(config or name, **hub)[0]
        check_counts(name, fields, len(names))


def write_json(file: Path, values: Mapping[str, object]) -> None:
    """Write fields as JSON."""
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_tensors(files: Iterable[str | PathLike[str]], prefix: str = "") -> Tensors:
    """Return the tensors of all files whose names (see `unwrapped`) begin with `prefix`, which is removed.

    Files are `.safetensors`, or anything else that `torch.load` reads with `weights_only=True`.
    """
    tensors: Tensors = {}
    for file in map(Path, files):
        with naming(file):
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as opened:
                    names = unwrapped(opened.keys())
                    wanted = {name: stored for stored, name in names.items() if name.startswith(prefix)}
                    tensors |= {name.removeprefix(prefix): opened.get_tensor(each) for name, each in wanted.items()}
            else:
                found = read_pickle(file)
                tensors |= below(dict(zip(unwrapped(found).values(), found.values())), prefix)
    return tensors


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Return names of tensors without the prefixes of wrapped models, by the names that are stored.

    `torch.compile` puts `_orig_mod.` before the names within, `DistributedDataParallel` `module.` before all.
    """
    result = {name: name.replace("_orig_mod.", "") for name in names}
    while result and all(name.startswith("module.") for name in result.values()):
        result = {stored: name.removeprefix("module.") for stored, name in result.items()}
    return result


def tensor_names(name: str | PathLike[str], variant: str | None = None, **hub: Any) -> list[str]:
    """Return the names of a checkpoint's tensors (see `unwrapped`); no tensor is read, and of shards only the index."""
    path = _found(name, _NAMES, variant, hub)
    return [] if path is None else names_in(Path(path))


def names_in(file: Path) -> list[str]:
    """Return the names of the tensors of a file, or of an index (see `unwrapped`)."""
    with naming(file):
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                return [*unwrapped(opened.keys()).values()]
        names = read_index(file) if file.suffix == ".json" else read_pickle(file, map_location="meta")
        return [*unwrapped(names).values()]


def weight_files(name: str | PathLike[str], variant: str | None = None, pickles: bool = False, **hub: Any) -> list[str]:
    """Return the paths of a checkpoint's weight files: one file, or the shards of its index, fetched from the Hub.

    With `pickles`, `pytorch_model.bin` is accepted where there are no safetensors.
    """
    names = _NAMES if pickles else _NAMES[:2]
    if (path := _found(name, names, variant, hub)) is None:
        raise ValueError(f"{name}: no weights; none of {', '.join(names)} exists")
    if not path.endswith(".json"):
        return [path]
    read_index(Path(path))  # whose names are followed now
    return get_checkpoint_shard_files(name, path, **hub)[0] or []


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
    except (*OF_FILES, OSError, EOFError, TypeError, ValueError, yaml.YAMLError) as error:
        raise unusable(file, error) from error


def read_pickle(file: str | PathLike[str], map_location: str = "cpu") -> Tensors:
    """Return the tensors of a pickle, or of its `state_dict`, by name."""
    loaded = torch.load(file, map_location=map_location, weights_only=True)
    loaded = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else loaded
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{file} holds a {type(loaded).__name__}, not tensors by name; save its state_dict")
    return loaded


def below(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    """Return the tensors whose names begin with `prefix`, which is removed."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


_FIELDS = {"part": "weight|bias", "rest": ".*"}  # what fields of `Names` match; any other one matches a number


@cache
def _pattern(template: str) -> re.Pattern[str]:
    def group(field: re.Match[str]) -> str:
        return f"(?P<{field[1]}>{_FIELDS.get(field[1], '[0-9]+')})"

    return re.compile(re.sub(r"\\{(\w+)\\}", group, re.escape(template)))


def renamed(
    tensors: Mapping[str, Value], names: Names, owner: str | PathLike[str], back: bool = False, **fields: object
) -> dict[str, Value]:
    """Return tensors of another layout under this library's names (the first of `names` that fits), or `back`.

    `owner` says where they are; `fields` are those that the new names have, and the old ones may lack.
    """
    new_names: dict[str, str] = {}
    for name in tensors:
        for old, new in (pair[::-1] if back else pair for pair in names):
            if name not in new_names and (match := _pattern(old).fullmatch(name)):
                new_names[name] = new.format(**fields | match.groupdict())
    refuse_unknown(owner, tensors.keys() - new_names.keys())
    return {new: tensors[name] for name, new in new_names.items()}


def count_of(owner: object, numbers: Iterable[int], what: str) -> int:
    """Return how many numbers there are in names of tensors, repeated or not; refuse a gap in them."""
    known = sorted(set(numbers))
    if known and known[-1] != len(known) - 1:
        raise ValueError(f"{owner}: its tensors name {what} {known[-1]}, and there are {len(known)}, counted from 0")
    return len(known)


def refuse_unknown(owner: str | PathLike[str], names: Iterable[str]) -> None:
    """Refuse tensors that a layout does not know, so that none is skipped silently."""
    if names := sorted(names):
        raise ValueError(f"{owner}: {len(names)} tensors are not known in this layout: {', '.join(names[:5])}")


def _found(name: str | PathLike[str], files: Sequence[str], variant: str | None, hub: Fields) -> str | None:
    """Return the path of the first of some files of a checkpoint that there is."""
    for stem, _, ending in (file.rpartition(".") for file in files):
        file = f"{stem}.{variant}.{ending}" if variant else f"{stem}.{ending}"
        if path := cached_file(name, file, **{"_raise_exceptions_for_missing_entries": False, **hub}):
            return path
    return None
