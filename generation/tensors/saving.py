"""Files and directories that are saved whole or not at all: a kill, Ctrl-C or a full disk mixes no two versions.

A save writes into a hidden folder of its target, `.tokenahead-saving.X`. When all is there, the folder is renamed to
`.tokenahead-complete`: from then on the directory is the new version, for all who read it with `reads_whole`. Files are
brought in by hard links, so that the folder is whole until it is renamed again and removed. Who finds a complete folder
after a kill brings its files in once more, which does no harm. Other libraries find no config.json meanwhile.

Knows no model.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from .config_errors import naming_field

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

P = ParamSpec("P")
Result = TypeVar("Result")
PREFIX = ".tokenahead-"
"""What names of files begin with that are no part of a saved directory."""
_SAVING, _COMPLETE = f"{PREFIX}saving.", f"{PREFIX}complete"
_LIST, _LINK = f"{PREFIX}list.json", f"{PREFIX}link"
_KEYS = ("tokenizer_config.json", "params.json", "adapter_config.json", "config.json")
"""Files that every loader reads first: taken away before others change, and brought in after them."""
_STATE = (*_KEYS, _COMPLETE)
_DAY = 24 * 3600.0


@contextmanager
def whole_directory(
    target: str | PathLike,
    variant: str | None = None,
    replaced: Sequence[str] = (),
    updated: Sequence[str] = (),
    in_place: bool = False,
) -> Iterator[Path]:
    """Yield a directory to write into, whose files are the new version of `target` once all of them are complete.

    An exception, Ctrl-C, a kill or a full disk leaves `target` the old version (or absent) or the new one.

    Args:
        target: The directory; files of the same names are replaced, others stay.
        variant: As for `save_pretrained`: weights of an earlier save of this variant are removed, when others came.
        replaced: Patterns of further files of an earlier save that are removed where this one has none.
        updated: Names of files that whoever writes may read and change: they are copied into the temporary directory.
        in_place: Yield `target` itself: all processes write torch's distributed checkpoints into one directory.

    Yields:
        The temporary directory, in `target`; `target` itself where that is within a temporary directory.

    Raises:
        NotADirectoryError: `target` is a file.
        IsADirectoryError: A directory in `target` has the name of a file that is saved.
    """
    target = Path(target).absolute()
    if target.is_file():
        raise NotADirectoryError(f"{target} is a file; name a directory to save to")
    outer = next((path for path in (target, *target.parents) if path.name.startswith(_SAVING)), None)
    if in_place or outer is not None:
        finish(target)
        target.mkdir(parents=True, exist_ok=True)
        if outer is not None:  # a part of another save, which ends when all is there
            with (outer / _LIST).open("a", encoding="utf-8") as noted:
                noted.writelines(f"{(target / pattern).relative_to(outer).as_posix()}\n" for pattern in replaced)
        yield target
        return
    with _own_folder(target) as folder:
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
    with _own_folder(path.parent) as folder:
        written = folder / path.name
        yield written
        _flush(written)
        finish(path.parent)
        written.replace(path)


def finish(directory: str | PathLike) -> None:
    """Finish a save of a directory that was killed in its last step, if there is one and nobody else is doing it.

    Nothing happens in a directory that may not be written, or on a file system without locks: loaders of ours then read
    the complete folder where it is.
    """
    directory = Path(directory)
    if (directory / _COMPLETE).is_dir():
        with _opened(directory) as descriptor, suppress(OSError):
            if _lock(descriptor):
                _bring_in(directory)


def readable(directory: Path, keys: Sequence[str]) -> Path:
    """Return where a directory is to be read: in the folder of a save that cannot be finished, if that has a key."""
    finish(directory)
    complete = directory / _COMPLETE
    return complete if any((complete / key).is_file() for key in keys) else directory


def reads_whole(load: Callable[P, Result], keys: Sequence[str] = _KEYS[1:]) -> Callable[P, Result]:
    """Let a function that loads a directory, its first argument, see one version of it.

    An unfinished save is finished, or read in its complete folder, if that has one of `keys`. Where a save came
    between, the function is called once more, and further saves wait for it then.
    """
    parameters = [name for name in inspect.signature(load).parameters if name not in ("cls", "self")]
    position = len(inspect.signature(load).parameters) - len(parameters)

    call: Callable[..., Result] = load

    @wraps(load)
    def loading(*args: Any, **kwargs: Any) -> Any:
        given = args[position] if len(args) > position else kwargs.get(parameters[0])
        if not isinstance(given, (str, PathLike)) or not given:
            return call(*args, **kwargs)
        directory = Path(given)
        if not directory.is_dir():
            with naming_field(given):
                return call(*args, **kwargs)

        def load_from(place: Path) -> Any:
            if place == directory:
                return call(*args, **kwargs)
            passed = str(place)
            if len(args) > position:
                result = call(*args[:position], passed, *args[position + 1 :], **kwargs)
            else:
                result = call(*args, **kwargs | {parameters[0]: passed})
            _remember(result, passed, str(given))
            return result

        finish(directory)
        before = _state(directory)
        try:
            with naming_field(directory):
                result = load_from(readable(directory, keys))
            if _state(directory) == before:
                return result
        except Exception:
            if _state(directory) == before:
                raise
        finish(directory)
        with _opened(directory) as descriptor, naming_field(directory):
            _lock(descriptor, waits=True, shared=True)  # shared, because all processes of a run may load
            return load_from(readable(directory, keys))

    return loading


def _state(directory: Path) -> list[tuple[int, int] | None]:
    """Return what every delivery of a version changes."""
    state: list[tuple[int, int] | None] = []
    for name in _STATE:
        try:
            found = (directory / name).stat()
            state.append((found.st_ino, found.st_mtime_ns))
        except OSError:
            state.append(None)
    return state


def _remember(result: Any, place: str, name: str) -> None:
    """Let what was loaded from a folder within a directory remember the directory's name."""
    for loaded in result if isinstance(result, tuple) else (result,):
        model = loaded if hasattr(type(loaded), "modules") else getattr(loaded, "__dict__", {}).get("model")
        for part in [loaded, *(model.modules() if hasattr(type(model), "modules") else ())]:
            own = getattr(part, "__dict__", {})
            for fields in (own, getattr(own.get("config"), "__dict__", {})):
                fields.update({key: name for key in ("name_or_path", "_name_or_path") if fields.get(key) == place})


@contextmanager
def _own_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder in `target`, locked as long as this process lives in it; it is removed in the end.

    What others left behind is removed, too; after an error, also directories that were made for it.
    """
    made = [each for each in (target, *target.parents) if not each.exists()]
    try:
        with _locked_folder(target) as folder:
            yield folder
    except BaseException:
        with suppress(OSError):  # somebody else writes there
            for each in made:
                each.rmdir()
        raise
    _remove_left_behind(target)


@contextmanager
def _locked_folder(target: Path) -> Iterator[Path]:
    while True:
        folder = target / f"{_SAVING}{secrets.token_hex(8)}"
        target.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # `target` was made for a save that failed, and removed with it
            folder.mkdir()
        with _opened(folder) as descriptor:
            # another save may have found it before it was locked, and taken it for one that was left behind
            if _lock(descriptor) is not False and folder.is_dir():
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return


def _remove_left_behind(target: Path) -> None:
    """Remove folders whose writers are gone: a lock ends with its process, wherever that ran."""
    for folder in target.glob(f"{_SAVING}*"):
        with _opened(folder) as descriptor, suppress(OSError):
            is_free = _lock(descriptor)
            if time.time() - folder.stat().st_mtime > _DAY if is_free is None else is_free:
                shutil.rmtree(folder, ignore_errors=True)


def _deliver(folder: Path, files: list[Path], target: Path, variant: str | None, replaced: Sequence[str]) -> None:
    """Make the files in `folder` the version of `target`."""
    with _opened(target) as descriptor:
        for path in [*files, *{file.parent for file in files}]:
            _flush(path)
        # not earlier: all processes of a sharded save write, and who waits for the others must hold no lock
        _lock(descriptor, waits=True)
        _bring_in(target)
        _check_places(folder, files, target)
        names = {file.relative_to(folder) for file in files}
        noted = (folder / _LIST).read_text(encoding="utf-8").splitlines() if (folder / _LIST).is_file() else []
        replaced = [*replaced, *noted]
        stale = [name.as_posix() for name in _stale(names, target, variant, replaced)]
        (folder / _LIST).write_text(json.dumps(stale), encoding="utf-8")
        _flush(folder / _LIST)
        _flush(folder)
        folder.rename(target / _COMPLETE)  # the new version
        _flush(target)
        _bring_in(target, folder)


def _bring_in(target: Path, emptied: Path | None = None) -> None:
    """Bring in the files of the complete folder, if there is one, and rename it to `emptied`, which is then removed.

    To be called with the directory's lock. Doing it again does no harm.
    """
    complete = target / _COMPLETE
    if not complete.is_dir():
        return
    try:
        stale = json.loads((complete / _LIST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # nothing that was saved
        stale = None
    if isinstance(stale, list):
        names = [file.relative_to(complete) for file in files_of(complete)]
        others, keys = ([name for name in names if (name.name in _KEYS) is is_key] for is_key in (False, True))
        keys.sort(key=lambda name: (-len(name.parts), _KEYS.index(name.name)))  # config.json is the last
        for name in keys:
            _place_of(name, target).unlink(missing_ok=True)
        for name in others:
            _bring(complete, name, target)
        for name in map(Path, stale):
            if _is_within(name, target):
                (target / name).unlink(missing_ok=True)
        for name in keys:
            _bring(complete, name, target)
        _flush(target)
    complete.rename(emptied or target / f"{_SAVING}{secrets.token_hex(8)}")


def _bring(complete: Path, name: Path, target: Path) -> None:
    """Put a file of the complete folder in its place; the folder keeps it, too."""
    link = complete / _LINK
    link.unlink(missing_ok=True)  # of an earlier try
    try:
        os.link(complete / name, link, follow_symlinks=False)
    except (OSError, NotImplementedError):  # a disk without hard links
        shutil.copyfile(complete / name, link, follow_symlinks=False)
        _flush(link)
    link.replace(_place_of(name, target))


def _place_of(name: Path, target: Path) -> Path:
    """Return the path of a file in `target`, whose directories there are made; what they are linked to is unchanged."""
    for parent in reversed(name.parents[:-1]):
        if (target / parent).is_symlink():
            (target / parent).unlink()
        (target / parent).mkdir(exist_ok=True)
    return target / name


def files_of(folder: Path) -> list[Path]:
    """Return the files of a saved directory; none of those of saves that are not finished."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in found if not any(part.startswith(PREFIX) for part in path.relative_to(folder).parts))


def _check_places(folder: Path, files: list[Path], target: Path) -> None:
    """Refuse what could not be brought in, while `target` is still the old version."""
    for name in (file.relative_to(folder) for file in files):
        if (target / name).is_dir() and not (target / name).is_symlink():
            raise IsADirectoryError(f"{target / name} is a directory; {name} is a file of what is saved")
        for parent in name.parents[:-1]:
            if (target / parent).is_file() and not (target / parent).is_symlink():
                raise NotADirectoryError(f"{target / parent} is a file; {parent} is a directory of what is saved")


def _stale(names: set[Path], target: Path, variant: str | None, replaced: Sequence[str]) -> Iterable[Path]:
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
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = _descriptor(path)
    if descriptor is None:
        return
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # some file systems flush no directories
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _descriptor(path: Path) -> int | None:
    """Open a file or a directory to flush or lock it; Windows can do neither with what is opened to be read."""
    return None if fcntl is None else os.open(path, os.O_RDONLY)


@contextmanager
def _opened(directory: Path) -> Iterator[int | None]:
    """Yield a descriptor of a directory; None where it cannot be opened."""
    descriptor = None
    with suppress(OSError):
        descriptor = _descriptor(directory)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)  # with its lock


def _lock(descriptor: int | None, waits: bool = False, shared: bool = False) -> bool | None:
    """Return whether the lock could be had; None where there are no locks."""
    if fcntl is None or descriptor is None:
        return None
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if waits else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True
