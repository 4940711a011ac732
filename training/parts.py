"""What a training leaves in parts: adapters of peft, and the backbone that learned together with heads apart."""

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
"""What is fetched of a backbone that learned with heads: its directory, and the tokenizer beside it."""


def has_adapters(folder: str | PathLike) -> bool:
    """Whether a directory holds adapters of peft, and not the model that they belong to."""
    return (Path(folder) / _ADAPTERS).is_file() and not holds_model(folder)


def holds_model(folder: str | PathLike) -> bool:
    """Whether a directory holds a whole model or drafter."""
    return (Path(folder) / "config.json").is_file()


def base_of(adapters: str | PathLike) -> str:
    """The model that adapters were trained for, as their directory names it.

    Raises:
        ValueError: A directory that names none.
    """
    name = named_base(adapters)
    if not name:
        raise ValueError(f"{adapters} holds adapters that do not say for which model they were trained")
    return name


def named_base(adapters: str | PathLike) -> str | None:
    """The model that a directory of adapters names, if any."""
    return json.loads((Path(adapters) / _ADAPTERS).read_text(encoding="utf-8")).get("base_model_name_or_path")


def put_adapters(model: PreTrainedModel, folder: str | PathLike) -> None:
    """Puts adapters into a model, which keeps its class and what is attached to it; they can learn on.

    Args:
        model: The model that they were trained for; changed in place.
        folder: What the `save_pretrained` of peft wrote, with `modules_to_save`.

    Raises:
        ValueError: Adapters of another model, of which peft would leave out what does not fit.
    """
    is_training = model.training
    try:
        found = model.load_adapter(str(folder), is_trainable=True)
    except (RuntimeError, ValueError) as error:
        raise ValueError(_misfit(model, folder, str(error))) from error
    model.train(is_training)  # new parts come in training mode, and would drop out
    if odd := sorted({*found.missing_keys, *found.unexpected_keys, *(key for key, *_ in found.mismatched_keys)}):
        raise ValueError(_misfit(model, folder, f"only one of them has {odd[0]}"))


def _misfit(model: PreTrainedModel, folder: str | PathLike, reason: str) -> str:
    return (
        f"{folder} holds adapters that do not fit this {type(model).__name__}: {reason}; where the training made new "
        "parts, evaluate them with its CONFIG.yaml"
    )


def trained_backbone(heads: str | PathLike) -> Path | None:
    """The directory of the backbone that learned together with heads, or of its adapters; None: it stayed as it was.

    Args:
        heads: Directory of the heads, or their name on the Hub, from where what is found is fetched.
    """
    if not Path(heads).is_dir() and is_hub_name(heads):
        return _trained_on_hub(str(heads))
    folder = Path(heads) / BACKBONE
    return folder if has_adapters(folder) or holds_model(folder) else None


def is_hub_name(name: str | PathLike) -> bool:
    """Whether something may be the name of a model on the Hub: `owner/name`."""
    return str(name).count("/") == 1 and not str(name).startswith((".", "/", "~"))


def _trained_on_hub(name: str) -> Path | None:
    """Asks for two small files, and fetches the rest only where one of them is there."""
    for file in (_ADAPTERS, "config.json"):
        try:
            hf_hub_download(name, f"{BACKBONE}/{file}")
        except EntryNotFoundError:  # also where the Hub cannot be asked and the cache does not know
            continue
        return Path(snapshot_download(name, allow_patterns=_OF_BACKBONE, ignore_patterns="*checkpoint*/*")) / BACKBONE
    return None


def adapters_for(heads: str | PathLike, model: str, option: str) -> Path | None:
    """The adapters that a named backbone needs to be the one that heads learned with.

    Args:
        heads: Directory of the heads, or their name on the Hub.
        model: The backbone that was named.
        option: The name of the setting that names it.

    Raises:
        ValueError: Heads whose whole backbone learned with them, where another one is named.
    """
    folder = trained_backbone(heads)
    if folder is None or folder.resolve() == Path(model).resolve():
        return None
    if not has_adapters(folder):
        raise ValueError(f"{option} {model}: the backbone of {heads} learned with these heads; name {folder} instead")
    return folder


def tokenizer_source(model: str) -> str:
    """Where the tokenizer of a model lies: a backbone that learned with heads has it in the directory of the heads."""
    folder = Path(model)
    is_apart = (
        folder.name == BACKBONE and holds_model(folder.parent) and not (folder / "tokenizer_config.json").exists()
    )
    return str(folder.parent) if is_apart else model
