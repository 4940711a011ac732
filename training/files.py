"""Atomic writing of files: a reader never sees half of one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def replace_text(path: str | Path, text: str) -> Path:
    """Write `text` to a temporary file in the same directory and rename it; an interruption keeps the old file.

    Args:
        path: The file to write or replace. Its directory is created if missing.
        text: The whole new content, written as UTF-8 with its own line ends.

    Returns:
        `path` as a `Path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # not tempfile: its files are readable by their owner only, and the rename would keep that
        temporary.write_text(text, encoding="utf-8", newline="")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def replace_picture(path: Path, figure: Figure) -> Path:
    """Write a figure as PNG under a temporary name first; return `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    return temporary.replace(path)
