"""What every push needs: a token, a network, a repository that holds this model or none, and files without local paths.

Uploads nothing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME, logging

from ..configuration import EagleHeadConfig
from ..modeling.eagle.export import folder_config
from ..training.utils import replace_text
from .card import check_no_local_path
from .facts import hub_id

logger = logging.get_logger(__name__)
_NAMES = {"base_model_name_or_path", "_name_or_path", "name_or_path", "best_model_checkpoint"}
"""Fields that hold the name of a model or its directory, in config.json of any layout and in files of peft and
Trainer."""
_FILES = {"config.json", "adapter_config.json", "tokenizer_config.json", "trainer_state.json"}
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".msgpack", ".h5", ".onnx")
_TELLING = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields by which two models are told apart; retraining changes none of them."""


def check_token(token: str | bool | None) -> None:
    """Refuse a push that no token allows, before anything is saved.

    Raises:
        ValueError: No token.
    """
    if token is False or (not isinstance(token, str) and not get_token()):
        raise ValueError(
            "there is no access token of the Hub to push with: run `hf auth login`, set HF_TOKEN, or pass token=..."
        )


@contextmanager
def reachable(repo_id: str) -> Iterator[None]:
    """Raise a clear error where the network fails.

    Raises:
        ConnectionError: No answer, or `HF_HUB_OFFLINE`.
    """
    try:
        yield
    except Exception as error:
        # by name: which HTTP library there is depends on the version of huggingface_hub
        if not {"TransportError", "ConnectionError"} & {kind.__name__ for kind in type(error).__mro__}:
            raise
        raise ConnectionError(
            f"the Hub ({constants.ENDPOINT}) cannot be reached, and nothing was changed in {repo_id!r}: {error}"
        ) from error


def check_same_model(api: HfApi, repo_id: str, model: PreTrainedModel) -> None:
    """Refuse a repository that holds something else than an earlier state of this model.

    Args:
        api: With the token.
        repo_id: The repository, which exists.
        model: What is to be pushed.

    Raises:
        ValueError: Another architecture or other sizes there, or weights that no config.json describes.
    """
    files = api.list_repo_files(repo_id)
    if CONFIG_NAME in files:
        theirs = json.loads(Path(api.hf_hub_download(repo_id, CONFIG_NAME)).read_text(encoding="utf-8"))
        different = _difference(_own_fields(model), theirs)
    else:
        foreign = [name for name in files if name.endswith(_WEIGHTS)]
        different = f"it has {foreign[0]}, and no {CONFIG_NAME}" if foreign else ""
    if different:
        raise ValueError(
            f"{repo_id!r} holds another model: {different}. Nothing was changed there; push to another name, or pass "
            "overwrite=True to replace it"
        )


def _own_fields(model: PreTrainedModel) -> dict[str, Any]:
    """Return what config.json will say."""
    if isinstance(model.config, EagleHeadConfig) and model.config.layout != "tokenahead":
        return folder_config(model.config, model.config.layout, model.dtype)
    return json.loads(model.config.to_json_string(use_diff=True))


def _difference(ours: dict[str, Any], theirs: dict[str, Any], within: str = "") -> str:
    """Return the first field that tells the two apart, in words; empty where none does."""
    for name in _TELLING:
        if ours.get(name) != theirs.get(name) and None not in (ours.get(name), theirs.get(name)):
            return f"{within}{name} is {theirs[name]!r} there and {ours[name]!r} here"
    for name in ("backbone_config", "text_config"):
        both = isinstance(ours.get(name), dict) and isinstance(theirs.get(name), dict)
        if both and (found := _difference(ours[name], theirs[name], f"{name}.")):
            return found
    return ""


def public_copy(source: Path, target: Path, left_out: Sequence[str] = (), also: Sequence[Path] = ()) -> None:
    """Copy a directory for the world: names of local directories are taken out of its configs.

    A card that shows a path of this machine is left out, with a warning. Files are linked where the disk can.

    Args:
        source: The directory; left unchanged.
        target: Where to; made if it is not there.
        left_out: Patterns of paths in `source`; `*` stands for slashes, too.
        also: Further files for the top of `target`.
    """
    inside = sorted(path for path in source.rglob("*") if path.is_file())
    places = {file.relative_to(source): file for file in inside}
    for name, file in (places | {Path(file.name): file for file in also}).items():
        place = target / name
        if any(fnmatch(name.as_posix(), pattern) for pattern in left_out):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix != ".md" or _is_public(file):
            _link(file, place)
    hide_local_names(target)


def hide_local_names(folder: Path) -> None:
    """Remove from configs the names of local directories; names that the Hub knows are left unchanged."""
    for file in folder.rglob("*.json"):
        if file.name in _FILES:
            values = json.loads(file.read_text(encoding="utf-8"))
            if (public := _public(values)) != values:  # replaced, not rewritten: the file may be a link
                replace_text(file, json.dumps(public, indent=2, ensure_ascii=False) + "\n")


def _public(values: Any) -> Any:
    if isinstance(values, list):
        return [_public(value) for value in values]
    if not isinstance(values, dict):
        return values
    return {name: hub_id(value) if name in _NAMES and isinstance(value, str) else _public(value)
            for name, value in values.items()}  # fmt: skip


def _is_public(card: Path) -> bool:
    try:
        check_no_local_path(card.read_text(encoding="utf-8", errors="replace"))
    except ValueError as error:
        logger.warning(f"{card} is not pushed: {error}")
        return False
    return True


def _link(file: Path, place: Path) -> None:
    try:
        os.link(file, place)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, place)
