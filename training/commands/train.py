"""`tokenahead train`: from settings to a trained model in a run directory, with the facts, the settings and the log.

`tokenahead regenerate` and `tokenahead features` prepare what a training reads, alone, with its settings.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoTokenizer,
    DataCollator,
    EarlyStoppingCallback,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ... import __version__
from ...configuration import PTPConfig
from ...generation.attach import MTPGenerationMixin
from ...generation.backbone.wrapped_models import Kwargs, load_sharded
from ...generation.drafter import DRAFTERS
from ...generation.tensors.tensor_files import Fields
from ...modeling import DeepSeekMTP, EvaByteForMTPC, EvaByteTokenizer
from ...modeling.common.draft_vocabulary import frequent_tokens
from ...modeling.heads.joint import BACKBONE
from ...modeling.heads.losses import IGNORE
from .. import loading
from ..acceptance_callback import AcceptanceCallback
from ..batches import Inputs, is_row_wise, taken_columns
from ..checkpoints import last_whole_checkpoint, require_whole, steps_of
from ..columns import PER_TOKEN, read_rows, template_options
from ..endpoint import Endpoint
from ..features import STATES, FeatureDataset, ServerStates, cache_features
from ..loading import has_adapters
from ..parts import of_first
from ..ptp.losses import PTPOptions
from ..regeneration import RegeneratedText, holds_text, regenerate
from ..results import environment
from ..strategy import TrainingStrategy, set_loss_options
from ..trainer_base import BaseTrainer, without_peft
from ..trl_trainers import MTPSFTTrainer, PTPSFTTrainer
from ..utils import check_same, needs_extra, replace_file
from .settings import KINDS, ApartArguments, DrafterArguments, Settings, filled, read_settings

with needs_extra("train", "tokenahead train"):
    import yaml
    from datasets import Dataset, IterableDataset, load_dataset, load_from_disk
    from trl.data_utils import maybe_convert_to_chatml
    from trl.scripts.utils import get_dataset
    from trl.trainer.utils import get_peft_config, get_quantization_config

RUN = "run.json"
"""Versions, seeds, machine, facts of the model."""
CONFIG = "config.yaml"
"""The settings that the user gave, in the file and by flags, to run them again."""
METRICS = "metrics.json"
"""Every entry of the log."""
_OF_NO_CONSEQUENCE = {"output_dir", "resume_from_checkpoint", "logging_dir", "run_name"}
_SECRET = re.compile(r".*(token|api.?key)")  # of names
_FIGURES = 12  # of a printed line
_PACKAGES = ("accelerate", "datasets", "peft", "safetensors", "torch", "transformers", "trl")
_OF_STORED = {"aux_layers", "feature_layers", "sample_from_anchor", "block_size", "ignore_fields"}
"""Options of a drafter that exists."""
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}


@dataclass(frozen=True)
class Trainee:
    """What a run trains: a model that contains its drafter, or a drafter that is attached to its backbone."""

    model: Any
    backbone: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def build(settings: Settings) -> Trainee:
    """Load the backbone, and load or make what drafts for it."""
    arguments, model, source = settings.drafter, settings.model, settings.model.model_name_or_path
    if not source:
        raise ValueError("model_name_or_path is missing: a directory, or a name on the Hub")
    if has_adapters(source):
        raise ValueError(f"model_name_or_path={source} holds adapters of peft: merge them, and name the merged model")
    asked = {"revision": model.model_revision, "attn_implementation": model.attn_implementation}
    asked["trust_remote_code"] = settings.training.trust_remote_code
    options: Kwargs = {"dtype": model.dtype or "float32"} | {name: value for name, value in asked.items() if value}
    if quantization := get_quantization_config(model):
        options |= {"quantization_config": quantization, "device_map": {"": settings.training.device}}
    with_modules = arguments.kind in ("own", "modules")
    load = partial(loading.load_backbone, option="model_name_or_path", of_drafters="drafter", with_modules=with_modules)
    prepares = arguments.regenerate or (arguments.features and not arguments.features_engine)  # on whole backbones
    is_divided = isinstance(arguments, ApartArguments) and arguments.training_strategy().shard_backbone and not prepares
    backbone = load_sharded(source, load, **options) if is_divided else load(source, **options)
    try:
        tokenizer = AutoTokenizer.from_pretrained(loading.tokenizer_source(source))
    except (OSError, ValueError):
        if not isinstance(backbone, EvaByteForMTPC):
            raise
        tokenizer = EvaByteTokenizer()  # bytes are bytes, also where a directory has none
    try:
        drafter = _drafter(arguments, backbone)
    except TypeError as error:  # an option that from_backbone does not know
        raise ValueError(f"drafter_options: {error}") from None
    losses = arguments.options("loss_options")
    if is_parallel(drafter):  # whose backbone learns if `base_weight` is above 0
        drafter.train_only("all" if filled("loss_options", losses, PTPOptions).base_weight else "drafter")
    elif losses:
        values = filled("loss_options", losses, type(drafter.loss_options))
        set_loss_options(drafter, {name: getattr(values, name) for name in losses})
    if drafter.dtype.itemsize < torch.float32.itemsize:
        # around 0.03, numbers in bfloat16 lie 1.2e-4 apart: weights there do not follow steps of 5e-5
        for part in learning_parts(drafter):
            part.to(torch.float32)
            if not settings.training.fp16:
                settings.training.bf16, settings.training.mixed_precision = True, "bf16"
    return Trainee(drafter, drafter.policy, tokenizer)


def learning_parts(model: Any) -> list[torch.nn.Module]:
    """Return what learns in a dtype of its own; nothing where that are adapters of peft, which have float32 anyway."""
    return [part for part in model.parts().values() if part is not model.get_output_embeddings()]


def _drafter(arguments: DrafterArguments, backbone: Any) -> Any:
    """Return the model to train."""
    options, source = _drafter_options(arguments), arguments.source
    if source is not None:
        if odd := options.keys() - _OF_STORED:
            raise ValueError(f"drafter_options: {odd.pop()} is for a new drafter; {source} takes {sorted(_OF_STORED)}")
        kind = None if arguments.kind == "auto" else arguments.kind
        drafter = loading.load_drafter(source, backbone, "drafter", kind, **options)
        if not drafter.is_apart or is_parallel(drafter):
            raise ValueError(f"drafter={arguments.drafter!r} holds a {type(drafter).__name__}: it is no drafter apart")
        return drafter
    if arguments.kind != "own" and not isinstance(backbone, DeepSeekMTP):
        return DRAFTERS[arguments.kind].from_backbone(backbone, **options)
    if not isinstance(backbone, MTPGenerationMixin):
        raise ValueError(f"drafter: {type(backbone).__name__} has none of its own; choose of {', '.join(KINDS)}")
    if options and backbone.head_config is None:
        raise ValueError(f"drafter_options={options}: the {type(backbone).__name__} exists already; leave them out")
    if options:
        cast(Any, backbone).set_head(**options)
    return backbone


def _drafter_options(arguments: DrafterArguments) -> Kwargs:
    """Return the options of a new drafter."""
    options = arguments.options("drafter_options")
    for name in ("draft_ids", "draft_vocabulary"):
        if isinstance(file := options.get(name), str):
            options[name] = json.loads(Path(file).read_text(encoding="utf-8"))
    return options


def is_parallel(model: PreTrainedModel) -> bool:
    """Return whether `PTPTrainer` trains it."""
    return isinstance(model.config, PTPConfig)


def with_moved_backbone(settings: Settings) -> Settings:
    """Return the settings with the backbone that learned together with the heads of `drafter`, if any.

    `model_name_or_path` may name that backbone, or the one that it was trained from, or nothing. Adapters are put on
    any backbone that is named, for a directory may have been moved.
    """
    heads, name = settings.drafter.source, settings.model.model_name_or_path
    trained = loading.trained_backbone(heads) if heads else None
    if heads is None or trained is None:
        return settings
    adapters = str(trained) if has_adapters(trained) else None
    if name is None or _is_same(name, trained):
        name = loading.base_of(trained) if adapters else str(trained)
    elif not adapters and _is_same(name, loading.load_config(heads, "drafter").base_model_name_or_path):
        name = str(trained)
    return replace(settings, model=replace(settings.model, model_name_or_path=name), adapters=adapters)


def note_backbone(trainee: Trainee, requested: Settings, settings: Settings) -> None:
    """Record in a drafter that continues which backbone it now has, as in a new one."""
    if not trainee.model.is_apart or settings.drafter.source is None:
        return
    is_frozen = settings.drafter.training_strategy().train == "drafter"
    if is_frozen and settings.adapters is not None:
        raise ValueError(
            f"drafter={settings.drafter.drafter} learned with the adapters of {settings.adapters}: set strategy: "
            "{train: lora}, or merge them into the backbone"
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
        raise ValueError(f"features={directory} holds all rows at once: set streaming: false")
    data = _Collated(rows, trainer.data_collator)
    drafter, engine = cast(Any, trainer.model), settings.drafter.options("features_engine")
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


class _Either:
    """Collates rows with stored states, and rows without, as in evaluation; a class, for workers pickle it."""

    def __init__(self, collator: DataCollator) -> None:
        self.collator, self.is_row_wise = collator, is_row_wise(collator)
        self.takes = PER_TOKEN.union(taken_columns(collator) or ())

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
    directory, count = options.pop("folder", None), options.pop("prompt_tokens", 32)
    vocab_size = trainee.backbone.config.get_text_config().vocab_size
    rows = load_data(settings, False)["train"]
    if not isinstance(directory, str) or not isinstance(rows, Dataset):
        raise ValueError(f"regenerate={settings.drafter.regenerate} needs folder=, and all rows: no stream")
    column = settings.training.dataset_text_field
    prompts = [_beginning(dict(row), trainee.tokenizer, column, count) for row in rows]
    engine, served = options.pop("engine", "transformers"), {"tokenizer": trainee.tokenizer, "vocab_size": vocab_size}
    writer = trainee.backbone if engine == "transformers" else _endpoint(engine, **served)
    regenerate(writer, prompts, directory, **options)
    data = replace(settings.data, dataset_name=directory, dataset_config=None, dataset_train_split="train")
    return replace(settings, data=data, mixture=replace(settings.mixture, datasets=[]))


def _endpoint(engine: str | Kwargs, **options: Any) -> Endpoint:
    """Return the server of `engine`: its address, or fields of `Endpoint`."""
    given: Kwargs = engine if isinstance(engine, dict) else {"url": engine}
    try:
        return Endpoint(**options | given)
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


def main(argv: Sequence[str], command: str = "train") -> int:
    """Run the command; return 0 when the training is complete, or what it reads is written."""
    settings = read_settings(argv, command)
    if settings.training.disable_tqdm:
        logging.disable_progress_bar()
    if command == "train":
        train(settings)
    else:
        if getattr(settings.drafter, command) is None:
            raise ValueError(f"{command} is missing: tokenahead {command} writes what this setting of a training names")
        set_seed(settings.training.seed)
        trainee = build(settings)
        with_text = with_own_text(settings, trainee)
        if command == "features":
            trainer = make_trainer(with_text, trainee)
            draft_frequent_tokens(trainer, trainee, settings)
            store_features(trainer, settings)
    if torch.distributed.is_initialized():  # left to destructors, the threads of the group may abort a process
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


write_answers = partial(main, command="regenerate")
write_states = partial(main, command="features")


class _FewFigures(TrainerCallback):
    """Prints some of the figures of a line; trackers, and the trainer's log, have all of them."""

    def on_log(  # type: ignore[override]
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Fields, **kwargs: object
    ) -> None:
        names = [*logs] if len(logs) <= _FIGURES else [*logs][: _FIGURES - 1] + [*logs][-1:]
        super().on_log(args, state, control, logs={name: logs[name] for name in names}, **kwargs)


class _FewOfProgress(_FewFigures, ProgressCallback): ...


class _FewOfPrinter(_FewFigures, PrinterCallback): ...


def train(settings: Settings, callbacks: Sequence[TrainerCallback] = ()) -> Trainer:
    """Train with settings, write model, log and the facts of the run to `output_dir`, and return the trainer."""
    requested, directory, training = settings, settings.output, settings.training
    for source in (settings.model.model_name_or_path, settings.drafter.source):
        if source and Path(source).resolve() in (directory.resolve(), (directory / BACKBONE).resolve()):
            raise ValueError(f"output_dir={directory} would be written over {source}: choose another directory")
    set_seed(training.seed)
    try:  # settings that need no data are checked before the backbone writes any
        acceptance = AcceptanceCallback(**settings.drafter.options("acceptance"))
    except TypeError as error:
        raise ValueError(f"acceptance: {error}") from None
    measures = training.eval_strategy != "no" and settings.drafter.acceptance is not False
    patience = settings.drafter.early_stopping_patience
    own = [acceptance] * measures + ([] if patience is None else [EarlyStoppingCallback(patience)])
    settings = with_moved_backbone(requested)
    trainee = build(settings)
    note_backbone(trainee, requested, settings)
    resumed = of_first(lambda: checkpoint_to_resume(directory, training.resume_from_checkpoint))
    if resumed is None and (loading.holds_model(directory) or has_adapters(directory)):
        if not (directory / CONFIG).is_file():
            raise ValueError(f"output_dir={directory} holds a model that no run wrote: choose another directory")
        earlier = yaml.safe_load((directory / CONFIG).read_text(encoding="utf-8"))
        both = ({name: part[name] for name in {*part} - _OF_NO_CONSEQUENCE} for part in (earlier, given(requested)))
        check_same(f"output_dir={directory}", *both)
    settings = with_own_text(settings, trainee)
    trainer = make_trainer(settings, trainee, [*own, *callbacks])
    for printer, few in ((ProgressCallback, _FewOfProgress), (PrinterCallback, _FewOfPrinter)):
        if trainer.pop_callback(printer) is not None:
            trainer.add_callback(few)
    draft_frequent_tokens(trainer, trainee, settings)
    name, pushes = requested.data.dataset_name, training.push_to_hub
    data_names = [each.path for each in requested.mixture.datasets] if name is None else [name]
    if pushes:  # a value that no card may show is refused before the first step
        trainer.create_model_card(dataset=data_names)
    if trainer.is_world_process_zero():
        write_facts(trainer, trainee, requested, settings)
    try:
        if resumed is not None and 0 < training.max_steps <= steps_of(resumed):
            # `Trainer` would make a further step, and the model may not be saved yet
            require_whole(resumed)
            warnings.warn(f"{resumed} has done all of max_steps={training.max_steps}: nothing is left", stacklevel=2)
            trainer.state = TrainerState.load_from_json(str(Path(resumed) / TRAINER_STATE_NAME))
            best = trainer.state.best_model_checkpoint if training.load_best_model_at_end else None
            trainer._load_from_checkpoint(best or resumed)
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


def load_data(settings: Settings, with_evaluation: bool) -> dict[str, Dataset | IterableDataset]:
    """Return training data by `"train"`, and by `"eval"` those to evaluate on: a split, or a share of all rows.

    `dataset_name` is a file (JSON, JSON lines, Parquet, CSV, Arrow, or text with a row per line), a directory of such
    files, of `Dataset.save_to_disk` or of `regenerate` (whose completions alone are scored), or a name on the Hub;
    `datasets` is a mixture of them, as in TRL.
    """
    data: Any = _loaded(settings)
    names = {"train": settings.data.dataset_train_split}
    if with_evaluation:
        names["eval"] = settings.data.dataset_test_split
    if not isinstance(data, dict):
        data = {names["train"]: data}
    size, train = settings.mixture.test_split_size, data.get(names["train"])
    if with_evaluation and size is not None and names["eval"] not in data and isinstance(train, Dataset):
        parts = train.train_test_split(test_size=size, seed=settings.training.seed)
        data = {**data, names["train"]: parts["train"], names["eval"]: parts["test"]}
    for kind, name in names.items():
        if name not in data:
            raise ValueError(
                f"dataset_{kind.replace('eval', 'test')}_split={name!r}: the data have {', '.join(map(repr, data))}; "
                "name one of these, or set test_split_size (of no stream), or eval_strategy='no'"
            )
        if next(iter(data[name]), None) is None:
            raise ValueError(f"the {kind} data are empty")
    return {kind: read_rows(data[each], f"a row of the {kind} data", settings.training) for kind, each in names.items()}


def _loaded(settings: Settings) -> object:
    name, mixture = settings.data.dataset_name, settings.mixture
    streaming = settings.data.dataset_streaming or mixture.streaming
    if mixture.datasets:
        return get_dataset(replace(mixture, streaming=streaming, test_split_size=None))
    if name is None:
        raise ValueError("dataset_name is missing: a file, a directory or a name on the Hub; or `datasets`, a mixture")
    path = Path(name)
    if path.is_file() and path.suffix in _BUILDERS:
        return load_dataset(_BUILDERS[path.suffix], data_files={"train": name}, streaming=streaming)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return load_from_disk(name)
    if holds_text(path):
        return RegeneratedText(path).to_dataset()
    return load_dataset(name, settings.data.dataset_config, streaming=streaming)


def make_trainer(settings: Settings, trainee: Trainee, callbacks: Sequence[TrainerCallback] = ()) -> BaseTrainer:
    """Return the trainer of a run, with its data."""
    drafter, training = settings.drafter, settings.training
    data = load_data(settings, training.eval_strategy != "no")
    options: Fields = {
        "train_dataset": data["train"],
        "eval_dataset": data.get("eval"),
        "processing_class": trainee.tokenizer,
        "callbacks": [*callbacks],
        "tokens_per_batch": training.tokens_per_batch,
        "peft_config": get_peft_config(settings.model),
    }
    strategy = drafter.training_strategy()
    if not is_parallel(trainee.model):
        options["strategy"] = None if settings.model.use_peft else strategy
        return MTPSFTTrainer(trainee.model, training, **options)
    if strategy != TrainingStrategy(shard_backbone=strategy.shard_backbone):
        raise ValueError(f"strategy={drafter.strategy}: a PTPForCausalLM has loss_options and shard_backbone alone")
    options["options"] = filled("loss_options", drafter.options("loss_options"), PTPOptions)
    options["shard_backbone"] = strategy.shard_backbone
    return PTPSFTTrainer(trainee.model, training, **options)


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
    parts = settings.data, settings.mixture, settings.model, settings.drafter, settings.training
    values = {name: value for part in parts for name, value in vars(part).items() if name in settings.names}
    text = json.dumps(values, default=lambda each: vars(each) if is_dataclass(each) else str(each))
    return json.loads(text, object_pairs_hook=lambda pairs: {k: v for k, v in pairs if not _SECRET.fullmatch(k)})


def checkpoint_to_resume(directory: Path, option: str | None) -> str | None:
    """Return the checkpoint that a run continues from; None: it begins anew, also where a kill left no whole one."""
    if str(option).lower() == "true":
        return last_whole_checkpoint(directory)
    if option is not None and str(option).lower() not in ("false", "none"):
        return option
    if directory.is_dir() and (last := get_last_checkpoint(str(directory))):
        words = f"output_dir={directory} holds {Path(last).name} of an earlier run"
        raise ValueError(f"{words}: set resume_from_checkpoint=true, or choose another directory")
    return None
