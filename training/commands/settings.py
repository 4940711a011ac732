"""Settings of a run, from a YAML file and flags, in the words of TRL. Knows no model and reads no data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from math import inf
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, NoReturn, Union, get_args, get_origin, get_type_hints

import torch

from ...configuration.fields import refuse
from ...generation.tensors.wrapped_models import Kwargs
from ..requests import option
from ..strategy import TrainingStrategy
from ..utils import needs_extra

with needs_extra("train", "tokenahead train"):
    import yaml
    from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
    from trl.trainer.model_config import ModelConfig
    from trl.trainer.sft_config import SFTConfig

_GROUP = "settings of tokenahead"
"""Title in `--help` of the settings that TRL does not have."""
APART = ("heads", "eagle", "block")
"""Drafters that are apart from their backbone, in separate directories."""
_KINDS = ("own", *APART, "modules", "parallel")
_NODES = 100_000  # values of a file, written out
_SECTIONS = ("drafter_options", "loss_options", "strategy", "regenerate", "features_engine", "acceptance")


@dataclass
class DrafterArguments:
    """The trained drafter of the model of `model_name_or_path`; fields have a help text."""

    _argument_group_name: ClassVar[str] = _GROUP

    drafter: str = option(
        "own",
        help="own: the heads, modules or slots that the model brings (EvaByte, DeepSeekMTP, PTP). New ones for any "
        "other causal language model: heads (MTPHeads), eagle (EagleHead), block (BlockDrafter), modules "
        "(DeepSeekMTP), parallel (PTP). heads:SOURCE, eagle:SOURCE, block:SOURCE or auto:SOURCE: one to continue from, "
        "in a directory or on the Hub, in any layout.",
    )
    drafter_options: dict | str | None = option(
        None,
        help="Options of a new drafter, as its from_backbone (EvaByte: set_head) takes them; JSON. draft_ids (of "
        "modules: draft_vocabulary) is a list of the tokens to draft, or a JSON file that holds one.",
    )
    loss_options: dict | str | None = option(
        None, help="Options of the drafter's loss (fields of its loss_options; of PTPOptions); JSON."
    )
    strategy: dict | str | None = option(None, help="Fields of TrainingStrategy; JSON.")
    regenerate: dict | str | None = option(
        None,
        help="Learn from the backbone's completions of the beginnings of the data: folder, prompt_tokens, and options "
        "of training.regeneration.regenerate (max_new_tokens, batch_size, do_sample, ...); JSON.",
    )
    features: str | None = option(
        None,
        help="Directory for the frozen backbone's states, for drafters apart from it: every epoch then needs no "
        "forward of it, and a further run reads them.",
    )
    features_engine: dict | str | None = option(
        None,
        help="A vLLM server that gives these states (docs/scale.md): url, folder, where its files are found here, and "
        "fields of Endpoint; JSON. None: the backbone of the run.",
    )
    acceptance: dict | str | None = option(None, help="Options of AcceptanceCallback, JSON; false leaves it out.")
    early_stopping_patience: int | None = option(
        None, help="Evaluations without a better metric_for_best_model before training ends."
    )

    def __post_init__(self) -> None:
        if isinstance(self.features_engine, str) and "://" in self.features_engine.partition("{")[0]:
            self.features_engine = {"url": self.features_engine}  # without a folder
        for name in _SECTIONS:
            setattr(self, name, _section(name, vars(self)[name]))
        kinds = _KINDS if self.source is None else ("auto", *APART)
        if self.kind not in kinds or self.source == "":
            raise ValueError(
                f"drafter={self.drafter!r}: choose of {', '.join(_KINDS)}; to continue from a drafter, of "
                f"{', '.join(f'{kind}:SOURCE' for kind in ('auto', *APART))}"
            )
        if self.features_engine is not None and not (self.features and self.options("features_engine").get("folder")):
            raise ValueError(
                f"features_engine={self.features_engine} needs folder, where the server's files are found here, and "
                "features, the directory that stores their states"
            )

    @property
    def kind(self) -> str:
        """What the drafter is; `"auto"`: what its source holds."""
        return self.drafter.partition(":")[0]

    @property
    def source(self) -> str | None:
        """Directory, or name on the Hub, of the drafter that the training begins with; None: a new one."""
        return self.drafter.partition(":")[2] if ":" in self.drafter else None

    @property
    def is_apart(self) -> bool:
        """Whether the drafter is apart from its backbone."""
        return self.kind in ("auto", *APART)

    def options(self, section: str) -> Kwargs:
        """Return a copy of the options of a section; empty where it is not set."""
        return dict(vars(self)[section] or {})

    def training_strategy(self) -> TrainingStrategy:
        """Return the strategy, checked."""
        return filled("strategy", self.options("strategy"), TrainingStrategy)


def _section(name: str, value: object) -> object:
    """Return the mapping of a section, from JSON where a flag gave it."""
    value = _from_json(value)
    if isinstance(value, dict) or value is None or (value is False and name == "acceptance"):
        return _from_json(value)
    raise ValueError(f"{name}={value!r} must be a mapping, or JSON that holds one")


def _from_json(value: object) -> object:
    """Return what a text holds as JSON, if it does: YAML 1.1 takes 1e-4 for text."""
    if isinstance(value, dict):
        return {key: _from_json(each) for key, each in value.items()}
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


@dataclass
class TrainConfig(SFTConfig):
    """`trl.SFTConfig` with defaults for heads: no reports to services, and full precision without an accelerator.

    Activation checkpointing is off by default: a frozen backbone stores no activations.
    """

    report_to: None | str | list[str] = option("none", help="Services to report to.")
    gradient_checkpointing: bool | None = option(
        None, help="The older name of activation_checkpointing, for backbones that learn."
    )
    disable_tqdm: bool | None = option(False, help="Leave out the bar of the run.")
    tokens_per_batch: int | None = option(
        None,
        help="Tokens of a batch of one process, which has as many rows as fit, joined without padding where the model "
        "reads joined rows apart. By default 4,096, or as many as the longest row has; 0, or a given "
        "per_device_train_batch_size: that number of rows.",
    )
    ignore_columns: list[str] | None = option(
        None, help="Columns of the data that are left out unread; others that are not known are refused."
    )
    drop_longer: bool = option(
        False, help="Leave out rows of more than max_length tokens, which are otherwise cut, or divided by packing."
    )

    def __post_init__(self) -> None:
        if self.bf16 is None and not self.fp16 and (self.use_cpu or not torch.accelerator.is_available()):
            self.bf16 = False
        if self.gradient_accumulation_steps < 1:
            raise ValueError(f"gradient_accumulation_steps={self.gradient_accumulation_steps} must be at least 1")
        if self.drop_longer and self.max_length is None:
            raise ValueError("drop_longer=True needs max_length, beyond which rows are left out")
        super().__post_init__()


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
    given: Kwargs
    adapters: str | None = None

    def __post_init__(self) -> None:
        """Refuse settings that would be ignored."""
        model, drafter = self.model, self.drafter
        of_drafter = (
            f"use_peft=True with drafter={drafter.drafter!r} would put adapters on the drafter, not on its backbone"
        )
        hint = "leave use_peft out, and set strategy: {train: lora}"
        instead = hint if drafter.kind == "heads" else "leave it out: this drafter learns on a frozen backbone"
        name, alone = self.data.dataset_name, f"strategy={drafter.strategy} beside use_peft=True: PEFT alone decides"
        is_apart = drafter.is_apart and drafter.options("strategy").get("train", "drafter") == "drafter"
        frozen = "a quantised backbone does not learn; choose drafter: heads, eagle or block, or leave it out"
        refuse(
            [
                (self.mixture.datasets and name, f"dataset_name={name} beside `datasets`: leave one of them out"),
                (model.load_in_4bit and not is_apart, f"load_in_4bit=True: {frozen}"),
                (model.load_in_8bit and not is_apart, f"load_in_8bit=True: {frozen}"),
                (model.use_peft and drafter.is_apart, f"{of_drafter}; {instead}"),
                (model.use_peft and drafter.strategy, f"{alone} then what learns; leave strategy out, or {hint}"),
            ]
        )
        defaults = {entry.name: entry.default for entry in fields(model)}
        for name, value in vars(model).items():
            if name.startswith("lora_") and not model.use_peft and value != defaults[name]:
                raise ValueError(
                    f"{name}={value!r} is an option of use_peft=True; set it, or the fields of strategy: instead"
                )

    @property
    def output(self) -> Path:
        """The directory of the run."""
        return Path(str(self.training.output_dir))

    @property
    def tokens_per_batch(self) -> int | None:
        """The budget of tokens: none where the user gives a number of rows, also transformers' own."""
        budget, name = self.training.tokens_per_batch, "per_device_train_batch_size"
        flags = {flag.partition("=")[0].removeprefix("--").replace("-", "_") for flag in self.given["flags"]}
        if name not in flags | set(self.given.get("file") or ()):
            return budget
        if budget:
            rows = self.training.per_device_train_batch_size
            raise ValueError(f"tokens_per_batch={budget}: {name}={rows} is a number of rows; leave one of them out")
        return 0


_CLASSES: Any = (ScriptArguments, DatasetMixtureConfig, TrainConfig, ModelConfig, DrafterArguments)


class _Parser(TrlParser):
    """Reads what a file holds as flags are read, and reports an error in one line; lists our own settings first."""

    def format_help(self) -> str:
        """Return the help with the group of this library's settings first."""
        self._action_groups.sort(key=lambda group: group.title != _GROUP)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Set defaults, with the types that the flags of these names have; return those that no flag has."""
        hints = {name: hint for kind in self.dataclass_types for name, hint in get_type_hints(kind).items()}
        known = {name: self._typed(name, value, hints[name]) for name, value in kwargs.items() if name in hints}
        return super().set_defaults_with_config(**kwargs | known)

    def _typed(self, name: str, value: object, hint: object) -> object:
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        plain = {get_origin(kind) or kind for kind in kinds}
        if value is None and type(None) not in plain:
            self.error(f"argument --{name}: null is no value of it")
        if isinstance(value, dict) and (nested := next(filter(is_dataclass, kinds), None)):
            return filled(name, value, nested)
        if value is None or (type(value) in plain - {str}) or (isinstance(value, bool) and str in plain):
            return value  # of its type, or what only a file can hold
        word = value if isinstance(value, str) else json.dumps(value)
        return vars(self.parse_known_args([f"--{name}={word}"])[0])[name]


def filled(section: str, values: Mapping[str, Any], kind: Any) -> Any:
    """Return a dataclass of options from a section of the settings; refuse options that it does not have."""
    parser = _Parser(kind, add_help=False, allow_abbrev=False)
    try:
        if unknown := parser.set_defaults_with_config(**values):
            names = ", ".join(entry.name for entry in fields(kind))
            raise ValueError(f"there is no option {unknown[0].removeprefix('--')!r}; there are {names}")
        return parser.parse_args_into_dataclasses([], look_for_args_file=False)[0]
    except (ValueError, TypeError) as error:
        raise ValueError(f"{section}: {error}") from None


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML takes the last in silence, and aliases that make much out of little."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the root of a document that is of bounded size, written out."""
        root = super().get_single_node()
        if root is not None and _written_out(root, {}) > _NODES:
            raise yaml.YAMLError(f"its aliases stand for more than {_NODES} values: write them out")
        return root

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping of a node."""
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.YAMLError(f"{twice[0]!r} occurs twice in the mapping of line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def _written_out(node: yaml.Node, known: dict[int, float]) -> float:
    """Return how many values a node stands for, infinitely many where it holds itself; `known` ones by their nodes."""
    if id(node) not in known:
        known[id(node)] = inf
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = [each for pair in parts for each in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_written_out(each, known) for each in parts)
    return known[id(node)]


def _read_yaml(file: str) -> Any:
    try:
        return yaml.load(Path(file).read_bytes(), _Loader)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        raise ValueError(f"{file}: a setting holds what its field cannot: {error}") from error


def read_settings(argv: Sequence[str], command: str = "train") -> Settings:
    """Read `CONFIG.yaml` and the flags after it, which override it.

    Args:
        argv: Arguments of the command.
        command: Its name.

    Raises:
        ValueError: A file that is no YAML mapping, an unknown key or flag, a value that does not fit its field, or
            settings that would be ignored.
        OSError: No such file.
        SystemExit: After `--help`.
    """
    flags, usage = list(argv), f"tokenahead {command} [CONFIG.yaml] [--FIELD VALUE ...]"
    given: Kwargs = {"flags": list(argv)}
    if flags and not flags[0].startswith("-"):
        flags = ["--config", *flags]
    parser = _Parser(_CLASSES, prog=f"tokenahead {command}", usage=usage, allow_abbrev=False)
    try:
        if "--config" in flags[:-1]:  # before TRL reads it, which takes any
            given["file"] = _read_yaml(flags[flags.index("--config") + 1])
        *parts, rest = parser.parse_args_and_config(flags, return_remaining_strings=True)
    except (TypeError, AttributeError, LookupError, yaml.YAMLError) as error:
        raise ValueError(f"{' '.join(argv)}: a setting holds what its field cannot: {error}") from error
    if rest:
        raise ValueError(f"there is no setting {' '.join(rest)}; see tokenahead {command} --help")
    return Settings(*parts, given=given)
