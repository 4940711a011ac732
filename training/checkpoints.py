"""Checks of checkpoints: whether they are whole, and of which model."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from ..configuration import MTPHeadConfig
from ..generation.tensors.saving import files_of, finish
from ..modeling.common.foreign import ForeignLayoutsMixin
from ..modeling.common.stored_drafters import drafter_class
from .parts import of_first
from .utils import replace_file

_TrainerBase = Trainer if TYPE_CHECKING else object
_STATE = "trainer_state.json"
_SUMS = "checksums.json"
"""The file of a checkpoint that is written last, with the checksums of all others."""
_LATE_FILES = ("optimizer.pt", "scheduler.pt", _SUMS)
_OF_BACKBONES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_nextn_predict_layers")
_OF_DRAFTERS = ("version", "law", "draft_vocab_size", "variant", "sampler", "features", "num_slots", "lora_rank")


def last_whole_checkpoint(run: str | PathLike) -> str | None:
    """Return the latest checkpoint that a run can resume from; None if there is none.

    Warns of later ones with a file that is missing or damaged.
    """
    directories = [each for each in Path(run).glob("checkpoint-*") if each.is_dir() and _step(each).isdecimal()]
    for checkpoint in sorted(directories, key=lambda each: int(_step(each)), reverse=True):
        fault = fault_of(checkpoint)
        if fault is None:
            return str(checkpoint)
        warnings.warn(f"{checkpoint} is passed over: {fault}", stacklevel=2)
    return None


def fault_of(checkpoint: Path) -> str | None:
    """Return which file of a checkpoint is missing or damaged, by its checksums and the other ones of its run."""
    finish(checkpoint)
    if not _state(checkpoint):
        return f"{_STATE} is missing or damaged"
    for name in _LATE_FILES:
        if not (checkpoint / name).exists() and any(checkpoint.parent.glob(f"checkpoint-*/{name}")):
            return f"{name} is missing"
    try:
        known = json.loads((checkpoint / _SUMS).read_text(encoding="utf-8"))
    except FileNotFoundError:  # of a run that wrote none
        return None
    except ValueError:
        return f"{_SUMS} is damaged"
    actual = _checksums(checkpoint)
    return next((f"{name} is damaged" for name, digest in known.items() if actual.get(name) != digest), None)


def require_whole(checkpoint: str) -> None:
    """Raise a ValueError that names a file of a checkpoint which is missing or damaged; the first process looks."""
    if fault := of_first(lambda: fault_of(Path(checkpoint))):
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r}: {fault}; choose another, or True for the last whole one"
        )


class ChecksumWriter(TrainerCallback):
    """Writes the checksums of every checkpoint, when all processes and callbacks have written their files."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        """Write them in the first process."""
        if args.world_size > 1:
            torch.distributed.barrier()
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and checkpoint.is_dir():
            replace_file(checkpoint / _SUMS, json.dumps(_checksums(checkpoint), indent=1) + "\n")


class ResumingMixin(_TrainerBase):
    """`train` that resumes from whole checkpoints alone; to be placed before `Trainer`."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in `Trainer`; True takes the last whole checkpoint, and starts anew where a kill left none.

        Raises:
            ValueError: True without any checkpoint, or one with a file that is missing or damaged.
        """
        run, chosen = str(self.args.output_dir), resume_from_checkpoint
        if chosen is True and of_first(lambda: get_last_checkpoint(run)):
            chosen = of_first(lambda: last_whole_checkpoint(run))
        elif isinstance(chosen, str):
            require_whole(chosen)
        self.remove_callback(ChecksumWriter)
        self.add_callback(ChecksumWriter())  # the last one: others add to checkpoints
        return super().train(chosen, *args, **kwargs)


def _checksums(directory: Path) -> dict[str, str]:
    checksums = {}
    for file in files_of(directory):
        if file.name != _SUMS:
            with file.open("rb") as stream:
                checksums[file.relative_to(directory).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return checksums


def _step(checkpoint: Path) -> str:
    return checkpoint.name.removeprefix("checkpoint-")


def _state(checkpoint: Path) -> dict[str, Any]:
    """Return the state that `Trainer` wrote; empty if the file is missing or incomplete."""
    try:
        return json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def steps_of(checkpoint: str | Path) -> int:
    """Return after how many steps a checkpoint was saved."""
    return _state(Path(checkpoint)).get("global_step", 0)


def check_checkpoint(checkpoint: str | Path, model: PreTrainedModel) -> None:
    """Refuse a checkpoint of another model or head, of which `Trainer` would load the tensors that happen to fit.

    A checkpoint without a config, of adapters or shards, is left to its loader.
    """
    file, config = Path(checkpoint) / "config.json", model.config
    if not file.is_file() or hasattr(model, "peft_config"):
        return
    model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    if isinstance(model, ForeignLayoutsMixin) and drafter_class(checkpoint) is type(model):  # in any of its layouts
        earlier: PreTrainedConfig = type(model).stored_config(checkpoint)
    elif model_type != config.model_type:
        raise ValueError(f"the checkpoint {checkpoint} has model_type={model_type!r}: choose one of this model")
    else:
        earlier = type(config).from_pretrained(checkpoint)
    for name, theirs, ours in _shapes(earlier, config):
        if theirs != ours:
            raise ValueError(f"the checkpoint {checkpoint} has {name}={theirs!r}, and this model {name}={ours!r}")


def _shapes(earlier: PreTrainedConfig, config: PreTrainedConfig) -> Iterator[tuple[str, object, object]]:
    """Yield the options that determine the parameters: names, and the values of both configs."""
    before, now = (getattr(each, "mtp_head", each) for each in (earlier, config))
    if isinstance(before, MTPHeadConfig) and isinstance(now, MTPHeadConfig):
        for name in ("head_type", "unembedding", "window", *now.family.shaping(), "draft_layers"):
            yield name, getattr(before, name, None), getattr(now, name, None)
    texts = earlier.get_text_config(), config.get_text_config()
    for names, (before, now) in ((_OF_BACKBONES, texts), (_OF_DRAFTERS, (earlier, config))):
        for name in names:
            if hasattr(before, name) and hasattr(now, name):
                yield name, getattr(before, name), getattr(now, name)
