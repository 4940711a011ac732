"""Models and drafters from a directory or the Hub, with the adapters or the backbone that learned with them."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import is_offline_mode, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..configuration.mtp_families import REFUSED, count_modules, dspark_block_size
from ..generation.backbone.wrapped_models import carries_adapters
from ..generation.drafter import DRAFTERS
from ..generation.tensors.saving import finish, reads_whole
from ..generation.tensors.tensor_files import check_index, hub_options
from ..modeling import DeepSeekMTP
from ..modeling.common.loading import drafter_class, holds_drafter_alone, read_drafter
from ..modeling.evabyte.tokenizer import EvaByteTokenizer
from ..modeling.heads.joint import BACKBONE

_ADAPTERS, _CONFIG = "adapter_config.json", "config.json"
_BESIDE = ["*.json", "*.jinja", "*.model", "*.txt"]  # of the heads and the tokenizer
"""The files of a backbone that was trained with heads: its directory, and the tokenizer of the heads."""


def load_model(source: str, dtype: str = "auto", device: Any = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a causal language model with the modules and adapters of its directory, and its tokenizer."""
    base = base_of(source) if has_adapters(source) else source
    model = load_backbone(base, "--model", "--heads", dtype=dtype)
    if base != source:
        put_adapters(model, source)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), AutoTokenizer.from_pretrained(tokenizer_source(base))


@reads_whole
def load_backbone(
    source: str, option: str, of_drafters: str, with_modules: bool = True, **options: Any
) -> PreTrainedModel:
    """Return a causal language model, if asked for with the modules of its checkpoint; no drafter without a backbone.

    Messages name it by `option`, and a drafter by `of_drafters`.
    """
    hub = hub_options(options)
    if _may_exist(source) and holds_drafter_alone(source, **hub):
        raise ValueError(f"{option}={source} holds a drafter without a backbone: name it as {of_drafters}")
    config = load_config(source, option)
    check_index(source, **hub)
    return (causal_class(config) if with_modules else AutoModelForCausalLM).from_pretrained(source, **options)


def load_drafter(
    source: str,
    backbone: PreTrainedModel,
    option: str,
    kind: str | None = None,
    shared: bool = False,
    **options: Any,
) -> Any:
    """Return a drafter, in any layout, attached to its backbone, which gets the adapters that it learned with.

    Another backbone than it learned with is refused, and, where it is `shared`, adapters that it would get. Messages
    name the drafter by `option`; `options` are those of `read_drafter`, and `kind` is a name in `DRAFTERS`.
    """
    found = drafter_class(source) if _may_exist(source) else None
    if found is None or not (kind is None or issubclass(found, DRAFTERS[kind])):
        words = found.__name__ if found else load_config(source, option).model_type
        raise ValueError(f"{option} {source} holds {words!r} and no drafter of this kind")
    trained, name = trained_backbone(source), str(backbone.name_or_path)
    if trained is not None and has_adapters(trained) and not carries_adapters(backbone):
        if shared:
            raise ValueError(f"{source} learned with adapters of the backbone: name {trained} as --model")
        put_adapters(backbone, trained)
    elif trained is not None and not has_adapters(trained) and trained.resolve() != Path(name).resolve():
        raise ValueError(f"--model {name}: the backbone of {source} learned with these heads; name {trained} instead")
    drafter: Any = read_drafter(source, backbone.dtype, backbone, **options)
    return drafter.to(backbone.device).eval().attach(backbone)


def _may_exist(source: str | PathLike) -> bool:
    return finish(source).is_dir() or is_hub_name(source)


def load_config(source: str, option: str) -> PreTrainedConfig:
    """Return the configuration of a directory or of a name on the Hub; an OSError where there is none."""
    if not _may_exist(source):
        raise FileNotFoundError(f"{option} {source}: no such directory")
    try:
        return AutoConfig.from_pretrained(source)
    except OSError as error:
        reason = "HF_HUB_OFFLINE is set, and the cache does not hold it" if is_offline_mode() else error
        raise OSError(f"{option} {source}: no such directory, and the Hub did not give it: {reason}") from error


def causal_class(config: PreTrainedConfig) -> type[DeepSeekMTP] | type[AutoModelForCausalLM]:
    """Return the class that loads a causal language model with the modules that its checkpoint has."""
    is_plain = config.model_type in REFUSED or dspark_block_size(config.to_dict()) or not count_modules(config)
    return AutoModelForCausalLM if is_plain else DeepSeekMTP


def unit_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what a token is: `"byte"` or `"token"`."""
    return "byte" if isinstance(tokenizer, EvaByteTokenizer) else "token"


def has_adapters(directory: str | PathLike) -> bool:
    """Return whether a directory holds adapters of peft, and not the model that they belong to."""
    return (finish(directory) / _ADAPTERS).is_file() and not holds_model(directory)


def holds_model(directory: str | PathLike) -> bool:
    """Return whether a directory holds a whole model or drafter."""
    return (finish(directory) / _CONFIG).is_file()


def base_of(adapters: str | PathLike) -> str:
    """Return the model that a directory of adapters names; refuse a directory that names none."""
    fields = json.loads((Path(adapters) / _ADAPTERS).read_text(encoding="utf-8"))
    if not (name := fields.get("base_model_name_or_path")):
        raise ValueError(f"{adapters} holds adapters that do not say for which model they were trained")
    return name


def put_adapters(model: PreTrainedModel, directory: str | PathLike) -> None:
    """Load adapters, which can be trained, into a model; refuse those of which only some tensors happen to fit."""
    is_training = model.training
    try:
        result = model.load_adapter(str(directory), is_trainable=True)
        odd = [*result.missing_keys, *result.unexpected_keys, *(key for key, *_ in result.mismatched_keys)]
        if odd:
            raise ValueError(f"only one of them has {min(odd)}")
    except (RuntimeError, ValueError) as error:
        name = type(model).__name__
        raise ValueError(f"{directory} holds adapters that do not fit this {name}: {error}") from error
    model.train(is_training)  # new modules are in training mode, with dropout


def trained_backbone(heads: str | PathLike) -> Path | None:
    """Return the directory of the backbone that was trained with heads, or of its adapters; None: it was frozen.

    Of heads on the Hub it is downloaded, with small files of theirs.
    """
    directory = Path(heads)
    if not directory.is_dir() and is_hub_name(heads):
        try:
            name, ignored = str(heads), "*checkpoint*/*"
            directory = Path(snapshot_download(name, allow_patterns=f"{BACKBONE}/*", ignore_patterns=ignored))
            if (directory / BACKBONE).is_dir():
                snapshot_download(name, allow_patterns=_BESIDE, ignore_patterns=ignored)
        except LocalEntryNotFoundError:  # neither the Hub nor an entry in the cache
            return None
    directory /= BACKBONE
    return directory if has_adapters(directory) or holds_model(directory) else None


def is_hub_name(name: str | PathLike) -> bool:
    """Return whether a string may be the name of a model on the Hub: `owner/name`."""
    return str(name).count("/") == 1 and not str(name).startswith((".", "/", "~"))


def tokenizer_source(model: str) -> str:
    """Return the directory of a model's tokenizer: that of the heads for a backbone that was trained with heads."""
    path = Path(model)
    is_apart = path.name == BACKBONE and holds_model(path.parent) and not (path / "tokenizer_config.json").exists()
    return str(path.parent) if is_apart else model
