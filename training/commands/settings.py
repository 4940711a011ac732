"""Settings of a run, from a YAML file and flags, in the words of TRL. Knows no model and reads no data."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from transformers import HfArgumentParser, get_scheduler
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.trainer_pt_utils import AcceleratorConfig

from ..requests import option
from ..strategy import TrainingStrategy
from ..utils import needs_extra
from .typed import typed, typed_fields, typed_options

with needs_extra("train", "tokenahead train"):
    import yaml
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig

_GROUP = "settings of tokenahead"
"""Title in `--help` of the settings that TRL does not have."""
_SECTIONS = ("drafter_options", "loss_options", "strategy", "regenerate")
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass
class DrafterArguments:
    """The trained drafter of the model of `model_name_or_path`; fields have a help text."""

    _argument_group_name: ClassVar[str] = _GROUP

    drafter: str = option(
        "own",
        "own: the heads, modules or slots that the model brings (EvaByte, DeepSeekMTP, PTP). New ones for any other "
        "causal language model: heads (MTPHeads), eagle (EagleHead), modules (DeepSeekMTP), parallel (PTP)",
        choices=["own", "heads", "eagle", "modules", "parallel"],
    )
    drafter_name_or_path: str | None = option(
        None, "Directory, or name on the Hub, of heads or an EAGLE head to continue from."
    )
    drafter_options: dict | str | None = option(
        None,
        "Options of a new drafter, as its from_backbone (EvaByte: set_head) takes them; JSON. draft_ids (of "
        "modules: draft_vocabulary) is a list of the tokens to draft, or a JSON file that holds one.",
    )
    loss_options: dict | str | None = option(None, "Options of an EAGLE head's, of modules' or of PTP's loss; JSON.")
    strategy: dict | str | None = option(None, "Fields of TrainingStrategy; JSON.")
    regenerate: dict | str | None = option(
        None,
        "Learn from the backbone's completions of the beginnings of the data: folder, prompt_tokens, and options of "
        "training.regeneration.regenerate (max_new_tokens, batch_size, do_sample, ...); JSON.",
    )
    features: str | None = option(
        None,
        "Directory for the frozen backbone's states, for heads or an EAGLE head: every epoch then needs no forward of "
        "it, and a further run reads them.",
    )
    acceptance: dict | str | None = option(None, "Options of AcceptanceCallback, JSON; false leaves it out.")
    early_stopping_patience: int | None = option(
        None, "Evaluations without a better metric_for_best_model before training ends."
    )

    def __post_init__(self) -> None:
        hints = dict.fromkeys(_SECTIONS, dict | None) | {"acceptance": dict | bool | None}
        for name, hint in hints.items():
            setattr(self, name, typed(name, vars(self)[name], hint))
        _check_least(self, 1, "early_stopping_patience")

    def options(self, section: str) -> dict[str, Any]:
        """Return a copy of the options of a section; empty where it is not set."""
        value = vars(self)[section]
        return dict(value) if isinstance(value, dict) else {}

    def training_strategy(self) -> TrainingStrategy:
        """Return the strategy, checked."""
        return TrainingStrategy(**typed_options("strategy", self.options("strategy"), TrainingStrategy))


@dataclass
class TrainConfig(SFTConfig):
    """`trl.SFTConfig` with defaults for heads: no reports to services, and full precision without an accelerator.

    Activation checkpointing is off by default: a frozen backbone stores no activations.
    """

    report_to: None | str | list[str] = option("none", "Services to report to.")
    gradient_checkpointing: bool | None = option(
        None, "The older name of activation_checkpointing, for backbones that learn."
    )
    disable_tqdm: bool | None = option(False, "Leave out the bar of the run.")

    def __post_init__(self) -> None:
        if self.deepspeed and find_spec("deepspeed") is None:  # transformers would keep half of its configuration
            raise ValueError(
                f"deepspeed={self.deepspeed!r} needs the package DeepSpeed, which no extra of tokenahead brings: pip "
                "install deepspeed, or shard with FSDP2 (examples/accelerate/fsdp2.yaml)"
            )
        if self.bf16 is None and not self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            self.bf16 = False
        padding = str(self.pad_to_multiple_of or "auto")
        if not (padding == "auto" or padding.isdecimal()):
            raise ValueError(f"pad_to_multiple_of={padding!r} must be a whole number, or 'auto'")
        _check_least(
            self, 1, "gradient_accumulation_steps", "per_device_train_batch_size", "per_device_eval_batch_size"
        )
        if self.optim_args and not all("=" in part for part in self.optim_args.split(",")):
            raise ValueError(f"optim_args={self.optim_args!r} must be name=value, or several with commas")
        super().__post_init__()
        known, installed = set(INTEGRATION_TO_CALLBACK), {*get_available_reporting_integrations()}
        if absent := [name for name in self.report_to or () if name in known - installed]:
            raise ValueError(f"report_to={absent[0]!r} needs a package that is not installed: pip install {absent[0]}")


@dataclass(frozen=True)
class Settings:
    """All settings of a run, with the file and the flags as the user wrote them (`given`).

    `adapters` is the directory of adapters of PEFT that are put on the backbone.
    """

    data: ScriptArguments
    mixture: DatasetMixtureConfig
    training: TrainConfig
    model: ModelConfig
    drafter: DrafterArguments
    given: dict[str, Any]
    adapters: str | None = None

    @property
    def output(self) -> Path:
        """The directory of the run."""
        return Path(str(self.training.output_dir))


_CLASSES = (ScriptArguments, DatasetMixtureConfig, TrainConfig, ModelConfig, DrafterArguments)
_TYPES: dict[str, Any] = {
    "acceptance": dict | str | bool | None,
    "dtype": Any,  # `_check_model` has a list of its own
    "resume_from_checkpoint": str | bool | None,
    "accelerator_config": AcceleratorConfig | str | None,
    "debug": str | list[str],
    "fsdp": str | bool | list[str] | None,
    "trackio_static_space_id": str | bool | None,
    "parallelism_config": type(None),  # an object of accelerate, which no file holds
}
"""Types of fields whose annotations in TRL are narrower, or wider, than the values of a file."""


class _Parser(HfArgumentParser):
    """Reports an error in one line, as the other commands do, and lists our own settings first."""

    def format_help(self) -> str:
        """Return the help with the group of this library's settings first."""
        self._action_groups.sort(key=lambda group: group.title != _GROUP)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_settings(argv: Sequence[str]) -> Settings:
    """Read `CONFIG.yaml` and the flags after it, which override it.

    Args:
        argv: Arguments of the command.

    Raises:
        ValueError: A file that is no YAML mapping, an unknown key or flag, a value that does not fit its field, or
            settings that would be ignored.
        OSError: No such file.
        SystemExit: After `--help`.
    """
    flags, usage = list(argv), "tokenahead train [CONFIG.yaml] [--FIELD VALUE ...]"
    parser = _Parser(_CLASSES, prog="tokenahead train", usage=usage, allow_abbrev=False)
    given: dict[str, Any] = {"flags": flags}
    if flags[:1] == ["--config"]:  # as TRL has it
        flags = flags[1:]
    if flags and not flags[0].startswith("-"):
        path, flags = flags[0], flags[1:]
        given["file"] = _mapping(path)
        parser.set_defaults(**_values(path, given["file"]))
    try:
        *parts, rest = parser.parse_args_into_dataclasses(
            flags, return_remaining_strings=True, look_for_args_file=False
        )
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"{' '.join(argv)}: a setting holds what its field cannot: {error}") from error
    if rest:
        raise ValueError(f"there is no setting {' '.join(rest)}; see tokenahead train --help")
    settings = Settings(*parts, given=given)
    _check_settings(settings)
    return settings


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node."""
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]!r} occurs twice in the mapping of line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def _mapping(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file of settings")
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of settings, such as `model_name_or_path: ...`")
    return values


def _values(path: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the typed values of a file."""
    known = {entry.name for each in _CLASSES for entry in fields(each) if entry.init} | {"env"}
    if unknown := [name for name in values if name not in known]:
        near = difflib.get_close_matches(str(unknown[0]), sorted(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; see --help"
        raise ValueError(f"{path}: there is no setting {unknown[0]!r}{hint}")
    environment = values.get("env", {})
    if not isinstance(environment, dict):
        raise ValueError(f"{path}: env={environment!r} must be a mapping of environment variables")
    os.environ.update({name: str(value) for name, value in environment.items()})
    parts = (typed_fields(path, values, each, _TYPES) for each in _CLASSES)
    return {name: value for part in parts for name, value in part.items()}


def _check_least(arguments: object, least: int, *names: str) -> None:
    for name, value in vars(arguments).items():
        if name in names and value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def _check_settings(settings: Settings) -> None:
    """Refuse settings that would be ignored, or that fail after the model is loaded."""
    _check_model(settings.model, settings.drafter)
    _check_schedule(settings.training)
    template = settings.training.chat_template_path
    if template and template.startswith((".", "/", "~")) and not Path(template).exists():
        raise FileNotFoundError(f"chat_template_path={template}: no such file or directory")
    if settings.mixture.datasets and settings.data.dataset_name:
        raise ValueError(
            f"dataset_name={settings.data.dataset_name} beside `datasets`: either is read; leave one of them out"
        )


def _check_schedule(training: SFTConfig) -> None:
    """Refuse options that another schedule of learning rates has."""
    options = training.lr_scheduler_kwargs
    if not isinstance(options, dict):
        return
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=training.learning_rate)
    try:
        get_scheduler(training.lr_scheduler_type, optimizer, 1, 10, options)
    except TypeError as error:
        raise ValueError(
            f"lr_scheduler_kwargs={options} do not fit lr_scheduler_type={training.lr_scheduler_type}: {error}"
        ) from None


def _check_model(model: ModelConfig, drafter: DrafterArguments) -> None:
    """Refuse settings of the model that this library does not follow."""
    if model.load_in_4bit or model.load_in_8bit:
        name = "load_in_4bit" if model.load_in_4bit else "load_in_8bit"
        raise ValueError(f"{name}=True: backbones are not quantised here; leave it out, or set dtype: bfloat16")
    if model.dtype not in (None, *_DTYPES):
        raise ValueError(f"dtype={model.dtype!r} is unknown; choose one of {', '.join(_DTYPES)}")
    hint = "leave use_peft out, and set strategy: {train: lora}"
    if model.use_peft and drafter.drafter in ("heads", "eagle"):
        raise ValueError(
            f"use_peft=True with drafter={drafter.drafter!r} would put adapters on the drafter, not on its backbone; "
            + (hint if drafter.drafter == "heads" else "leave it out: an EAGLE head learns on a frozen backbone")
        )
    if model.use_peft and drafter.strategy:
        raise ValueError(
            f"strategy={drafter.strategy} beside use_peft=True: PEFT alone decides then what learns; leave strategy "
            f"out, or {hint}"
        )
    defaults = {entry.name: entry.default for entry in fields(model)}
    for name, value in vars(model).items():
        if name.startswith("lora_") and not model.use_peft and value != defaults[name]:
            raise ValueError(
                f"{name}={value!r} is an option of use_peft=True; set it, or the fields of strategy: instead"
            )
