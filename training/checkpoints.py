"""Checkpoints of a run (complete? finished? of which model?) and models saved in parts: adapters, joint backbones."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedConfig, PreTrainedModel

from ..configuration import MTPHeadConfig
from ..modeling.heads.joint import BACKBONE
from .utils import replace_text

_STATE = "trainer_state.json"
_SUMS = "checksums.json"
"""The file of a checkpoint that is written last, with the checksums of all others."""
_LATE_FILES = ("optimizer.pt", "scheduler.pt", _SUMS)
_OF_BACKBONES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_nextn_predict_layers")
_OF_DRAFTERS = ("version", "draft_vocab_size", "variant", "sampler", "features", "num_slots", "lora_rank")


def last_whole_checkpoint(folder: str | PathLike) -> str | None:
    """Return the latest checkpoint that a run can resume from; None if there is none.

    Warns of later ones with a file that is missing or damaged.
    """
    numbers = {each: _number(each) for each in Path(folder).glob("checkpoint-*") if each.is_dir()}
    found = sorted((number, each) for each, number in numbers.items() if number is not None)
    for _, checkpoint in reversed(found):
        fault = fault_of(checkpoint)
        if fault is None:
            return str(checkpoint)
        warnings.warn(f"{checkpoint} is passed over: {fault}", stacklevel=2)
    return None


def fault_of(checkpoint: Path) -> str | None:
    """Return which file of a checkpoint is missing or damaged, by the checksums beside it and the others of its run."""
    if not _state(checkpoint):
        return f"{_STATE} is missing or damaged"
    for name in _LATE_FILES:
        if not (checkpoint / name).exists() and any(checkpoint.parent.glob(f"checkpoint-*/{name}")):
            return f"{name} is missing"
    try:
        known = json.loads((checkpoint / _SUMS).read_text(encoding="utf-8"))
    except FileNotFoundError:  # of a run that wrote none
        return None
    except ValueError:
        return f"{_SUMS} is damaged"
    found = _checksums(checkpoint)
    return next((f"{name} is damaged" for name, digest in known.items() if found.get(name) != digest), None)


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of all files of a checkpoint beside them."""
    replace_text(checkpoint / _SUMS, json.dumps(_checksums(checkpoint), indent=1) + "\n")


def _checksums(folder: Path) -> dict[str, str]:
    found = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _SUMS):
        digest = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(2**20):
                digest.update(chunk)
        found[file.relative_to(folder).as_posix()] = digest.hexdigest()
    return found


def is_finished(checkpoint: str | PathLike | None, max_steps: int) -> bool:
    """Return whether all steps are done, with a warning. `Trainer` would do one more each time that it is resumed."""
    if checkpoint is None or max_steps < 1 or _state(Path(checkpoint)).get("global_step", 0) < max_steps:
        return False
    warnings.warn(f"{checkpoint} has done all of max_steps={max_steps}: nothing is left to train", stacklevel=2)
    return True


def best_or_last(checkpoint: str | PathLike, wants_best: bool) -> str:
    """Return the checkpoint whose weights a finished training ends with."""
    best = _state(Path(checkpoint)).get("best_model_checkpoint") if wants_best else None
    return best if best and Path(best).is_dir() else str(checkpoint)


def _number(checkpoint: Path) -> int | None:
    digits = checkpoint.name.removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() else None


def _state(checkpoint: Path) -> dict[str, Any]:
    """Return the state that `Trainer` wrote; empty if the file is missing or incomplete."""
    try:
        return json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def check_checkpoint(folder: str | Path, model: PreTrainedModel) -> None:
    """Refuse a checkpoint of another model or head, of which `Trainer` would load what happens to fit.

    Args:
        folder: The checkpoint. One without a config, of adapters or shards, is left to its loader.
        model: The model to resume, without what distribution wraps around it.

    Raises:
        ValueError: Another kind of model or head, or other sizes.
    """
    file, config = Path(folder) / "config.json", model.config
    if not file.is_file() or hasattr(model, "peft_config"):
        return
    model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    if model_type != config.model_type:
        raise ValueError(_differs(folder, "model_type", model_type, config.model_type))
    for name, theirs, ours in _shapes(type(config).from_pretrained(folder), config):
        if theirs != ours:
            raise ValueError(_differs(folder, name, theirs, ours))


def _shapes(earlier: PreTrainedConfig, config: PreTrainedConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield what decides which parameters there are: names, and the values of both."""
    before, now = (getattr(each, "mtp_head", each) for each in (earlier, config))
    if isinstance(before, MTPHeadConfig) and isinstance(now, MTPHeadConfig):
        for name in ("head_type", "leaf", "window", *now.family.shaping(), "draft_layers"):
            yield name, getattr(before, name, None), getattr(now, name, None)
    texts = earlier.get_text_config(), config.get_text_config()
    for names, (before, now) in ((_OF_BACKBONES, texts), (_OF_DRAFTERS, (earlier, config))):
        for name in names:
            if hasattr(before, name) and hasattr(now, name):
                yield name, getattr(before, name), getattr(now, name)


def _differs(folder: str | Path, name: str, theirs: Any, ours: Any) -> str:
    return f"the checkpoint {folder} has {name}={theirs!r}, and this model {name}={ours!r}: choose one of this model"


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
        "parts, make them first (set_head, from_backbone), and load the adapters with peft"
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

    Raises:
        ValueError: Heads whose whole backbone was trained with them, and another one is named.
    """
    folder = trained_backbone(heads)
    if folder is None or folder.resolve() == Path(model).resolve():
        return None
    if not has_adapters(folder):
        raise ValueError(f"{option} {model}: the backbone of {heads} learned with these heads; name {folder} instead")
    return folder


def tokenizer_source(model: str) -> str:
    """Return the directory of a model's tokenizer: that of the heads for a backbone that was trained with heads."""
    folder = Path(model)
    is_apart = (
        folder.name == BACKBONE and holds_model(folder.parent) and not (folder / "tokenizer_config.json").exists()
    )
    return str(folder.parent) if is_apart else model
