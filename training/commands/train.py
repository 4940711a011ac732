"""`tokenahead train`: from settings to a trained model in a run directory, with the facts, the settings and the log.

`tokenahead regenerate` and `tokenahead features` prepare what a training reads, alone, with its settings.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ... import __version__
from ...generation.tensors.tensor_files import Fields
from ...modeling.heads.joint import BACKBONE
from ..acceptance_callback import AcceptanceCallback
from ..checkpoints import last_whole_checkpoint, require_whole, steps_of
from ..loading import has_adapters, holds_model
from ..parts import of_first
from ..results import environment
from ..strategy import TrainingStrategy
from ..trainer_base import BaseTrainer, without_peft
from ..trl_trainers import MTPSFTTrainer, PTPSFTTrainer
from ..utils import check_same, needs_extra, replace_file
from .data import load_data
from .models import (
    Trainee,
    build,
    draft_frequent_tokens,
    is_parallel,
    learning_parts,
    note_backbone,
    ptp_options,
    store_features,
    with_moved_backbone,
    with_own_text,
)
from .settings import Settings, read_settings

with needs_extra("train", "tokenahead train"):
    import yaml
    from trl.trainer.utils import get_peft_config

RUN = "run.json"
"""Versions, seeds, machine, facts of the model."""
CONFIG = "config.yaml"
"""The settings that the user gave, in the file and by flags, to run them again."""
METRICS = "metrics.json"
"""Every entry of the log."""
_OF_NO_CONSEQUENCE = {"output_dir", "resume_from_checkpoint", "logging_dir", "run_name"}
_SECRET = re.compile(r".*(token|api.?key)")  # of names
_PACKAGES = ("accelerate", "datasets", "peft", "safetensors", "torch", "transformers", "trl")


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 when the training is complete."""
    settings = read_settings(argv)
    if settings.training.disable_tqdm:
        logging.disable_progress_bar()
    train(settings)
    leave_processes()
    return 0


def write_answers(argv: Sequence[str]) -> int:
    """Run `tokenahead regenerate`; return 0 when all rows are answered."""
    settings, trainee = _begun("regenerate", argv)
    with_own_text(settings, trainee)
    leave_processes()
    return 0


def write_states(argv: Sequence[str]) -> int:
    """Run `tokenahead features`; return 0 when the states of all rows are stored."""
    settings, trainee = _begun("features", argv)
    trainer = make_trainer(with_own_text(settings, trainee), trainee)
    draft_frequent_tokens(trainer, trainee, settings)
    store_features(trainer, settings)
    leave_processes()
    return 0


def _begun(section: str, argv: Sequence[str]) -> tuple[Settings, Trainee]:
    """Return settings, which have a section of that name, and the model."""
    settings = read_settings(argv, section)
    if getattr(settings.drafter, section) is None:
        raise ValueError(f"{section} is missing: tokenahead {section} writes what this setting of a training names")
    if settings.training.disable_tqdm:
        logging.disable_progress_bar()
    set_seed(settings.training.seed)
    return settings, build(settings)


def leave_processes() -> None:
    """End the process group of a command whose work is done: left to destructors, its threads may abort a process."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def train(settings: Settings, callbacks: Sequence[TrainerCallback] = ()) -> Trainer:
    """Train with settings, write model, log and the facts of the run to `output_dir`, and return the trainer."""
    requested, directory, training = settings, settings.output, settings.training
    check_output(settings)
    set_seed(training.seed)
    # settings that need no data are checked before the backbone writes any
    own = _callbacks(requested)
    settings = with_moved_backbone(requested)
    trainee = build(settings)
    note_backbone(trainee, requested, settings)
    resumed = of_first(lambda: checkpoint_to_resume(directory, training.resume_from_checkpoint))
    if resumed is None:
        check_nothing_is_lost(directory, requested)
    settings = with_own_text(settings, trainee)
    trainer = make_trainer(settings, trainee, [*own, *callbacks])
    draft_frequent_tokens(trainer, trainee, settings)
    name, pushes = requested.data.dataset_name, training.push_to_hub
    data_names = [each.path for each in requested.mixture.datasets] if name is None else [name]
    if pushes:  # a value that no card may show is refused before the first step
        trainer.create_model_card(dataset=data_names)
    if trainer.is_world_process_zero():
        write_facts(trainer, trainee, requested, settings)
    try:
        if resumed is not None and 0 < training.max_steps <= steps_of(resumed):
            _take_over(trainer, str(resumed))
        else:
            store_features(trainer, settings)
            trainer.train(resume_from_checkpoint=resumed)
        training.push_to_hub = False  # the push comes once, at the end
        is_cast = not (trainer.is_fsdp_enabled or settings.model.use_peft)  # adapters are saved in float32
        for part in learning_parts(trainee.model) if is_cast else []:
            part.to(trainee.backbone.dtype)
        trainer.save_model()
    finally:
        if trainer.is_world_process_zero() and trainer.state.log_history:
            replace_file(directory / METRICS, json.dumps(trainer.state.log_history, indent=1) + "\n")
    if pushes:
        trainer.push_to_hub(dataset_name=data_names)
    return trainer


def _take_over(trainer: Trainer, checkpoint: str) -> None:
    """Restore the end of a training, of which `Trainer` would make a further step: the model may not be saved yet."""
    require_whole(checkpoint)
    warnings.warn(f"{checkpoint} has done all of max_steps={trainer.args.max_steps}: nothing is left", stacklevel=2)
    trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
    best = trainer.state.best_model_checkpoint if trainer.args.load_best_model_at_end else None
    trainer._load_from_checkpoint(best or checkpoint)


def make_trainer(settings: Settings, trainee: Trainee, callbacks: Sequence[TrainerCallback] = ()) -> BaseTrainer:
    """Return the trainer of a run, with its data."""
    drafter, training = settings.drafter, settings.training
    data = load_data(settings, training.eval_strategy != "no")
    options: Fields = {
        "train_dataset": data["train"],
        "eval_dataset": data.get("eval"),
        "processing_class": trainee.tokenizer,
        "callbacks": [*callbacks],
        "tokens_per_batch": settings.tokens_per_batch,
        "peft_config": get_peft_config(settings.model),
    }
    strategy = drafter.training_strategy()
    if not is_parallel(trainee.model):
        options["strategy"] = None if settings.model.use_peft else strategy
        return MTPSFTTrainer(trainee.model, training, **options)
    if strategy != TrainingStrategy(shard_backbone=strategy.shard_backbone):
        raise ValueError(f"strategy={drafter.strategy}: a PTPForCausalLM has loss_options and shard_backbone alone")
    options |= {"options": ptp_options(drafter), "shard_backbone": strategy.shard_backbone}
    return PTPSFTTrainer(trainee.model, training, **options)


def _callbacks(settings: Settings) -> list[TrainerCallback]:
    """Return the callbacks of the run."""
    chosen: list[TrainerCallback] = []
    drafter, patience = settings.drafter, settings.drafter.early_stopping_patience
    try:
        acceptance = AcceptanceCallback(**drafter.options("acceptance"))
    except TypeError as error:
        raise ValueError(f"acceptance: {error}") from None
    if settings.training.eval_strategy != "no" and drafter.acceptance is not False:
        chosen.append(acceptance)
    return chosen if patience is None else [*chosen, EarlyStoppingCallback(patience)]


def write_facts(trainer: Trainer, trainee: Trainee, requested: Settings, settings: Settings) -> None:
    """Write `run.json`, and the settings that the user gave as `config.yaml`."""
    model, args, head = trainee.model, trainer.args, without_peft(trainee.model).head_config
    run = {
        "versions": {"tokenahead": __version__, **{name: metadata.version(name) for name in _PACKAGES}},
        "seeds": {"seed": args.seed, "data_seed": args.data_seed},
        "machine": environment() | {"device": str(args.device)},
        "processes": args.world_size,
        "model": {
            "class": type(model).__name__,
            "backbone": type(trainee.backbone).__name__,
            "model_name_or_path": settings.model.model_name_or_path,
            "adapters": settings.adapters,
            "head_type": None if head is None else head.head_type,
            "window": getattr(model, "window", None),
            "trained_parameters": sum(each.numel() for each in model.parameters() if each.requires_grad),
            "parameters": model.num_parameters(),
        },
    }
    text = json.dumps(run, indent=1, ensure_ascii=False, default=str)
    replace_file(requested.output / RUN, text + "\n")
    replace_file(requested.output / CONFIG, yaml.safe_dump(given(requested), sort_keys=False))


def given(settings: Settings) -> Fields:
    """Return the settings that the user gave, as YAML can hold them, without access tokens and keys of servers."""
    values: Fields = {}
    for part in (settings.data, settings.mixture, settings.model, settings.drafter, settings.training):
        values |= vars(part)
    values = {name: values[name] for name in settings.names if name in values}
    text = json.dumps(values, default=lambda each: vars(each) if is_dataclass(each) else str(each))
    return _without_secrets(json.loads(text))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_secrets(each) for name, each in value.items() if not _SECRET.fullmatch(name)}
    return [*map(_without_secrets, value)] if isinstance(value, list) else value


def check_output(settings: Settings) -> None:
    """Refuse to overwrite the model, or the drafter, that the training begins with."""
    directory = settings.output
    for source in (settings.model.model_name_or_path, settings.drafter.source):
        if source and Path(source).resolve() in (directory.resolve(), (directory / BACKBONE).resolve()):
            raise ValueError(f"output_dir={directory} would be written over {source}: choose another directory")


def check_nothing_is_lost(directory: Path, settings: Settings) -> None:
    """Refuse to overwrite a model that a run with other settings wrote."""
    if not (holds_model(directory) or has_adapters(directory)):
        return
    if not (directory / CONFIG).is_file():
        raise ValueError(f"output_dir={directory} holds a model that no run wrote: choose another directory")
    earlier = yaml.safe_load((directory / CONFIG).read_text(encoding="utf-8"))
    both = ({name: part[name] for name in {*part} - _OF_NO_CONSEQUENCE} for part in (earlier, given(settings)))
    check_same(f"output_dir={directory}", *both)


def checkpoint_to_resume(directory: Path, option: str | None) -> str | None:
    """Return the checkpoint that a run continues from; None: it begins anew, also where a kill left no whole one."""
    if str(option).lower() == "true":
        return last_whole_checkpoint(directory)
    if option is not None and str(option).lower() not in ("false", "none"):
        return option
    if directory.is_dir() and (last := get_last_checkpoint(str(directory))):
        raise ValueError(
            f"output_dir={directory} holds {Path(last).name} of an earlier run: continue from it with "
            "--resume_from_checkpoint true, or choose another directory"
        )
    return None
