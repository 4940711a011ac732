"""What is asked before a push: a token, a network, and a repository that holds this model or none. Uploads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from ..modeling.eagle.export import folder_config

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".msgpack", ".h5", ".onnx")
_TELLING = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields by which two models are told apart; retraining changes none of them."""


def check_token(token: str | bool | None) -> None:
    """Refuses a push that no token allows, before anything is saved.

    Raises:
        ValueError: No token.
    """
    if token is False or (not isinstance(token, str) and not get_token()):
        raise ValueError(
            "there is no access token of the Hub to push with: run `hf auth login`, set HF_TOKEN, or pass token=..."
        )


@contextmanager
def reachable(repo_id: str) -> Iterator[None]:
    """Says what was left as it was where the network fails.

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
    """Refuses a repository that holds something else than an earlier state of this model.

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
    """What config.json will say."""
    layout = getattr(model.config, "layout", "tokenahead")
    if layout != "tokenahead":
        return folder_config(model.config, layout, model.dtype)
    return json.loads(model.config.to_json_string(use_diff=True))


def _difference(ours: dict[str, Any], theirs: dict[str, Any], within: str = "") -> str:
    """The first field that tells the two apart, in words; empty where none does."""
    for name in _TELLING:
        if ours.get(name) != theirs.get(name) and None not in (ours.get(name), theirs.get(name)):
            return f"{within}{name} is {theirs[name]!r} there and {ours[name]!r} here"
    for name in ("backbone_config", "text_config"):
        both = isinstance(ours.get(name), dict) and isinstance(theirs.get(name), dict)
        if both and (found := _difference(ours[name], theirs[name], f"{name}.")):
            return found
    return ""
