"""Settings of a run, from a YAML file and flags, in the words of TRL. Knows no model and reads no data."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import torch

from ..extras import needs_extra
from ..strategy import TrainingStrategy

with needs_extra("train", "tokenahead train"):
    import yaml
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

DRAFTERS = ("own", "heads", "eagle", "modules", "parallel")
"""What can be trained, see `DrafterArguments.drafter`."""
_SECTIONS = ("drafter_options", "loss_options", "strategy", "acceptance")


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
        default=None, metadata={"help": "Folder, or name on the Hub, of heads or an EAGLE head to go on from."}
    )
    drafter_options: dict | str | None = field(
        default=None,
        metadata={"help": "Options of a new drafter, as its from_backbone (EvaByte: set_head) takes them; JSON."},
    )
    loss_options: dict | str | None = field(
        default=None, metadata={"help": "Options of an EAGLE head's, of modules' or of PTP's loss; JSON."}
    )
    strategy: dict | str | None = field(default=None, metadata={"help": "Fields of TrainingStrategy; JSON."})
    acceptance: dict | str | None = field(
        default=None, metadata={"help": "Options of AcceptanceCallback, JSON; false leaves it out."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Evaluations without a better metric_for_best_model before training ends."}
    )

    def __post_init__(self) -> None:
        for name in _SECTIONS:
            value = getattr(self, name)
            if isinstance(value, str):
                setattr(self, name, _json(name, value))
        for name in _SECTIONS[:3]:
            value = getattr(self, name)
            if value is not None and not isinstance(value, dict):
                raise ValueError(f"{name}={value!r} must be a mapping of options")
        if self.acceptance is True:
            self.acceptance = None
        if self.early_stopping_patience is not None and self.early_stopping_patience < 1:
            raise ValueError(f"early_stopping_patience={self.early_stopping_patience} must be at least 1")

    def training_strategy(self) -> TrainingStrategy:
        """The strategy, checked.

        Raises:
            ValueError: A name that is no field, or a value out of range.
        """
        try:
            return TrainingStrategy.from_dict(self.strategy or {})
        except TypeError as error:
            raise ValueError(f"strategy: {error}") from None


@dataclass
class TrainConfig(SFTConfig):
    """`trl.SFTConfig` with what suits heads: no reports to services, and full precision where there is no accelerator.

    Activation checkpointing is off by default: a frozen backbone keeps no activations.
    """

    report_to: None | str | list[str] = field(default="none", metadata={"help": "Services to report to."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Compute activations again in backward; for backbones that learn."}
    )
    disable_tqdm: bool | None = field(default=True, metadata={"help": "tokenahead draws a bar of its own."})

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            self.bf16 = False
        super().__post_init__()


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
    """

    data: ScriptArguments
    mixture: DatasetMixtureConfig
    training: TrainConfig
    model: ModelConfig
    drafter: DrafterArguments
    given: dict[str, Any]


class _Parser(TrlParser):
    """Says what is wrong in one line, as the other commands do."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_settings(argv: Sequence[str], command: str) -> Settings:
    """Reads `CONFIG.yaml` and the flags behind it, which count more.

    Args:
        argv: Arguments of the command.
        command: Its name, for `--help`.

    Raises:
        ValueError: A file that is no YAML mapping, an unknown key or flag, or a value that does not fit its field.
        OSError: No such file.
        SystemExit: After `--help`.
    """
    argv = list(argv)
    parser = _Parser(
        [ScriptArguments, DatasetMixtureConfig, TrainConfig, ModelConfig, DrafterArguments],
        prog=f"tokenahead {command}",
        usage=f"tokenahead {command} [CONFIG.yaml] [--FIELD VALUE ...]",
        allow_abbrev=False,
    )
    given: dict[str, Any] = {"flags": argv}
    if argv and not argv[0].startswith("-"):
        given["file"] = _mapping(argv[0])
        _check_keys(parser, argv[0], given["file"])
        argv = ["--config", *argv]
    parsed = parser.parse_args_and_config(argv)
    return Settings(*_in_order(parsed), given=given)


def _in_order(parsed: Sequence[Any]) -> tuple[Any, ...]:
    data, mixture, training, model, drafter = parsed
    return data, mixture, training, model, drafter


def _mapping(path: str) -> dict[str, Any]:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of settings, such as `model_name_or_path: ...`")
    return values


def _check_keys(parser: _Parser, path: str, values: dict[str, Any]) -> None:
    known = {entry.name for kind in parser.dataclass_types for entry in fields(kind) if entry.init} | {"env"}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), sorted(known), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; see --help"
            raise ValueError(f"{path}: there is no setting {name!r}{hint}")


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f'{name}={text!r} must be JSON, such as \'{{"head_type": "cp"}}\'') from None
