"""Settings of a run, from a YAML file and flags, in the words of TRL: each kind of drafter has a config of its own.

Knows no model and reads no data.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from ...configuration.fields import refuse
from ...generation.backbone.wrapped_models import Kwargs
from ..requests import option
from ..strategy import TrainingStrategy
from ..utils import needs_extra

with needs_extra("train", "tokenahead train"):
    import yaml
    from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
    from trl.trainer.model_config import ModelConfig
    from trl.trainer.sft_config import SFTConfig

_SECTIONS = {"drafter_options", "loss_options", "strategy", "regenerate", "features_engine", "acceptance"}


@dataclass
class DrafterArguments:
    """What every kind of drafter has; fields have a help text."""

    _argument_group_name: ClassVar[str] = "settings of tokenahead"
    absent: ClassVar[tuple[str, ...]] = ()
    """Patterns of settings of TRL that make no sense for this kind."""
    features: ClassVar[Any] = None
    features_engine: ClassVar[Any] = None

    drafter: str = option(
        "own",
        "own: the heads, modules or slots that the model brings (EvaByte, DeepSeekMTP, PTP). New ones for any other "
        "causal language model: heads (MTPHeads), eagle (EagleHead), block (BlockDrafter), modules (DeepSeekMTP), "
        "parallel (PTP). heads:SOURCE, eagle:SOURCE, block:SOURCE or auto:SOURCE: one to continue from, in a directory "
        "or on the Hub, in any layout. Each kind has its own settings: --drafter KIND --help.",
    )
    drafter_options: dict | str | None = option(
        None,
        "Options of a new drafter, as its from_backbone (EvaByte: set_head) takes them; JSON. draft_ids (of modules: "
        "draft_vocabulary) is a list of the tokens to draft, or a JSON file that holds one.",
    )
    loss_options: dict | str | None = option(None, "Fields of the drafter's loss_options; of PTPOptions; JSON.")
    strategy: dict | str | None = option(None, "Fields of TrainingStrategy (of a student: shard_backbone alone); JSON.")
    regenerate: dict | str | None = option(
        None,
        "Learn from the backbone's completions of the beginnings of the data: folder, prompt_tokens, and options of "
        "training.regeneration.regenerate (max_new_tokens, batch_size, do_sample, ...); JSON.",
    )
    acceptance: dict | str | None = option(None, "Options of AcceptanceCallback, JSON; false leaves it out.")
    early_stopping_patience: int | None = option(None, "Evaluations without a better metric before training ends.")

    def __post_init__(self) -> None:
        for name in _SECTIONS & vars(self).keys():
            if isinstance(text := vars(self)[name], str):
                with suppress(ValueError):
                    setattr(self, name, json.loads(text))
            if not isinstance(vars(self)[name], dict | None) and (name, vars(self)[name]) != ("acceptance", False):
                raise ValueError(f"{name}={text!r} must be a mapping, or JSON that holds one")
        self.training_strategy()

    @property
    def kind(self) -> str:
        """What the drafter is; `"auto"`: what its source holds."""
        return self.drafter.partition(":")[0]

    @property
    def source(self) -> str | None:
        """Directory, or name on the Hub, of the drafter that the training begins with; None: a new one."""
        return self.drafter.partition(":")[2] if ":" in self.drafter else None

    def options(self, section: str) -> Kwargs:
        """Return a copy of the options of a section; empty where it is not set, or where this kind has none."""
        return dict(vars(self).get(section) or {})

    def training_strategy(self) -> TrainingStrategy:
        """Return the strategy, checked."""
        return filled("strategy", self.options("strategy"), TrainingStrategy)


@dataclass
class OwnedArguments(DrafterArguments):
    """A drafter that is part of its model: adapters of PEFT may teach both."""

    absent = ("load_in_4bit", "load_in_8bit")


@dataclass
class ApartArguments(DrafterArguments):
    """A drafter apart from its backbone, which may be quantised, and whose states may be stored."""

    absent = ("use_peft", "lora_*")

    features: str | None = option(
        None, "Directory for the frozen backbone's states: further epochs and runs then need no forward of it."
    )
    features_engine: dict | str | None = option(
        None,
        "A vLLM server that gives these states (docs/scale.md): url, folder, where its files are found here, and "
        "fields of Endpoint; JSON. None: the backbone of the run.",
    )


KINDS: dict[str, type[DrafterArguments]] = {
    **dict.fromkeys(("own", "modules", "parallel"), OwnedArguments),
    **dict.fromkeys(("heads", "eagle", "block", "auto"), ApartArguments),
}
"""The config of each kind of drafter; those apart from their backbone can be continued from, as KIND:SOURCE."""


@dataclass
class TrainConfig(SFTConfig):
    """`trl.SFTConfig` with full precision where there is no accelerator, and settings of batches."""

    disable_tqdm: bool | None = option(False, "Leave out the bar of the run.")
    tokens_per_batch: int | None = option(
        None,
        "Tokens of a batch of one process, which has as many rows as fit, joined without padding where the model reads "
        "joined rows apart. By default 4,096, or as many as the longest row has; 0, or a given "
        "per_device_train_batch_size: that number of rows.",
    )
    ignore_columns: list[str] | None = option(None, "Columns left out unread; other unknown ones are refused.")
    drop_longer: bool = option(False, "Leave out rows of more than max_length tokens, in place of cutting them.")

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            self.bf16 = False
        super().__post_init__()


@dataclass(frozen=True)
class Settings:
    """All settings of a run, with the names of those that the user gave.

    `adapters` is the directory of adapters of PEFT that are put on the backbone.
    """

    data: ScriptArguments
    mixture: DatasetMixtureConfig
    training: TrainConfig
    model: ModelConfig
    drafter: DrafterArguments
    names: frozenset[str] = frozenset()
    adapters: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings of different configs of which one would be passed over in silence."""
        drafter, name, peft = self.drafter, self.data.dataset_name, self.model.use_peft
        if self.training.tokens_per_batch is None and "per_device_train_batch_size" in self.names:
            self.training.tokens_per_batch = 0
        learns = drafter.training_strategy().train != "drafter"
        lora = sorted(each for each in self.names if each.startswith("lora_"))
        refuse(
            [
                (self.mixture.datasets and name, f"dataset_name={name} beside `datasets`: leave one of them out"),
                (drafter.features and learns, f"features={drafter.features} holds states of a backbone that learns"),
                (peft and drafter.strategy, f"strategy={drafter.strategy} beside use_peft=True: leave one out"),
                (lora and not peft, f"{', '.join(lora)}: options of use_peft=True, or of strategy"),
            ]
        )

    @property
    def output(self) -> Path:
        """The directory of the run."""
        return Path(str(self.training.output_dir))


class _Parser(TrlParser):
    """Reads numbers of a file as argparse reads words, and raises an error in place of the usage."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Set defaults, and return those that no flag has."""
        words = {name: str(value) if type(value) in (int, float) else value for name, value in kwargs.items()}
        return super().set_defaults_with_config(**words)


def filled(section: str, values: Mapping[str, object], kind: Any) -> Any:
    """Return a dataclass of options from a section of the settings; refuse options that it does not have."""
    parser = _Parser(kind, add_help=False, allow_abbrev=False)
    try:
        if unknown := parser.set_defaults_with_config(**values):
            names = ", ".join(entry.name for entry in fields(kind))
            raise ValueError(f"there is no option {unknown[0].removeprefix('--')!r}; there are {names}")
        return parser.parse_args_into_dataclasses([], look_for_args_file=False)[0]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{section}: {error}") from None


def read_settings(argv: Sequence[str], command: str = "train") -> Settings:
    """Read `CONFIG.yaml` and the flags of a command after it, which override it; refuse unknown ones by name."""
    flags, usage = list(argv), f"tokenahead {command} [CONFIG.yaml] [--FIELD VALUE ...]"
    values: dict[str, Any] = {}
    if flags and not flags[0].startswith("-"):
        try:
            values = dict(yaml.safe_load(Path(file := flags.pop(0)).read_bytes()))
        except (yaml.YAMLError, TypeError, ValueError) as error:
            raise ValueError(f"{file} must hold a YAML mapping: {error}") from error
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--drafter", default=str(values.get("drafter", "own")))
    drafter = first.parse_known_args(flags)[0].drafter
    kind, colon, source = drafter.partition(":")
    config = KINDS.get(kind)
    if config is None or (colon and not (source and config is ApartArguments)) or (kind == "auto" and not source):
        apart = ", ".join(f"{name}:SOURCE" for name, each in KINDS.items() if each is ApartArguments)
        new = ", ".join(name for name in KINDS if name != "auto")
        raise ValueError(f"drafter={drafter!r}: choose of {new}; to continue from a drafter, of {apart}")
    words = (flag.partition("=")[0] for flag in flags if flag.startswith("--"))
    names = frozenset({word.removeprefix("--").replace("-", "_") for word in words} | {*values})
    kinds: Any = (ScriptArguments, DatasetMixtureConfig, TrainConfig, ModelConfig, config)
    parser = _Parser(kinds, prog=f"tokenahead {command}", usage=usage, allow_abbrev=False)
    # a frozen backbone stores no activations, and services get reports where that is asked for
    parser.set_defaults(report_to="none", gradient_checkpointing=None)
    try:
        unknown = parser.set_defaults_with_config(**values)
        *parts, rest = parser.parse_args_into_dataclasses(flags, True, look_for_args_file=False)
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(f"{' '.join(argv)}: a setting holds what its field cannot: {error}") from error
    unknown += [*rest, *sorted(name for name in names for each in config.absent if fnmatch(name, each))]
    if unknown:
        own = ", ".join(entry.name for entry in fields(config))
        raise ValueError(f"there is no setting {unknown[0]} for drafter={drafter}, which has {own}, and those of TRL")
    return Settings(*parts, names=names)
