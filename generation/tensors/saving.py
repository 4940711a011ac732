"""Files and directories that are saved whole or not at all: a kill, Ctrl-C or a full disk mixes no two versions.

A save writes into a hidden folder of its target, `.tokenahead-saving.X`. When all is there, the folder is renamed:

    .tokenahead-complete.X    the directory is the new version; files of the old one that go are moved into the folder
    .tokenahead-arriving.X    these have gone; the new files are moved to their places, config.json as the last

Whoever finds one of these after a kill goes on (`finish`), several processes at once, too: files only move. Other
libraries find no config.json meanwhile. Two writers of one directory at once are not supported.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import ParamSpec, TypeVar

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

P = ParamSpec("P")
Result = TypeVar("Result")
OF_FILES = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, SafetensorError, StrictDataclassError, UnpicklingError,
)  # fmt: skip
"""What damaged files, and values in config.json that no model can have, raise in loaders."""
PREFIX = ".tokenahead-"  # what names of files begin with that are no part of a saved directory
_SAVING, _COMPLETE, _ARRIVING = f"{PREFIX}saving.", f"{PREFIX}complete.", f"{PREFIX}arriving."
_LIST, _OLD = f"{PREFIX}list.json", f"{PREFIX}old."
_KEYS = ("tokenizer_config.json", "params.json", "adapter_config.json", "config.json")
"""Files that every loader reads first: taken away before others change, and brought in after them."""


@contextmanager
def whole_directory(
    target: str | PathLike,
    variant: str | None = None,
    replaced: Sequence[str] = (),
    updated: Sequence[str] = (),
    in_place: bool = False,
) -> Iterator[Path]:
    """Yield a directory to write into, whose files are the new version of `target` once all of them are complete.

    It is a temporary one in `target`, or `target` itself where that is within a temporary directory. Files of the same
    names are replaced, others stay; of an earlier save, weights of this `variant` and further files of the patterns
    `replaced` are removed where this one has none. Files that whoever writes may read and change are `updated`: they
    are copied into the temporary directory. `in_place` yields `target` itself: all processes write torch's distributed
    checkpoints into one directory.
    """
    target = Path(target).absolute()
    if target.is_file():
        raise NotADirectoryError(f"{target} is a file; name a directory to save to")
    finish(target).mkdir(parents=True, exist_ok=True)
    outer = next((path for path in (target, *target.parents) if path.name.startswith(_SAVING)), None)
    if outer is not None:  # a part of another save, which ends when all is there
        with (outer / _LIST).open("a", encoding="utf-8") as noted:
            noted.writelines(f"{(target / pattern).relative_to(outer).as_posix()}\n" for pattern in replaced)
    if in_place or outer is not None:
        yield target
        return
    with TemporaryDirectory(prefix=_SAVING, dir=target, ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        earlier = {name: (target / name).read_bytes() for name in updated if (target / name).is_file()}
        for name, data in earlier.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        yield folder
        for name, data in earlier.items():
            if (folder / name).is_file() and (folder / name).read_bytes() == data:
                (folder / name).unlink()
        if files := files_of(folder):  # other processes than the first write none
            _deliver(folder, files, target, variant, replaced)


@contextmanager
def whole_file(path: str | PathLike) -> Iterator[Path]:
    """Yield a path to write a file to, which then takes its place at once; links to other files are replaced."""
    path = Path(path).absolute()
    written = path.with_name(f"{PREFIX}{path.name}")
    finish(path.parent).mkdir(parents=True, exist_ok=True)
    written.unlink(missing_ok=True)  # of a save that was killed, or a link
    try:
        yield written
        _flush(written)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def finish(directory: str | PathLike) -> Path:
    """Finish a save of a directory that was killed when all was there, if there is one; return the directory."""
    directory = Path(directory)
    for folder in [*directory.glob(f"{_COMPLETE}*"), *directory.glob(f"{_ARRIVING}*")]:
        if not folder.is_symlink():
            _bring_in(folder)
    return directory


def unusable(name: object, error: Exception) -> ValueError:
    """Return the error of files that make nothing; torch's own about pickles advises to run what is in them."""
    reason = "a pickle holds more than tensors" if isinstance(error, UnpicklingError) else error
    return ValueError(f"{name} cannot be loaded: {reason}")


def reads_whole(load: Callable[P, Result]) -> Callable[P, Result]:
    """Let a function that loads a directory, its first argument, finish a save of it first, and name it in errors."""
    names = [*inspect.signature(load).parameters]
    position = int(names[0] in ("cls", "self"))

    @wraps(load)
    def loading(*args: P.args, **kwargs: P.kwargs) -> Result:
        given = args[position] if len(args) > position else kwargs.get(names[position])
        if not isinstance(given, (str, PathLike)) or not given:
            return load(*args, **kwargs)
        finish(given)
        try:
            return load(*args, **kwargs)
        except OF_FILES as error:
            raise unusable(given, error) from error

    return loading


def files_of(folder: Path) -> list[Path]:
    """Return the files of a saved directory; none of those of saves that are not finished."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(PREFIX) for part in path.relative_to(folder).parts))


def _deliver(folder: Path, files: list[Path], target: Path, variant: str | None, replaced: Sequence[str]) -> None:
    """Make the files in `folder` the version of `target`."""
    names = {file.relative_to(folder) for file in files}
    for place in (target / name for name in names):  # what could not be brought in
        wrong = [place] if place.is_dir() else [each for each in place.parents if each.is_file()]
        if wrong and not wrong[0].is_symlink():
            raise FileExistsError(f"{wrong[0]} is in the way of {place}, a file of what is saved")
    if (folder / _LIST).is_file():
        replaced = [*replaced, *(folder / _LIST).read_text(encoding="utf-8").splitlines()]
    leaving = [*(name for name in names if name.name in _KEYS), *_stale(names, target, variant, replaced)]
    (folder / _LIST).write_text(json.dumps([name.as_posix() for name in leaving]), encoding="utf-8")
    for path in [*files, folder / _LIST, *{file.parent for file in files}, folder]:
        _flush(path)
    complete = folder.rename(target / folder.name.replace(_SAVING, _COMPLETE))  # the new version
    _flush(target)
    _bring_in(complete)
    for left in [*target.glob(f"{_SAVING}*"), *target.glob(f"{_COMPLETE}*")]:
        shutil.rmtree(left, ignore_errors=True)


def _bring_in(folder: Path) -> None:
    """Bring in the files of a complete folder, wherever an earlier try ended. Others may do so at the same time."""
    target, version = folder.parent, folder.name.rpartition(".")[2]
    complete, arriving = target / f"{_COMPLETE}{version}", target / f"{_ARRIVING}{version}"
    with suppress(FileNotFoundError):  # they have gone
        for number, name in enumerate(json.loads((complete / _LIST).read_text(encoding="utf-8"))):
            if _is_within(Path(name), target):
                _move(target / name, complete / f"{_OLD}{number}")
        complete.rename(arriving)
    with suppress(FileNotFoundError):  # all are there
        for name in sorted((file.relative_to(arriving) for file in files_of(arriving)), key=_order):
            _move(arriving / name, _place_of(name, target))
        _flush(target)
        shutil.rmtree(arriving, ignore_errors=True)


def _move(path: Path, to: Path) -> None:
    with suppress(FileNotFoundError):  # another process has moved it
        path.replace(to)


def _order(name: Path) -> tuple[bool, int, int]:  # files that arrive: keys behind others, config.json as the last
    is_key = name.name in _KEYS
    return is_key, -len(name.parts), _KEYS.index(name.name) if is_key else 0


def _place_of(name: Path, target: Path) -> Path:
    """Return the path of a file in `target`, whose directories there are made; what they are linked to is unchanged."""
    for parent in reversed(name.parents[:-1]):
        if (target / parent).is_symlink():
            (target / parent).unlink()
        (target / parent).mkdir(exist_ok=True)
    return target / name


def _stale(names: set[Path], target: Path, variant: str | None, replaced: Sequence[str]) -> list[Path]:
    """Return the files of an earlier version that the new one does not have."""
    found = {path for pattern in replaced for path in target.glob(pattern) if not path.is_dir()}
    for within in {name.parent for name in names if _is_weights(name.name, variant)}:
        found |= {path for path in (target / within).glob("*") if _is_weights(path.name, variant)}
    return sorted(name for name in {path.relative_to(target) for path in found} - names if _is_within(name, target))


def _is_weights(name: str, variant: str | None) -> bool:
    """Return whether transformers would save weights of the variant under this name."""
    part = f"\\.{re.escape(variant)}" if variant else ""
    weights, index = rf"model{part}(-\d{{5}}-of-\d{{5}})?\.safetensors", rf"model\.safetensors\.index{part}\.json"
    return bool(re.fullmatch(f"{weights}|{index}", name))


def _is_within(name: Path, target: Path) -> bool:
    is_linked = any((target / parent).is_symlink() for parent in name.parents[:-1])
    return not (name.is_absolute() or ".." in name.parts or is_linked)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk; Windows flushes nothing opened to be read."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # some file systems flush no directories
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
