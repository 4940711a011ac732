"""The directory of a run: its settings, machine, versions and log. Knows no model."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ... import __version__
from ...generation.tensors.tensor_files import Fields
from ...modeling.heads.joint import BACKBONE
from ..checkpoints import fault_of, last_whole_checkpoint
from ..loading import has_adapters, holds_model
from ..results import environment
from ..utils import check_same, needs_extra, replace_file
from .settings import Settings

with needs_extra("train", "a run directory"):
    import yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RUN = "run.json"
"""Versions, seeds, state of git, command."""
CONFIG = "config.yaml"
"""The settings as the user wrote them, to run them again."""
METRICS = "metrics.json"
"""Every entry of the log."""
_OF_NO_CONSEQUENCE = {"output_dir", "resume_from_checkpoint", "logging_dir", "run_name"}
_SECRET = re.compile(r".*(token|api.?key)")  # of names
_PACKAGES = ("accelerate", "datasets", "peft", "safetensors", "torch", "transformers", "trl")


def describe_run(settings: Settings, facts: dict[str, object]) -> dict[str, object]:
    """Return all that is needed to repeat a run."""
    training = settings.training
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "command": " ".join(["tokenahead", *_shown(sys.argv[1:])]),
        "versions": {"tokenahead": __version__, **versions},
        "git": git_state(),
        "seeds": {"seed": training.seed, "data_seed": training.data_seed},
        "machine": environment() | {"device": str(training.device)},
        "processes": training.world_size,
        "model": facts,
    }


def git_state() -> dict[str, str | bool] | None:
    """Return the commit of the working directory, and whether files differ from it; None where there is no git."""
    try:
        commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
        return {"commit": commit, "is_changed": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=20).stdout.strip()


class RunWriter(TrainerCallback):
    """Writes a run's facts when its first step begins, so that a refused run leaves nothing."""

    def __init__(self, directory: Path, settings: Settings, facts: dict[str, object]) -> None:
        self.what, self.is_written = (directory, settings, facts), False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Write once, in the first process."""
        if state.is_world_process_zero and not self.is_written:
            write_run(*self.what)
        self.is_written = True


@contextmanager
def remove_empty_dir(directory: Path) -> Iterator[None]:
    """Remove the directory that a trainer makes, where nothing is then written to it."""
    existed = directory.exists()
    try:
        yield
    finally:
        if not existed:
            with suppress(OSError):  # it is not empty, or was never made
                directory.rmdir()


def write_run(directory: Path, settings: Settings, facts: dict[str, object]) -> None:
    """Write `run.json` and `config.yaml`."""
    run = json.dumps(describe_run(settings, facts), indent=1, ensure_ascii=False, default=str)
    replace_file(directory / RUN, run + "\n")
    written: Fields = _without_secrets(settings.given) | {"flags": _shown(settings.given["flags"])}
    config = {"given": json.loads(json.dumps(written, default=str)), "resolved": _resolved(settings)}
    replace_file(directory / CONFIG, yaml.safe_dump(config, sort_keys=False))


def _resolved(settings: Settings) -> dict[str, dict[str, object]]:
    """Return the settings that differ from their defaults, by class, as YAML can hold them."""
    parts = (settings.data, settings.mixture, settings.model, settings.drafter, settings.training)
    changed = {type(part).__name__: _changed(part) for part in parts}
    return json.loads(json.dumps(_without_secrets(changed), default=str))


def check_output(directory: Path, settings: Settings) -> None:
    """Refuse to overwrite the model, or the drafter, that the training begins with."""
    sources = {
        "model_name_or_path": settings.model.model_name_or_path,
        "drafter": settings.drafter.source,
    }
    for name, source in sources.items():
        if source and Path(source).resolve() in (directory.resolve(), (directory / BACKBONE).resolve()):
            raise ValueError(f"output_dir={directory} would be written over {name}={source}: choose another directory")


def check_nothing_is_lost(directory: Path, settings: Settings) -> None:
    """Refuse to overwrite a model that a run with other settings wrote."""
    if not (holds_model(directory) or has_adapters(directory)):
        return
    if not (directory / CONFIG).is_file():
        raise ValueError(f"output_dir={directory} holds a model that no run wrote: choose another directory")
    earlier = yaml.safe_load((directory / CONFIG).read_text(encoding="utf-8")).get("resolved", {})
    for name, now in _resolved(settings).items():
        both = ({key: part[key] for key in {*part} - _OF_NO_CONSEQUENCE} for part in (earlier.get(name, {}), now))
        check_same(f"output_dir={directory}", *both)


def _without_secrets(value: Any) -> Any:
    """Return settings without access tokens and keys of servers, at any depth, and in texts that hold JSON."""
    if isinstance(value, dict):
        return {name: _without_secrets(each) for name, each in value.items() if not _SECRET.fullmatch(str(name))}
    if isinstance(value, list):
        return [*map(_without_secrets, value)]
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        with suppress(ValueError, RecursionError):
            return json.dumps(_without_secrets(json.loads(value)))
    return value


def _shown(words: Sequence[str]) -> list[str]:
    """Return a command without access tokens and keys."""
    shown, hides = [], False
    for word in words:
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        is_secret = bool(_SECRET.fullmatch(name))
        shown.append(name + equals + ("(hidden)" if hides or (is_secret and equals) else _without_secrets(value)))
        hides = is_secret and not equals
    return shown


def _changed(part: DataclassInstance) -> dict[str, object]:
    """Return the fields that differ from their defaults."""
    values = ((entry, vars(part).get(entry.name)) for entry in dataclasses.fields(part))
    return {
        entry.name: value
        for entry, value in values
        if value != entry.default and not (dataclasses.is_dataclass(value) or value in ([], {}, None))
    }


def checkpoint_to_resume(directory: Path, option: str | None) -> str | None:
    """Return the checkpoint that a run continues from (`resume_from_checkpoint`)."""
    if option is None or str(option).lower() in ("false", "none"):
        if directory.is_dir() and (last := get_last_checkpoint(str(directory))):
            raise ValueError(
                f"output_dir={directory} holds {Path(last).name} of an earlier run: continue from it with "
                "--resume_from_checkpoint true, or choose another directory"
            )
        return None
    chosen = last_whole_checkpoint(directory) if str(option).lower() == "true" else option
    if chosen is None:
        return None
    if not Path(chosen).is_dir():
        raise FileNotFoundError(f"resume_from_checkpoint={chosen}: no such directory")
    if fault := fault_of(Path(chosen)):
        raise ValueError(f"resume_from_checkpoint={chosen}: {fault}; choose another checkpoint, or true for the last")
    return chosen
