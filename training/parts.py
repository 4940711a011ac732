"""Trained models that are saved in parts: adapters of peft, and a backbone that was trained together with heads."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel

from ..modeling.heads.joint import BACKBONE

_ADAPTERS = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_OF_BACKBONE = [f"{BACKBONE}/*", "*.json", "*.jinja", "*.model", "*.txt"]
"""The files of a backbone that was trained with heads: its directory, and the tokenizer of the heads."""


def has_adapters(folder: str | PathLike) -> bool:
    """Return whether a directory holds adapters of peft, and not the model that they belong to."""
    return (Path(folder) / _ADAPTERS).is_file() and not holds_model(folder)


def holds_model(folder: str | PathLike) -> bool:
    """Return whether a directory holds a whole model or drafter."""
    return (Path(folder) / "config.json").is_file()


def base_of(adapters: str | PathLike) -> str:
    """Return the model that adapters were trained for, as their directory names it.

    Raises:
        ValueError: A directory without the name of a model.
    """
    name = named_base(adapters)
    if not name:
        raise ValueError(f"{adapters} holds adapters that do not say for which model they were trained")
    return name


def named_base(adapters: str | PathLike) -> str | None:
    """Return the model that a directory of adapters names, if any."""
    return json.loads((Path(adapters) / _ADAPTERS).read_text(encoding="utf-8")).get("base_model_name_or_path")


def put_adapters(model: PreTrainedModel, folder: str | PathLike) -> None:
    """Load adapters into a model, which keeps its class and its attached drafter; they can be trained further.

    Args:
        model: The model that they were trained for; changed in place.
        folder: What the `save_pretrained` of peft wrote, with `modules_to_save`.

    Raises:
        ValueError: Adapters of another model, of which peft would skip what does not fit.
    """
    is_training = model.training
    try:
        found = model.load_adapter(str(folder), is_trainable=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(_misfit(model, folder, str(error))) from error
    model.train(is_training)  # new modules are in training mode, with dropout
    if odd := sorted({*found.missing_keys, *found.unexpected_keys, *(key for key, *_ in found.mismatched_keys)}):
        raise ValueError(_misfit(model, folder, f"only one of them has {odd[0]}"))


def _misfit(model: PreTrainedModel, folder: str | PathLike, reason: str) -> str:
    return (
        f"{folder} holds adapters that do not fit this {type(model).__name__}: {reason}; where the training made new "
        "parts, evaluate them with its CONFIG.yaml"
    )


def trained_backbone(heads: str | PathLike) -> Path | None:
    """Return the directory of the backbone that was trained with heads, or of its adapters; None: it was frozen.

    Args:
        heads: Directory of the heads, or their name on the Hub, from where files are downloaded.
    """
    if not Path(heads).is_dir() and is_hub_name(heads):
        return _trained_on_hub(str(heads))
    folder = Path(heads) / BACKBONE
    return folder if has_adapters(folder) or holds_model(folder) else None


def is_hub_name(name: str | PathLike) -> bool:
    """Return whether a string may be the name of a model on the Hub: `owner/name`."""
    return str(name).count("/") == 1 and not str(name).startswith((".", "/", "~"))


def _trained_on_hub(name: str) -> Path | None:
    """Ask for two small files, and download the rest only if one of them exists."""
    for file in (_ADAPTERS, "config.json"):
        try:
            hf_hub_download(name, f"{BACKBONE}/{file}")
        except EntryNotFoundError:  # also where the Hub cannot be asked and the cache does not know
            continue
        return Path(snapshot_download(name, allow_patterns=_OF_BACKBONE, ignore_patterns="*checkpoint*/*")) / BACKBONE
    return None


def adapters_for(heads: str | PathLike, model: str, option: str) -> Path | None:
    """Return the adapters that turn a named backbone into the one that heads were trained with.

    Args:
        heads: Directory of the heads, or their name on the Hub.
        model: The named backbone.
        option: The name of the setting with this name.

    Raises:
        ValueError: Heads whose whole backbone was trained with them, and another one is named.
    """
    folder = trained_backbone(heads)
    if folder is None or folder.resolve() == Path(model).resolve():
        return None
    if not has_adapters(folder):
        raise ValueError(
            f"{option} {model}: the backbone of {heads} was trained with these heads; name {folder} instead"
        )
    return folder


def tokenizer_source(model: str) -> str:
    """Return the directory of a model's tokenizer: that of the heads for a backbone that was trained with heads."""
    folder = Path(model)
    is_apart = (
        folder.name == BACKBONE and holds_model(folder.parent) and not (folder / "tokenizer_config.json").exists()
    )
    return str(folder.parent) if is_apart else model
