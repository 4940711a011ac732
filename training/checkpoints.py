"""The checkpoints in the directory of a run: which of them is whole, and whether its training has come to its end."""

from __future__ import annotations

import json
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

_STATE = "trainer_state.json"
_OF_UPDATES = ("optimizer.pt", "scheduler.pt")


def last_whole_checkpoint(folder: str | PathLike) -> str | None:
    """The checkpoint that a run can go on from; None where there is none.

    Warns of later ones that are not whole, because the machine failed while they were written.
    """
    found = [each for each in Path(folder).glob("checkpoint-*") if each.is_dir() and _number(each) is not None]
    for checkpoint in sorted(found, key=_number, reverse=True):
        lacking = missing_of(checkpoint)
        if lacking is None:
            return str(checkpoint)
        warnings.warn(
            f"{checkpoint} was cut off while it was written ({lacking} is missing): passed over", stacklevel=2
        )
    return None


def missing_of(checkpoint: Path) -> str | None:
    """The file that a checkpoint lacks, compared with those beside it; None where it is whole."""
    if not _state(checkpoint):  # written last of all
        return _STATE
    for name in _OF_UPDATES:
        if not (checkpoint / name).exists() and any(checkpoint.parent.glob(f"checkpoint-*/{name}")):
            return name
    return None


def is_finished(checkpoint: str | PathLike | None, max_steps: int) -> bool:
    """Whether all steps are made; warns then. `Trainer` would make one more each time that it is started again."""
    if checkpoint is None or max_steps < 1 or _state(Path(checkpoint)).get("global_step", 0) < max_steps:
        return False
    warnings.warn(f"{checkpoint} has made all of max_steps={max_steps}: nothing is left to train", stacklevel=2)
    return True


def best_or_last(checkpoint: str | PathLike, wants_best: bool) -> str:
    """The checkpoint whose weights a finished training ends with."""
    best = _state(Path(checkpoint)).get("best_model_checkpoint") if wants_best else None
    return best if best and Path(best).is_dir() else str(checkpoint)


def _number(checkpoint: Path) -> int | None:
    digits = checkpoint.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() else None


def _state(checkpoint: Path) -> dict[str, Any]:
    """What `Trainer` wrote of its state; nothing where the file is not there, or is not whole."""
    try:
        return json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
