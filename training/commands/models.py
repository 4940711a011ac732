"""Models of a run, loaded or made new, and the data that a frozen backbone adds: stored states and its own text."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from ...configuration import MTPHeadConfig, PTPConfig
from ...configuration.eagle import EagleHeadConfig
from ...generation.attach import AttachableDrafter
from ...modeling import DeepSeekMTP, EagleHead, EvaByteForMTPC, EvaByteTokenizer, MTPHeads, PTPForCausalLM
from ...modeling.loss_options import EagleLossOptions, ModuleLossOptions
from ..features import STATES, FeatureDataset, cache_features
from ..loading import (
    DRAFTERS,
    base_of,
    causal_class,
    has_adapters,
    load_config,
    named_base,
    put_adapters,
    tokenizer_source,
    trained_backbone,
)
from ..ptp.losses import PTPOptions
from ..regeneration import regenerate
from ..utils import needs_extra
from .data import load_data
from .settings import DrafterArguments, Settings
from .typed import typed_options

with needs_extra("train", "tokenahead train"):
    from datasets import Dataset
    from trl.data_utils import maybe_convert_to_chatml

_PROMPT_TOKENS = 32

_NEW = {"heads": MTPHeads, "eagle": EagleHead, "modules": DeepSeekMTP, "parallel": PTPForCausalLM}
_CONFIGS = {"own": MTPHeadConfig, "heads": MTPHeadConfig, "eagle": EagleHeadConfig, "parallel": PTPConfig}


@dataclass(frozen=True)
class Trainee:
    """What a run trains.

    Attributes:
        model: What the trainer gets: a model with a drafter in it, or a drafter that is attached to its backbone.
        backbone: The model whose `generate` is called.
        tokenizer: The backbone's.
    """

    model: PreTrainedModel
    backbone: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def build(settings: Settings) -> Trainee:
    """Load the backbone, and load or make what drafts for it.

    Raises:
        ValueError: No model, a drafter or adapters that do not fit the model, or an option that is none.
        OSError: A directory or a name that holds no model.
    """
    arguments, source = settings.drafter, settings.model.model_name_or_path
    if not source:
        raise ValueError("model_name_or_path is missing: a directory, or a name on the Hub")
    if has_adapters(source):
        raise ValueError(
            f"model_name_or_path={source} holds adapters of peft without the model that they were trained for: merge "
            "them into it, and name the merged one"
        )
    config = load_config(source, "model_name_or_path")
    if isinstance(config, DRAFTERS):
        raise ValueError(
            f"model_name_or_path={source} holds a drafter without a backbone: name the backbone there, and heads or an "
            "EAGLE head as drafter_name_or_path; of a student, what student.whole.save_pretrained(directory) writes"
        )
    backbone = _backbone(settings, source, config)
    tokenizer = _tokenizer(source, backbone)
    try:
        model = _drafter(arguments, backbone)
        _apply_loss_options(model, arguments)
    except TypeError as error:  # an option that from_backbone does not know
        raise ValueError(f"drafter_options: {error}") from None
    trainee = Trainee(model, model.backbone if isinstance(model, AttachableDrafter) else model, tokenizer)
    if settings.adapters is not None:
        put_adapters(trainee.backbone, settings.adapters)
    return trainee


def _backbone(settings: Settings, source: str, config: PreTrainedConfig) -> PreTrainedModel:
    model = settings.model
    brings_modules = settings.drafter.drafter in ("own", "modules")
    options: dict[str, Any] = {"revision": model.model_revision, "dtype": model.dtype or "float32"}
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    if settings.training.trust_remote_code:
        options["trust_remote_code"] = True
    return (causal_class(config) if brings_modules else AutoModelForCausalLM).from_pretrained(source, **options)


def _tokenizer(source: str, backbone: PreTrainedModel) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_source(source))
    except (OSError, ValueError) as error:
        if not isinstance(backbone, EvaByteForMTPC):
            raise ValueError(
                f"model_name_or_path={source} has no tokenizer that can be read: save the model's there ({error})"
            ) from error
        tokenizer = EvaByteTokenizer()  # bytes are bytes, also where a directory has none
    size = backbone.config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ValueError(
            f"the tokenizer of {source} has {len(tokenizer)} tokens, the model {size}: resize its embeddings first"
        )
    return tokenizer


def _drafter(arguments: DrafterArguments, backbone: PreTrainedModel) -> PreTrainedModel:
    """Return the model to train."""
    options = _drafter_options(arguments)
    brings_its_own = isinstance(backbone, (EvaByteForMTPC, DeepSeekMTP, PTPForCausalLM))
    if arguments.drafter_name_or_path is not None:
        return _stored(arguments, backbone)
    if arguments.drafter == "own" or isinstance(backbone, DeepSeekMTP):
        if not brings_its_own:
            raise ValueError(
                f"{type(backbone).__name__} brings nothing that drafts: set drafter: heads, eagle, modules or parallel"
            )
        return _own(backbone, options)
    if isinstance(backbone, PTPForCausalLM):
        raise ValueError(f"drafter={arguments.drafter!r}: a PTPForCausalLM is trained as it is; set drafter to 'own'")
    return _NEW[arguments.drafter].from_backbone(backbone, **options)


def _drafter_options(arguments: DrafterArguments) -> dict[str, Any]:
    """Return the options of a new drafter, by the types of its config and of what makes it."""
    given = arguments.options("drafter_options")
    for name in ("draft_ids", "draft_vocabulary"):
        if isinstance(file := given.get(name), str):
            given[name] = json.loads(Path(file).read_text(encoding="utf-8"))
    configs = [_CONFIGS[arguments.drafter]] if arguments.drafter in _CONFIGS else []
    makers = [_NEW[arguments.drafter].from_backbone] if arguments.drafter in _NEW else []
    return typed_options("drafter_options", given, *configs, *makers, closed=False)


def _own(model: PreTrainedModel, options: dict[str, Any]) -> PreTrainedModel:
    if isinstance(model, EvaByteForMTPC):
        if options:
            model.set_head(**options)
    elif options:
        raise ValueError(f"drafter_options={options}: the {type(model).__name__} was made already, and is what it is")
    return model


def _stored(arguments: DrafterArguments, backbone: PreTrainedModel) -> PreTrainedModel:
    name = str(arguments.drafter_name_or_path)
    if arguments.drafter_options:
        raise ValueError(f"drafter_options are for a new drafter, and {name} is one already: leave one of them out")
    config = load_config(name, "drafter_name_or_path")
    wanted = {"heads": MTPHeadConfig, "eagle": EagleHeadConfig}.get(arguments.drafter)
    if wanted is None:
        raise ValueError(f"drafter={arguments.drafter!r}: only heads and eagle live in directories of their own")
    if not isinstance(config, wanted):
        raise ValueError(f"drafter_name_or_path={name} holds a {config.model_type!r}, not {wanted.model_type!r}")
    return AutoModel.from_pretrained(name).attach(backbone)


def _apply_loss_options(model: PreTrainedModel, arguments: DrafterArguments) -> None:
    """Set the loss options of a drafter; of a PTP model, choose what learns: the backbone if `base_weight` lets it."""
    given = arguments.options("loss_options")
    if isinstance(model, PTPForCausalLM):
        model.train_only("all" if ptp_options(arguments).base_weight else "drafter")
    elif given and isinstance(model, EagleHead):
        model.loss_options = EagleLossOptions(**typed_options("loss_options", given, EagleLossOptions))
        model.loss_options.resolved(model.config.version)
    elif given and isinstance(model, DeepSeekMTP):
        model.loss_options = ModuleLossOptions(**typed_options("loss_options", given, ModuleLossOptions))
    elif given:
        raise ValueError(
            f"loss_options={given}: the loss of a {type(model).__name__} follows its drafter_options (gamma, "
            "loss_weights, ...) and the strategy"
        )


def ptp_options(arguments: DrafterArguments) -> PTPOptions:
    """Return the options of `PTPTrainer`."""
    return PTPOptions(**typed_options("loss_options", arguments.options("loss_options"), PTPOptions))


def is_parallel(model: PreTrainedModel) -> bool:
    """Return whether `PTPTrainer` trains it."""
    return isinstance(model, PTPForCausalLM) or isinstance(model.config, PTPConfig)


def with_moved_backbone(settings: Settings) -> Settings:
    """Return the settings with the backbone that learned together with the heads of `drafter_name_or_path`, if any.

    `model_name_or_path` may name that backbone, or the one that it was before, or nothing. Adapters go on any backbone
    that is named, for a directory may have been moved.
    """
    heads, named = settings.drafter.drafter_name_or_path, settings.model.model_name_or_path
    folder = trained_backbone(heads) if heads else None
    if heads is None or folder is None:
        return settings
    named = None if _is_same(named, folder) else named
    if has_adapters(folder):
        if named is not None and not _is_same(named, before := named_base(folder)):
            warnings.warn(f"the adapters of {folder} were trained for {before}, and are put on {named}", stacklevel=2)
        return _on(settings, named or base_of(folder), adapters=str(folder))
    if named is not None and not _is_same(named, load_config(heads, "drafter_name_or_path").base_model_name_or_path):
        raise ValueError(
            f"model_name_or_path={named}: the backbone of {heads} learned with these heads; name {folder}, or leave "
            "model_name_or_path out"
        )
    return _on(settings, str(folder))


def note_backbone(trainee: Trainee, asked: Settings, settings: Settings) -> None:
    """Record in a drafter that continues which backbone it is for now, as a new one does."""
    if not isinstance(trainee.model, AttachableDrafter) or settings.drafter.drafter_name_or_path is None:
        return
    is_frozen = settings.drafter.training_strategy().train == "drafter"
    if is_frozen and settings.adapters is not None:
        raise ValueError(
            f"drafter_name_or_path={settings.drafter.drafter_name_or_path}: these heads learned with the adapters of "
            f"{settings.adapters}, which heads alone would not save; set strategy: {{train: lora}}, or merge them into "
            "the backbone, and name the merged one"
        )
    # a backbone that learns lies beside the heads, and comes from the one that was asked for
    name = (settings if is_frozen else asked).model.model_name_or_path
    trainee.model.config.base_model_name_or_path = name or trainee.model.config.base_model_name_or_path


def _on(settings: Settings, backbone: str, adapters: str | None = None) -> Settings:
    return replace(settings, model=replace(settings.model, model_name_or_path=backbone), adapters=adapters)


def _is_same(name: str | None, other: str | Path | None) -> bool:
    return name is not None and other is not None and Path(name).resolve() == Path(other).resolve()


def check_features(settings: Settings, model: PreTrainedModel) -> None:
    """Refuse a run that has no states to store, before anything is written."""
    folder = settings.drafter.features
    if folder is None:
        return
    if Path(folder).is_file():
        raise ValueError(f"features={folder} is a file: choose a directory")
    if not isinstance(model, AttachableDrafter) or settings.drafter.training_strategy().train != "drafter":
        raise ValueError(
            f"features={folder} holds the states of a frozen backbone: leave it out, or train heads or an EAGLE head "
            "apart, with strategy: {train: drafter}"
        )
    streams = {"dataset_streaming": settings.data.dataset_streaming, "streaming": settings.mixture.streaming}
    for name in (name for name, value in streams.items() if value):
        raise ValueError(f"features={folder} holds all rows at once, and a stream has no end: set {name}: false")


def keep_features(trainer: Trainer, settings: Settings) -> None:
    """Write the states that the drafter learns from, or those that are missing, and replace the data with them."""
    folder, rows = settings.drafter.features, trainer.train_dataset
    if folder is None or not isinstance(rows, Dataset):
        return
    with trainer.args.main_process_first(desc="states of the backbone"):
        trainer.train_dataset = cache_features(trainer.model, _Collated(rows, trainer.data_collator), folder)
    trainer.data_collator = _Either(trainer.data_collator)
    trainer.args.remove_unused_columns = False  # TRL's list of columns knows no states


class _Collated(Sequence):
    """Rows as the trainer's collator makes them, one by one: with labels, and with positions where they are packed."""

    def __init__(self, rows: Dataset, collator: Any) -> None:
        self.rows, self.collator = rows, collator

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        batch = self.collator([self.rows[number]])
        return {name: values[0] for name, values in batch.items() if isinstance(values, torch.Tensor)}


class _Either:
    """Batches of rows with stored states, and of rows without, as evaluation has them."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, rows: Sequence[Any]) -> Any:
        return (FeatureDataset.collate if STATES in rows[0] else self.collator)(rows)


def with_own_text(settings: Settings, trainee: Trainee) -> Settings:
    """Return settings whose data are what the backbone writes after the beginnings of the data that they name.

    A chat begins with all that stands before the last answer, a `prompt` is one, and of other rows the first
    `prompt_tokens` ids are taken.

    Args:
        settings: Of the run; `regenerate` says where to write and how, as `regenerate` of this library takes it.
        trainee: What is trained.

    Raises:
        ValueError: No directory, a stream, or a directory of other text.
    """
    asked = settings.drafter.regenerate
    if asked is None:
        return settings
    options = settings.drafter.options("regenerate")
    folder, count = options.pop("folder", None), options.pop("prompt_tokens", _PROMPT_TOKENS)
    if not (folder and isinstance(folder, str) and isinstance(count, int) and count >= 1):
        raise ValueError(f"regenerate={asked} needs folder=, and prompt_tokens of at least 1")
    vocab_size = trainee.backbone.config.get_text_config().vocab_size
    rows = load_data(settings, False, trainee.tokenizer, vocab_size)["train"]
    if not isinstance(rows, Dataset):
        raise ValueError(f"regenerate={asked} takes all rows: set dataset_streaming: false")
    column = settings.training.dataset_text_field
    with settings.training.main_process_first(desc="text of the backbone"):
        prompts = [_beginning(dict(row), trainee.tokenizer, column, count) for row in rows]
        regenerate(trainee.backbone, prompts, folder, **options)
    data = replace(settings.data, dataset_name=folder, dataset_config=None, dataset_train_split="train")
    return replace(settings, data=data, mixture=replace(settings.mixture, datasets=[]))


def _beginning(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, column: str, count: int) -> Any:
    row = maybe_convert_to_chatml(row)
    if turns := row.get("messages") or (row.get("prompt") if isinstance(row.get("prompt"), list) else None):
        answers = [index for index, turn in enumerate(turns) if turn.get("role") == "assistant"]
        before = turns[: answers[-1]] if answers and "messages" in row else turns
        return tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False)
    if "prompt" in row:
        return tokenizer(row["prompt"])["input_ids"]
    return (row["input_ids"] if "input_ids" in row else tokenizer(row[column])["input_ids"])[:count]
