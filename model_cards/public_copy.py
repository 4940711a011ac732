"""Copies of saved directories that say nothing of the machine they were made on. Uploads nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..training.files import replace_text
from .card import check_no_local_path
from .facts import hub_id

logger = logging.get_logger(__name__)
_NAMES = {"base_model_name_or_path", "_name_or_path", "name_or_path", "best_model_checkpoint"}
"""Fields that hold the name of a model or its directory, in config.json of any layout and in files of peft and
Trainer."""
_FILES = {"config.json", "adapter_config.json", "tokenizer_config.json", "trainer_state.json"}


def public_copy(source: Path, target: Path, left_out: Sequence[str] = (), also: Sequence[Path] = ()) -> None:
    """Copies a directory for the world: names of local directories are taken out of its configs.

    A card that shows a path of this machine is left out, with a warning. Files are linked where the disk can.

    Args:
        source: The directory; it stays as it is.
        target: Where to; made if it is not there.
        left_out: Patterns of paths in `source`; `*` stands for slashes, too.
        also: Further files for the top of `target`.
    """
    inside = sorted(path for path in source.rglob("*") if path.is_file())
    places = {file.relative_to(source): file for file in inside}
    for name, file in (places | {Path(file.name): file for file in also}).items():
        place = target / name
        if any(fnmatch(name.as_posix(), pattern) for pattern in left_out):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".md" or _is_public(file):
            _link(file, place)
    hide_local_names(target)


def hide_local_names(folder: Path) -> None:
    """Has configs name a backbone, or a directory that they were read from, only where the Hub knows that name.

    Args:
        folder: A directory, whose subfolders are looked at, too.
        also: Further files for the top of `target`.
    """
    for file in folder.rglob("*.json"):
        if file.name in _FILES:
            values = json.loads(file.read_text(encoding="utf-8"))
            if (public := _public(values)) != values:  # replaced, not rewritten: the file may be a link
                replace_text(file, json.dumps(public, indent=2, ensure_ascii=False) + "\n")


def _public(values: Any) -> Any:
    if isinstance(values, list):
        return [_public(value) for value in values]
    if not isinstance(values, dict):
        return values
    return {name: hub_id(value) if name in _NAMES and isinstance(value, str) else _public(value)
            for name, value in values.items()}  # fmt: skip


def _is_public(card: Path) -> bool:
    try:
        check_no_local_path(card.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        logger.warning(f"{card} is not pushed: {error}")
        return False
    return True


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, place)
