"""Checks of checkpoints: whether they are whole, and of which model."""

from __future__ import annotations

import hashlib
import json
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

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
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from ..configuration import MTPHeadConfig
from ..generation.tensors.saving import files_of, finish
from ..modeling.common.foreign import ForeignLayoutsMixin
from ..modeling.common.loading import drafter_class
from .parts import of_first
from .utils import replace_file

_SUMS = "checksums.json"
"""The file of a checkpoint that is written last, with the checksums of all others."""
_OF_BACKBONES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_nextn_predict_layers")
_OF_DRAFTERS = ("version", "law", "draft_vocab_size", "variant", "sampler", "features", "num_slots", "lora_rank")


def last_whole_checkpoint(run: str | PathLike) -> str | None:
    """Return the latest checkpoint that a run can resume from, with a warning of later ones; None if there is none."""
    directories = [each for each in Path(run).glob("checkpoint-*") if each.is_dir() and _step(each).isdecimal()]
    for checkpoint in sorted(directories, key=lambda each: int(_step(each)), reverse=True):
        fault = fault_of(checkpoint)
        if fault is None:
            return str(checkpoint)
        warnings.warn(f"{checkpoint} is passed over: {fault}", stacklevel=2)
    return None


def fault_of(checkpoint: Path) -> str | None:
    """Return which file of a checkpoint is missing or damaged, by the checksums that its save wrote last."""
    finish(checkpoint)
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        return f"{TRAINER_STATE_NAME} is missing"
    if not (checkpoint / _SUMS).exists() and not any(checkpoint.parent.glob(f"checkpoint-*/{_SUMS}")):
        return None  # of a run that wrote none, or pushed before it did
    try:
        known = json.loads((checkpoint / _SUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{_SUMS} is damaged or missing"
    actual = _checksums(checkpoint)
    faults = {name: "damaged" if name in actual else "missing" for name in known}
    return next((f"{name} is {faults[name]}" for name in known if actual.get(name) != known[name]), None)


def require_whole(checkpoint: str) -> None:
    """Raise a ValueError that names a file of a checkpoint which is missing or damaged; the first process looks."""
    if fault := of_first(lambda: fault_of(Path(checkpoint))):
        raise ValueError(f"resume_from_checkpoint={checkpoint!r}: {fault}; True takes the last whole one")


def checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the checkpoint of the current step."""
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")


class ChecksumWriter(TrainerCallback):
    """Writes the checksums of every checkpoint, when all processes and callbacks have written their files."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if args.world_size > 1:
            torch.distributed.barrier()
        checkpoint = checkpoint_of(args, state)
        if state.is_world_process_zero and checkpoint.is_dir():
            replace_file(checkpoint / _SUMS, json.dumps(_checksums(checkpoint), indent=1) + "\n")


class ResumingMixin(Trainer):
    """`train` that resumes from whole checkpoints alone; to be placed before `Trainer`."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """As in `Trainer`; True takes the last whole checkpoint, and starts anew where a kill left none."""
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


def steps_of(checkpoint: str | Path) -> int:
    """Return after how many steps a checkpoint was saved; 0 where it does not say so."""
    try:
        return TrainerState.load_from_json(str(Path(checkpoint, TRAINER_STATE_NAME))).global_step
    except (OSError, ValueError):
        return 0


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
    theirs, ours = _shape(earlier), _shape(config)
    for name in ours:
        if name in theirs and theirs[name] != ours[name]:
            raise ValueError(f"the checkpoint {checkpoint} has {name}={theirs[name]!r}, and this model {ours[name]!r}")


def _shape(config: PreTrainedConfig) -> dict[str, object]:
    """Return the options that determine a model's parameters."""
    text, head = config.get_text_config(), getattr(config, "mtp_head", config)
    owned = {name: getattr(text, name) for name in _OF_BACKBONES if hasattr(text, name)}
    owned |= {name: getattr(config, name) for name in _OF_DRAFTERS if hasattr(config, name)}
    if not isinstance(head, MTPHeadConfig):
        return owned
    names = ("head_type", "unembedding", "window", *head.family.shaping(), "draft_layers")
    return {name: getattr(head, name, None) for name in names} | owned
