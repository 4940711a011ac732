"""The versions of transformers that this library was tested with; importing it with a newer one warns once."""

from __future__ import annotations

from importlib.metadata import version

import transformers
from packaging.version import parse
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import logging

logger = logging.get_logger(__name__)

TESTED_VERSIONS = ("5.21", "5.22", "5.23", "5.24")
"""Versions of transformers on which all core tests pass (docs/compatibility.md)."""


def warn_of_newer_version(installed: str = transformers.__version__) -> None:
    """Say once that a version of transformers is newer than all that were tested."""
    if parse(installed).release[:2] > parse(TESTED_VERSIONS[-1]).release:
        logger.warning_once(
            f"transformers {installed} is newer than {TESTED_VERSIONS[-1]}, the newest tested with tokenahead; "
            f"if a call fails: pip install 'transformers=={TESTED_VERSIONS[-1]}.*'"
        )


def obstacle_of_peft() -> str | None:
    """Return why `add_adapter` and its kind cannot be used: transformers refuses older versions of peft; else None."""
    installed = version("peft")
    if parse(installed) >= parse(MIN_PEFT_VERSION):
        return None
    return f"transformers {transformers.__version__} needs peft {MIN_PEFT_VERSION} for add_adapter, found {installed}"
