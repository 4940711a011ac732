"""The directory of a run: what was asked, on what machine, with which versions; what was measured. Knows no model."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ... import __version__
from ...modeling.heads.joint import BACKBONE
from ..checkpoints import fault_of, last_whole_checkpoint, write_checksums
from ..loading import has_adapters, holds_model
from ..results import environment
from ..utils import check_same, needs_extra, replace_text
from .settings import Settings

with needs_extra("train", "a run directory"):
    import yaml

RUN = "run.json"
"""What the run was: versions, seeds, state of git, command."""
CONFIG = "config.yaml"
"""The settings as they were given, to run them again."""
METRICS = "metrics.json"
"""Every entry of the log."""
_OF_NO_CONSEQUENCE = {"output_dir", "resume_from_checkpoint", "logging_dir", "run_name"}
_PACKAGES = ("accelerate", "datasets", "peft", "safetensors", "torch", "transformers", "trl")


def describe_run(settings: Settings, facts: dict[str, Any]) -> dict[str, Any]:
    """Return what is needed to repeat a run."""
    training = settings.training
    versions = {name: metadata.version(name) for name in _PACKAGES}
    return {
        "command": " ".join(["tokenahead", *_without_tokens(sys.argv[1:])]),
        "versions": {"tokenahead": __version__, **versions},
        "git": git_state(),
        "seeds": {"seed": training.seed, "data_seed": training.data_seed},
        "machine": environment() | {"device": str(training.device)},
        "processes": training.world_size,
        "model": facts,
    }


def git_state(folder: str | Path = ".") -> dict[str, Any] | None:
    """Return the commit of a directory, and whether files differ from it; None where there is no git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "is_changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: str | Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


class RunWriter(TrainerCallback):
    """Writes what a run is when its first step begins, and checksums of its checkpoints.

    A run that is refused until the first step writes nothing.

    Args:
        folder: The run's.
        settings: Of the run.
        facts: What is to be said of the model.
    """

    def __init__(self, folder: Path, settings: Settings, facts: dict[str, Any]) -> None:
        self.what, self.is_written = (folder, settings, facts), False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write once, in the first process."""
        if state.is_world_process_zero and not self.is_written:
            write_run(*self.what)
        self.is_written = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the checksums of a checkpoint, when every process has written its files."""
        if args.world_size > 1:
            torch.distributed.barrier()
        if state.is_world_process_zero:
            write_checksums(self.what[0] / f"checkpoint-{state.global_step}")


@contextmanager
def nothing_left_of_a_refusal(folder: Path) -> Iterator[None]:
    """Remove the empty directory that a trainer makes, where the run is then refused."""
    was_there = folder.exists()
    try:
        yield
    except (ValueError, OSError):
        if not was_there:
            with suppress(OSError):  # it is not empty, or was never made
                folder.rmdir()
        raise


def write_run(folder: Path, settings: Settings, facts: dict[str, Any]) -> None:
    """Write `run.json` and `config.yaml`."""
    text = json.dumps(describe_run(settings, facts), indent=1, ensure_ascii=False, default=str)
    replace_text(folder / RUN, text + "\n")
    given: dict[str, Any] = settings.given | {"flags": _without_tokens(settings.given["flags"])}
    if "file" in given:
        given["file"] = {name: value for name, value in given["file"].items() if not name.endswith("token")}
    asked = {"given": json.loads(json.dumps(given, default=str)), "resolved": _resolved(settings)}
    replace_text(folder / CONFIG, yaml.safe_dump(asked, sort_keys=False))


def _resolved(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return what differs from the defaults, by the kind of settings, as YAML can hold it."""
    parts = (settings.data, settings.mixture, settings.model, settings.drafter, settings.training)
    return json.loads(json.dumps({type(part).__name__: _changed(part) for part in parts}, default=str))


def check_own_folder(folder: Path, settings: Settings) -> None:
    """Refuse to overwrite the model, or the drafter, that the training begins with."""
    if folder.is_file():
        raise ValueError(f"output_dir={folder} is a file: choose a directory")
    sources = {
        "model_name_or_path": settings.model.model_name_or_path,
        "drafter_name_or_path": settings.drafter.drafter_name_or_path,
    }
    for name, source in sources.items():
        if source and Path(source).resolve() in (folder.resolve(), (folder / BACKBONE).resolve()):
            raise ValueError(f"output_dir={folder} would be written over {name}={source}: choose another directory")


def check_nothing_is_lost(folder: Path, settings: Settings) -> None:
    """Refuse to overwrite a model that this run, had it been carried out before, would not have written."""
    if not (holds_model(folder) or has_adapters(folder)):
        return
    if not (folder / CONFIG).is_file():
        raise ValueError(f"output_dir={folder} holds a model that no run wrote: choose another directory")
    earlier = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")).get("resolved", {})
    for kind, values in _resolved(settings).items():
        parts = (
            {name: part[name] for name in {*part} - _OF_NO_CONSEQUENCE} for part in (earlier.get(kind, {}), values)
        )
        check_same(f"output_dir={folder}", *parts)


def _without_tokens(words: Sequence[str]) -> list[str]:
    """Return a command without its access tokens of the Hub."""
    shown, hides = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        is_token = name.startswith("--") and name.endswith("token")
        shown.append("(hidden)" if hides else f"{name}=(hidden)" if is_token and equals else word)
        hides = is_token and not equals
    return shown


def _changed(part: Any) -> dict[str, Any]:
    """Return the fields that differ from their defaults, without access tokens of the Hub."""
    values = {}
    for entry in dataclasses.fields(part):
        value = vars(part).get(entry.name)
        has_default = entry.default is not dataclasses.MISSING
        if entry.name.endswith("token") or (has_default and value == entry.default):
            continue
        if dataclasses.is_dataclass(value) or value in ([], {}, None):
            continue
        values[entry.name] = value
    return values


def write_metrics(folder: Path, history: list[dict[str, float]]) -> None:
    """Write the log of a run."""
    replace_text(folder / METRICS, json.dumps(history, indent=1) + "\n")


def checkpoint_to_resume(folder: Path, given: str | None) -> str | None:
    """Return the checkpoint that a run continues from."""
    if given is None or str(given).lower() in ("false", "none"):
        if folder.is_dir() and (last := get_last_checkpoint(str(folder))):
            raise ValueError(
                f"output_dir={folder} holds {Path(last).name} of an earlier run: continue from it with "
                "--resume_from_checkpoint true, or choose another directory"
            )
        return None
    chosen = last_whole_checkpoint(folder) if str(given).lower() == "true" else given
    if chosen is None:
        return None
    if not Path(chosen).is_dir():
        raise FileNotFoundError(f"resume_from_checkpoint={chosen}: no such directory")
    if fault := fault_of(Path(chosen)):
        raise ValueError(f"resume_from_checkpoint={chosen}: {fault}; choose another checkpoint, or true for the last")
    return chosen
