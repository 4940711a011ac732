"""Directories that are written whole or not at all; weights of an earlier save are removed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from transformers.utils import CONFIG_NAME

_TEMPORARY = re.compile(r"\.tokenahead-saving\.(\d+)")


@contextmanager
def whole_folder(target: str | PathLike, variant: str | None = None) -> Iterator[Path]:
    """Yield a directory to write into, whose files move to `target` once all of them are complete.

    An exception, Ctrl-C or a full disk leaves `target` unchanged, or absent; the next save removes
    what a killed process left.

    Args:
        target: The directory; files of the same names are replaced, config.json last, others stay.
        variant: As for `save_pretrained`: weights of an earlier save of this variant are removed, when others came.

    Yields:
        The temporary directory, on the same disk.

    Raises:
        NotADirectoryError: `target` is a file.
    """
    target = Path(target)
    if target.is_file():
        raise NotADirectoryError(f"{target} is a file; name a directory to save to")
    # inside of a directory that exists: it may be a mount point, or in a directory where we may not write
    parent = target if target.is_dir() else target.parent
    for left in parent.glob(".tokenahead-saving.*") if parent.is_dir() else ():
        if (match := _TEMPORARY.fullmatch(left.name)) and not _runs(int(match[1])):
            shutil.rmtree(left, ignore_errors=True)
    temporary = parent / f".tokenahead-saving.{os.getpid()}"
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _deliver(temporary, target, variant)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # somebody else may have put something there
                folder.rmdir()
        raise
    shutil.rmtree(temporary, ignore_errors=True)


def _runs(process: int) -> bool:
    """Return whether a process of this machine runs; True where there is no harmless check (Windows)."""
    if os.name == "nt":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _deliver(source: Path, target: Path, variant: str | None) -> None:
    if not any(source.iterdir()):  # another process writes
        return
    if not target.exists():
        with suppress(OSError):  # where another process was faster, files are moved one by one
            source.rename(target)
            return
    files = sorted((file for file in source.rglob("*") if file.is_file()), key=lambda file: file.name == CONFIG_NAME)
    for file in files:
        moved = target / file.relative_to(source)
        moved.parent.mkdir(parents=True, exist_ok=True)
        file.replace(moved)
    new = {file.name for file in files}
    if any(name.endswith(".safetensors") for name in new):
        for file in target.iterdir():
            if _is_weights(file.name, variant) and file.name not in new:
                file.unlink()


def _is_weights(name: str, variant: str | None) -> bool:
    """Return whether transformers would save weights of the variant under this name."""
    part = f"\\.{re.escape(variant)}" if variant else ""
    weights, index = rf"model{part}(-\d{{5}}-of-\d{{5}})?\.safetensors", rf"model\.safetensors\.index{part}\.json"
    return bool(re.fullmatch(f"{weights}|{index}", name))
