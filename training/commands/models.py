"""Models of a run, loaded or made new, and the data that a frozen backbone adds: stored states and its own outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    DataCollator,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from ...configuration import PTPConfig
from ...generation.attach import MTPGenerationMixin
from ...generation.backbone.wrapped_models import Kwargs, load_sharded, untyped
from ...generation.drafter import DRAFTERS
from ...modeling import DeepSeekMTP, EvaByteForMTPC, EvaByteTokenizer
from ...modeling.common.draft_vocabulary import frequent_tokens
from ...modeling.heads.losses import IGNORE
from ..batches import Inputs, is_row_wise, taken_columns
from ..columns import PER_TOKEN, template_options
from ..endpoint import Endpoint
from ..features import STATES, FeatureDataset, ServerStates, cache_features
from ..loading import (
    base_of,
    has_adapters,
    load_backbone,
    load_config,
    load_drafter,
    tokenizer_source,
    trained_backbone,
)
from ..preparation import set_loss_options
from ..ptp.losses import PTPOptions
from ..regeneration import regenerate
from ..utils import needs_extra
from .data import load_data
from .settings import KINDS, ApartArguments, DrafterArguments, Settings, filled

with needs_extra("train", "tokenahead train"):
    from datasets import Dataset
    from trl.data_utils import maybe_convert_to_chatml
    from trl.trainer.utils import get_quantization_config

_PROMPT_TOKENS = 32
_OF_STORED = {"aux_layers", "feature_layers", "sample_from_anchor", "block_size", "ignore_fields"}
"""Options of a drafter that exists."""


@dataclass(frozen=True)
class Trainee:
    """What a run trains: a model that contains its drafter, or a drafter that is attached to its backbone."""

    model: Any
    backbone: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def build(settings: Settings) -> Trainee:
    """Load the backbone, and load or make what drafts for it."""
    arguments, source = settings.drafter, settings.model.model_name_or_path
    if not source:
        raise ValueError("model_name_or_path is missing: a directory, or a name on the Hub")
    if has_adapters(source):
        raise ValueError(f"model_name_or_path={source} holds adapters of peft: merge them, and name the merged model")
    model = settings.model
    options: Kwargs = {"dtype": model.dtype or "float32"}
    if model.model_revision:
        options["revision"] = model.model_revision
    if model.attn_implementation:
        options["attn_implementation"] = model.attn_implementation
    if settings.training.trust_remote_code:
        options["trust_remote_code"] = True
    if quantization := get_quantization_config(model):
        options |= {"quantization_config": quantization, "device_map": {"": settings.training.device}}
    with_modules = arguments.kind in ("own", "modules")
    load = partial(load_backbone, option="model_name_or_path", of_drafters="drafter", with_modules=with_modules)
    prepares = arguments.regenerate or (arguments.features and not arguments.features_engine)  # on whole backbones
    is_divided = isinstance(arguments, ApartArguments) and arguments.training_strategy().shard_backbone and not prepares
    backbone = load_sharded(source, load, **options) if is_divided else load(source, **options)
    tokenizer = _tokenizer(source, backbone)
    try:
        drafter = _drafter(arguments, backbone)
        _apply_loss_options(drafter, arguments)
        _upcast_trainable(drafter, settings.training)
    except TypeError as error:  # an option that from_backbone does not know
        raise ValueError(f"drafter_options: {error}") from None
    return Trainee(drafter, drafter.policy, tokenizer)


def _upcast_trainable(drafter: PreTrainedModel, training: TrainingArguments) -> None:
    """Let what learns beside a backbone of fewer bits have float32 weights, under autocast.

    Around 0.03, numbers in bfloat16 lie 1.2e-4 apart: weights there do not follow steps of 5e-5.
    """
    if drafter.dtype.itemsize >= torch.float32.itemsize:
        return
    for part in learning_parts(drafter):
        part.to(torch.float32)
        if not training.fp16:
            training.bf16, training.mixed_precision = True, "bf16"


def learning_parts(model: Any) -> list[torch.nn.Module]:
    """Return what learns in a dtype of its own; nothing where that are adapters of peft, which have float32 anyway."""
    return [part for part in model.parts().values() if part is not model.get_output_embeddings()]


def _tokenizer(source: str, backbone: PreTrainedModel) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(tokenizer_source(source))
    except (OSError, ValueError):
        if isinstance(backbone, EvaByteForMTPC):
            return EvaByteTokenizer()  # bytes are bytes, also where a directory has none
        raise


def _drafter(arguments: DrafterArguments, backbone: Any) -> Any:
    """Return the model to train."""
    options = _drafter_options(arguments)
    if arguments.source is not None:
        return _stored(arguments, arguments.source, backbone, options)
    is_own = arguments.kind == "own" or isinstance(backbone, DeepSeekMTP)
    if is_own and not isinstance(backbone, MTPGenerationMixin):
        raise ValueError(f"drafter: {type(backbone).__name__} has none of its own; choose of {', '.join(KINDS)}")
    if not is_own:
        return DRAFTERS[arguments.kind].from_backbone(backbone, **options)
    if options and backbone.head_config is None:
        raise ValueError(f"drafter_options={options}: the {type(backbone).__name__} exists already; leave them out")
    if options:
        untyped(backbone).set_head(**options)
    return backbone


def _drafter_options(arguments: DrafterArguments) -> Kwargs:
    """Return the options of a new drafter."""
    options = arguments.options("drafter_options")
    for name in ("draft_ids", "draft_vocabulary"):
        if isinstance(file := options.get(name), str):
            options[name] = json.loads(Path(file).read_text(encoding="utf-8"))
    return options


def _stored(arguments: DrafterArguments, name: str, backbone: PreTrainedModel, options: Kwargs) -> Any:
    kind = None if arguments.kind == "auto" else arguments.kind
    if odd := options.keys() - _OF_STORED:
        raise ValueError(f"drafter_options: {odd.pop()} is for a new drafter; {name} takes {sorted(_OF_STORED)}")
    drafter = load_drafter(name, backbone, "drafter", kind, **options)
    if not drafter.is_apart or is_parallel(drafter):
        raise ValueError(f"drafter={arguments.drafter!r} holds a {type(drafter).__name__}: it is no drafter apart")
    return drafter


def _apply_loss_options(model: Any, arguments: DrafterArguments) -> None:
    """Set the loss options of a drafter; the backbone of a PTP model learns if `base_weight` is above 0."""
    options = arguments.options("loss_options")
    if is_parallel(model):
        model.train_only("all" if ptp_options(arguments).base_weight else "drafter")
    elif options:
        values = filled("loss_options", options, type(model.loss_options))
        set_loss_options(model, {name: getattr(values, name) for name in options})


def ptp_options(arguments: DrafterArguments) -> PTPOptions:
    """Return the options of `PTPTrainer`."""
    return filled("loss_options", arguments.options("loss_options"), PTPOptions)


def is_parallel(model: PreTrainedModel) -> bool:
    """Return whether `PTPTrainer` trains it."""
    return isinstance(model.config, PTPConfig)


def with_moved_backbone(settings: Settings) -> Settings:
    """Return the settings with the backbone that learned together with the heads of `drafter`, if any.

    `model_name_or_path` may name that backbone, or the one that it was trained from, or nothing. Adapters are put on
    any backbone that is named, for a directory may have been moved.
    """
    heads, name = settings.drafter.source, settings.model.model_name_or_path
    trained = trained_backbone(heads) if heads else None
    if heads is None or trained is None:
        return settings
    is_other, adapters = name is not None and not _is_same(name, trained), None
    if has_adapters(trained):
        name, adapters = name if is_other else base_of(trained), str(trained)
    elif not is_other or _is_same(name, load_config(heads, "drafter").base_model_name_or_path):
        name = str(trained)
    return replace(settings, model=replace(settings.model, model_name_or_path=name), adapters=adapters)


def note_backbone(trainee: Trainee, requested: Settings, settings: Settings) -> None:
    """Record in a drafter that continues which backbone it now has, as in a new one."""
    if not trainee.model.is_apart or settings.drafter.source is None:
        return
    is_frozen = settings.drafter.training_strategy().train == "drafter"
    if is_frozen and settings.adapters is not None:
        raise ValueError(
            f"drafter={settings.drafter.drafter} learned with the adapters of {settings.adapters}, which heads alone "
            "would not save: set strategy: {train: lora}, or merge them into the backbone"
        )
    # a backbone that learns is saved with the heads, and comes from the requested one
    name = (settings if is_frozen else requested).model.model_name_or_path
    trainee.model.config.base_model_name_or_path = name or trainee.model.config.base_model_name_or_path


def _is_same(name: str | None, other: str | Path | None) -> bool:
    return name is not None and other is not None and Path(name).resolve() == Path(other).resolve()


def draft_frequent_tokens(trainer: Trainer, trainee: Trainee, settings: Settings) -> None:
    """Let a new drafter with `draft_vocab_size`, but no `draft_ids`, draft the most frequent tokens of what is scored.

    It is begun anew over these, in place, for its first weights may be rows of the backbone's unembedding.
    """
    options, rows = _drafter_options(settings.drafter), trainer.train_dataset
    size = options.get("draft_vocab_size")
    if size is None or "draft_ids" in options or not trainee.model.is_apart:
        return
    if not isinstance(rows, Dataset):
        raise ValueError(f"draft_vocab_size={size}: a stream has no most frequent tokens, name them with draft_ids")
    batches = _Collated(rows, trainer.data_collator)
    scored = (batch["input_ids"][batch["labels"] != IGNORE].tolist() for batch in batches)
    ids = frequent_tokens(scored, size, trainee.tokenizer).tolist()
    unused = sorted({*range(trainee.backbone.config.get_text_config().vocab_size)} - {*ids})
    options["draft_ids"] = ids + unused[: size - len(ids)]
    anew = type(trainee.model).from_backbone(trainee.backbone, **options).detach()
    trainee.model.load_state_dict(anew.state_dict())
    trainee.model.attach(trainee.backbone)  # again the one that drafts by default


def store_features(trainer: Trainer, settings: Settings) -> None:
    """Write the states that the drafter learns from, or the missing ones, and replace the data with them."""
    directory, rows = settings.drafter.features, trainer.train_dataset
    if directory is None:
        return
    if not isinstance(rows, Dataset):
        raise ValueError(f"features={directory} holds all rows at once, and a stream has no end: set streaming: false")
    data = _Collated(rows, trainer.data_collator)
    drafter, engine = untyped(trainer.model), settings.drafter.options("features_engine")
    folder = engine.pop("folder", None)
    source = ServerStates(_endpoint(engine), drafter, data, folder=folder) if engine else None
    trainer.train_dataset = cache_features(drafter, data, directory, source=source)
    trainer.data_collator = _Either(trainer.data_collator)
    trainer.args.remove_unused_columns = False  # TRL's list of columns knows no states


class _Collated(Sequence):
    """Rows as the trainer's collator makes them, one by one: with labels, and with positions where they are packed."""

    def __init__(self, rows: Dataset, collator: DataCollator) -> None:
        self.rows, self.collator = rows, collator

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        batch = self.collator([self.rows[number]])
        return {name: values[0] for name, values in batch.items() if name in PER_TOKEN}  # others follow from positions


@dataclass(frozen=True)
class _Either:
    """Collates rows with stored states, and rows without, as in evaluation; a class, for workers pickle it."""

    collator: DataCollator

    @property
    def takes(self) -> frozenset[str]:
        return PER_TOKEN.union(taken_columns(self.collator) or ())

    @property
    def is_row_wise(self) -> bool:
        return is_row_wise(self.collator)

    def __call__(self, rows: list[Inputs]) -> dict[str, torch.Tensor]:
        return (FeatureDataset.collate if STATES in rows[0] else self.collator)(rows)


def with_own_text(settings: Settings, trainee: Trainee) -> Settings:
    """Return settings whose data are the backbone's completions of the beginnings of the rows (`regenerate`).

    The beginning of a chat is all before the last answer, of a row with a `prompt` that prompt, and of other rows the
    first `prompt_tokens` ids.
    """
    options = settings.drafter.options("regenerate")
    if not options:
        return settings
    directory, count = options.pop("folder", None), options.pop("prompt_tokens", _PROMPT_TOKENS)
    vocab_size = trainee.backbone.config.get_text_config().vocab_size
    rows = load_data(settings, False)["train"]
    if not isinstance(directory, str) or not isinstance(rows, Dataset):
        raise ValueError(f"regenerate={settings.drafter.regenerate} needs folder=, and all rows: no stream")
    column = settings.training.dataset_text_field
    prompts = [_beginning(dict(row), trainee.tokenizer, column, count) for row in rows]
    engine = options.pop("engine", "transformers")
    writer = trainee.backbone if engine == "transformers" else _endpoint(engine, trainee.tokenizer, vocab_size)
    regenerate(writer, prompts, directory, **options)
    data = replace(settings.data, dataset_name=directory, dataset_config=None, dataset_train_split="train")
    return replace(settings, data=data, mixture=replace(settings.mixture, datasets=[]))


def _endpoint(engine: Any, tokenizer: PreTrainedTokenizerBase | None = None, vocab_size: int | None = None) -> Endpoint:
    """Return the server of `engine`: its address, or fields of `Endpoint`."""
    given: Kwargs = engine if isinstance(engine, dict) else {"url": engine}
    options: Kwargs = {"vocab_size": vocab_size, "tokenizer": tokenizer} | given
    try:
        return Endpoint(**options)
    except TypeError as error:
        raise ValueError(f"engine={engine!r}: {error}") from None


def _beginning(row: Inputs, tokenizer: PreTrainedTokenizerBase, column: str, count: int) -> Any:
    row = maybe_convert_to_chatml(row)
    if turns := row.get("messages") or (row.get("prompt") if isinstance(row.get("prompt"), list) else None):
        answers = [index for index, turn in enumerate(turns) if turn.get("role") == "assistant"]
        before = turns[: answers[-1]] if answers and "messages" in row else turns
        options = template_options(row)
        return tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False, **options)
    if "prompt" in row:
        return tokenizer(row["prompt"])["input_ids"]
    return (row["input_ids"] if "input_ids" in row else tokenizer(row[column])["input_ids"])[:count]
