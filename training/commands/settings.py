"""Settings of a run, from a YAML file and flags, in the words of TRL. Knows no model and reads no data."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NoReturn, get_type_hints

import torch
from transformers.trainer_pt_utils import AcceleratorConfig

from ..extras import needs_extra
from ..strategy import TrainingStrategy
from .contradictions import check_settings
from .file_values import check_values
from .sections import converted

with needs_extra("train", "tokenahead train"):
    import yaml
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

_GROUP = "settings of tokenahead"
"""Title in `--help` of the settings that TRL does not have."""
DRAFTERS = ("own", "heads", "eagle", "modules", "parallel")
"""What can be trained, see `DrafterArguments.drafter`."""
_SECTIONS = ("drafter_options", "loss_options", "strategy", "regenerate", "acceptance")


@dataclass
class DrafterArguments:
    """What is trained for the model of `model_name_or_path`, and how.

    Args:
        drafter: What drafts.
        drafter_name_or_path: Where to begin, instead of with a new drafter.
        drafter_options: Options of a new drafter.
        loss_options: Options of its loss.
        strategy: How the parts learn (`TrainingStrategy`).
        acceptance: Options of `AcceptanceCallback`; `false` leaves it out.
        early_stopping_patience: Evaluations without a better `metric_for_best_model` before training ends.
    """

    _argument_group_name: ClassVar[str] = _GROUP

    drafter: str = field(
        default="own",
        metadata={
            "help": "own: the heads, modules or slots that the model brings (EvaByte, DeepSeekMTP, PTP). New ones for "
            "any other causal language model: heads (MTPHeads), eagle (EagleHead), modules (DeepSeekMTP), parallel "
            "(PTP)",
            "choices": list(DRAFTERS),
        },
    )
    drafter_name_or_path: str | None = field(
        default=None, metadata={"help": "Directory, or name on the Hub, of heads or an EAGLE head to go on from."}
    )
    drafter_options: dict | str | None = field(
        default=None,
        metadata={"help": "Options of a new drafter, as its from_backbone (EvaByte: set_head) takes them; JSON."},
    )
    loss_options: dict | str | None = field(
        default=None, metadata={"help": "Options of an EAGLE head's, of modules' or of PTP's loss; JSON."}
    )
    strategy: dict | str | None = field(default=None, metadata={"help": "Fields of TrainingStrategy; JSON."})
    regenerate: dict | str | None = field(
        default=None,
        metadata={
            "help": "Learn from what the backbone writes after the beginnings of the data: folder, prompt_tokens, and "
            "options of training.regeneration.regenerate (max_new_tokens, batch_size, do_sample, ...); JSON."
        },
    )
    features: str | None = field(
        default=None,
        metadata={
            "help": "Directory that the frozen backbone's states are kept in, for heads or an EAGLE head: every epoch "
            "then goes without its forward, and a further run finds them there."
        },
    )
    acceptance: dict | str | None = field(
        default=None, metadata={"help": "Options of AcceptanceCallback, JSON; false leaves it out."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Evaluations without a better metric_for_best_model before training ends."}
    )

    def __post_init__(self) -> None:
        if self.drafter not in DRAFTERS:  # argparse looks at flags only
            raise ValueError(f"drafter={self.drafter!r} is unknown; choose one of {', '.join(DRAFTERS)}")
        for name in _SECTIONS:
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, _json(name, value))
        for name in _SECTIONS[:4]:
            value = getattr(self, name)
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"{name}={value!r} must be a mapping of options")
        if self.acceptance is True:
            self.acceptance = None
        if not (self.acceptance in (None, False) or isinstance(self.acceptance, dict)):
            raise ValueError(f"acceptance={self.acceptance!r} must be a mapping of options, or false")
        if self.early_stopping_patience is not None and self.early_stopping_patience < 1:
            raise ValueError(f"early_stopping_patience={self.early_stopping_patience} must be at least 1")

    def training_strategy(self) -> TrainingStrategy:
        """The strategy, checked.

        Raises:
            ValueError: A name that is no field, or a value of another type or out of range.
        """
        try:
            hints = get_type_hints(TrainingStrategy)
            return TrainingStrategy.from_dict(converted("strategy", self.strategy or {}, hints))
        except TypeError as error:
            raise ValueError(f"strategy: {error}") from None


@dataclass
class TrainConfig(SFTConfig):
    """`trl.SFTConfig` with what suits heads: no reports to services, and full precision where there is no accelerator.

    Activation checkpointing is off by default: a frozen backbone keeps no activations.
    """

    report_to: None | str | list[str] = field(default="none", metadata={"help": "Services to report to."})
    gradient_checkpointing: bool | None = field(
        default=None, metadata={"help": "The older name of activation_checkpointing, for backbones that learn."}
    )
    disable_tqdm: bool | None = field(default=True, metadata={"help": "tokenahead draws a bar of its own."})

    def __post_init__(self) -> None:
        if self.deepspeed and find_spec("deepspeed") is None:
            raise ValueError(
                f"deepspeed={self.deepspeed!r} needs the package DeepSpeed, which no extra of tokenahead brings: pip "
                "install deepspeed, or shard with FSDP2 (examples/accelerate/fsdp2.yaml)"
            )
        if self.bf16 is None and not self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            self.bf16 = False
        if isinstance(self.pad_to_multiple_of, str) and not re.fullmatch(r"auto|\d+", self.pad_to_multiple_of):
            raise ValueError(f"pad_to_multiple_of={self.pad_to_multiple_of!r} must be a whole number, or 'auto'")
        for name in ("gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"):
            if (getattr(self, name) or 0) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.max_steps == 0:
            raise ValueError("max_steps=0 must be at least 1, or -1 for num_train_epochs")
        if self.max_steps < 0 and self.num_train_epochs <= 0:
            raise ValueError(f"num_train_epochs={self.num_train_epochs} must be above 0")
        if self.optim_args and not all("=" in part for part in self.optim_args.split(",")):
            raise ValueError(f"optim_args={self.optim_args!r} must be name=value, or several with commas")
        super().__post_init__()


@dataclass
class EvaluationArguments:
    """What `tokenahead evaluate` measures.

    Args:
        rows: Held-out rows whose drafts are verified along the text.
        prompts: Held-out rows that are continued.
        prompt_tokens: Tokens of each that are given.
        new_tokens: Tokens to write.
        temperatures: Of the texts that are written; 0 is greedy.
        seconds: Time after which no further prompt is begun.
    """

    rows: int = field(default=256, metadata={"help": "Held-out rows whose drafts are verified along the text."})
    prompts: int = field(default=8, metadata={"help": "Held-out rows that are continued."})
    prompt_tokens: int = field(default=64, metadata={"help": "Tokens of each that are given."})
    new_tokens: int = field(default=128, metadata={"help": "Tokens to write."})
    temperatures: list[float] = field(
        default_factory=lambda: [0.0, 1.0], metadata={"help": "Of the texts that are written; 0 is greedy."}
    )
    seconds: float | None = field(default=None, metadata={"help": "Time after which no further prompt is begun."})

    def __post_init__(self) -> None:
        for name in ("rows", "prompts", "prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"temperatures={self.temperatures} must be numbers of at least 0")


@dataclass
class AnalysisArguments:
    """What `tokenahead analyze` looks at.

    Args:
        positions: Places in held-out rows.
        depth: Tokens ahead.
        mass: Share of the continuations that is followed at each step; 1 enumerates all.
        max_branches: Continuations that are followed at most.
    """

    positions: int = field(default=32, metadata={"help": "Places in held-out rows."})
    depth: int = field(default=4, metadata={"help": "Tokens ahead."})
    mass: float = field(default=0.9, metadata={"help": "Share of the continuations that is followed; 1: all."})
    max_branches: int | None = field(default=64, metadata={"help": "Continuations that are followed at most."})

    def __post_init__(self) -> None:
        for name, least in {"positions": 1, "depth": 2}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not 0 < self.mass <= 1:
            raise ValueError(f"mass={self.mass} must lie in (0, 1]")


@dataclass(frozen=True)
class Settings:
    """Everything that a run was asked for.

    Attributes:
        data: `dataset_name` and splits, as in TRL.
        mixture: `datasets`, as in TRL.
        training: Arguments of the trainer.
        model: The backbone, and adapters of PEFT.
        drafter: What is trained.
        given: The YAML file and the flags, as they were given.
        extra: Settings of this command alone.
        adapters: Directory of adapters of PEFT that are put on the backbone, for what is measured.
    """

    data: ScriptArguments
    mixture: DatasetMixtureConfig
    training: TrainConfig
    model: ModelConfig
    drafter: DrafterArguments
    given: dict[str, Any]
    extra: Any = None
    adapters: str | None = None


_KINDS = (ScriptArguments, DatasetMixtureConfig, TrainConfig, ModelConfig, DrafterArguments)
_TYPES: dict[str, Any] = {
    "dtype": Any,  # has a list of names of ours
    "acceptance": Any,  # may be false
    "resume_from_checkpoint": str | bool | None,
    "accelerator_config": AcceleratorConfig | str | None,
    "debug": str | list[str],
    "fsdp": str | bool | list[str] | None,
    "trackio_static_space_id": str | bool | None,
}
"""Types of fields that say less, or more, than is meant."""
_USAGE = {
    "train": "tokenahead train [CONFIG.yaml] [--FIELD VALUE ...]",
    "evaluate": "tokenahead evaluate MODEL DATA [--FIELD VALUE ...], or CONFIG.yaml in the place of both",
    "analyze": "tokenahead analyze [CONFIG.yaml] [--FIELD VALUE ...]",
}


class _Parser(TrlParser):
    """Says what is wrong in one line, as the other commands do, and lists our own settings before those of others."""

    def format_help(self) -> str:
        """Help with the group of this library's settings first."""
        self._action_groups.sort(key=lambda group: group.title != _GROUP)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_settings(argv: Sequence[str], command: str, extra: type | None = None) -> Settings:
    """Reads `CONFIG.yaml` and the flags behind it, which count more.

    Args:
        argv: Arguments of the command.
        command: Its name, for `--help`.
        extra: Dataclass of further settings, which a file for training may hold, too.

    Raises:
        ValueError: A file that is no YAML mapping, an unknown key or flag, a value that does not fit its field, or
            settings that would be ignored.
        OSError: No such file.
        SystemExit: After `--help`.
    """
    argv = list(argv)
    kinds = [*_KINDS, *([extra] if extra else [])]
    parser = _Parser(
        kinds,
        prog=f"tokenahead {command}",
        usage=_USAGE[command],
        allow_abbrev=False,
    )
    given: dict[str, Any] = {"flags": argv}
    if argv and not argv[0].startswith("-"):
        given["file"] = _mapping(argv[0])
        _check_keys(argv[0], given["file"])
        argv = ["--config", *argv]
    try:
        *parts, rest = parser.parse_args_and_config(argv, return_remaining_strings=True)
    except (TypeError, AttributeError, KeyError) as error:  # of what a flag holds: values of a file were looked at
        raise ValueError(f"{' '.join(argv)}: a setting holds what its field cannot: {error}") from error
    known = {f"--{entry.name}" for kind in (EvaluationArguments, AnalysisArguments) for entry in fields(kind)}
    unknown = [word for word in rest if word.startswith("--") and (word not in known or word in argv)]
    if unknown or (rest and not rest[0].startswith("--")):
        raise ValueError(f"there is no setting {' '.join(unknown or rest)}; see tokenahead {command} --help")
    settings = Settings(*parts[: len(_KINDS)], given=given, extra=parts[len(_KINDS)] if extra else None)
    check_settings(settings)
    return settings


def _mapping(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file of settings")
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of settings, such as `model_name_or_path: ...`")
    return values


def _check_keys(path: str, values: dict[str, Any]) -> None:
    kinds = (*_KINDS, EvaluationArguments, AnalysisArguments)  # one file serves all commands
    known = {entry.name for kind in kinds for entry in fields(kind) if entry.init} | {"env"}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; see --help"
            raise ValueError(f"{path}: there is no setting {name!r}{hint}")
    if not isinstance(values.get("env", {}), dict):
        raise ValueError(f"{path}: env={values['env']!r} must be a mapping of variables of the environment")
    for kind in kinds:
        check_values(path, values, kind, _TYPES)


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f'{name}={text!r} must be JSON, such as \'{{"head_type": "cp"}}\'') from None
