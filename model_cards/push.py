"""Pushes to the Hub, one commit each: what may be public of a model or of a trainer's directory, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME, logging

from ..generation.tensors.saving import finish
from ..modeling.common.remote_code import code_when_pushed
from ..modeling.heads.joint import BACKBONE
from ..training.utils import replace_file
from .card import check_no_local_path, hub_id, render_card

logger = logging.get_logger(__name__)
_NAMES = {"base_model_name_or_path", "_name_or_path", "name_or_path", "best_model_checkpoint"}
"""Fields of configs that hold the name of a model or its directory."""
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".msgpack", ".h5", ".onnx")
_REPLACED = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
"""An upload removes no files, and a loader takes one of an earlier push before the shards of this one."""
_TELLING = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_FILES = (
    *("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors", "register.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json", "adapter_model.bin"),
    *("medusa_lm_head.*", "config.json", "generation_config.json", "adapter_config.json", "README.md"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json"),
    *("additional_chat_templates/*.jinja", "runs/**/events.out.tfevents.*"),
)
"""Patterns of what `save_pretrained` of models, adapters, tokenizers and processors writes, and of logs."""


def push_to_hub(
    model: PreTrainedModel | PreTrainedTokenizerBase,
    tokenizer: PreTrainedTokenizerBase | None,
    card: ModelCard | None,
    repo_id: str,
    *,
    files: Sequence[str | Path] = (),
    remote_code: str | None = "auto",
    overwrite: bool = False,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    tags: Sequence[str] = (),
    max_shard_size: int | str = "50GB",
    **options: Any,
) -> CommitInfo:
    """Push a model, its tokenizer, its card and further files as one commit; if nothing changed, as none.

    Weight files of an earlier push that this one does not replace (other shards) are deleted; nothing else is.

    Args:
        model: Saved with its `save_pretrained`.
        tokenizer: None: there is none (heads apart from a backbone).
        card: Its metadata is checked by the Hub first; None keeps the card that is there, or makes one.
        repo_id: `"user/name"`; created if it does not exist.
        files: Further files for the top directory: the figure that the card shows, the measured results.
        remote_code: The code that travels with it; `"auto"`: a bundle with models, none with drafters.
        overwrite: Push also where the repository holds another model, which is a ValueError otherwise.
        private: Whether a new repository is private; True is a ValueError where it exists and is public.
        token: None: the one of this machine (`hf auth login`).
        revision: Branch to push to; made if it is not there.
        tags: Further tags of the card that is kept or made.
        max_shard_size: As for `save_pretrained`.
        **options: `commit_message`, `commit_description` and `create_pr`, as for `HfApi.upload_folder`.

    Example:
        >>> card = render_card(model, results, license="apache-2.0", repo_id="me/toy", picture="acceptance.png")
        >>> push_to_hub(model, tokenizer, card, "me/toy", files=["acceptance.png", "results.json"]).repo_url
        'https://huggingface.co/me/toy'
    """
    api = HfApi(token=token)
    if card is not None:
        card.validate()
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.model_info(repo).private:  # an existing one is left unchanged, silently
        raise ValueError(f"private=True, but {repo!r} exists and is public: make it private, or push to another name")
    if revision and not revision.startswith("refs/pr"):
        api.create_branch(repo, branch=revision, exist_ok=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        parts: list[Any] = [model] if tokenizer is None else [model, tokenizer]
        for saved in parts:
            carries = hasattr(type(saved), "remote_classes")
            code = {"remote_code": code_when_pushed(saved, remote_code)} if carries else {}
            saved.save_pretrained(folder, max_shard_size=max_shard_size, **code)
        hide_local_names(folder)
        for file in map(Path, files):
            if (folder / file.name).exists():
                raise ValueError(f"files: {file} has the name of another file of this push; rename it")
            shutil.copyfile(file, folder / file.name)
        if card := card or _card_on_hub(api, repo, model, remote_code, tags):
            replace_file(folder / "README.md", str(card))  # a save_pretrained may have written one of its own
        options = {"commit_message": f"Upload {type(model).__name__}", "revision": revision} | options
        return upload(api, folder, repo, overwrite, token=token, **options)


def _difference(api: HfApi, repo_id: str, ours: Path) -> str | None:
    """Return how a repository holds another model than a config.json is of; None where it does not."""
    files = api.list_repo_files(repo_id)
    if CONFIG_NAME not in files:
        return next((f"it has {name}, and no {CONFIG_NAME}" for name in files if name.endswith(_WEIGHTS)), None)
    mine, theirs = _telling(ours), _telling(Path(api.hf_hub_download(repo_id, CONFIG_NAME)))
    differ = (name for name in mine if theirs.get(name, mine[name]) != mine[name])
    return next((f"{name} is {theirs[name]!r} there and {mine[name]!r} here" for name in differ), None)


def _telling(config: Path) -> dict[str, Any]:
    """Return the fields that distinguish two models, also of parts, and that retraining does not change."""
    fields = json.loads(config.read_text(encoding="utf-8"))
    parts = {"": fields} | {f"{name}.": fields[name] for name in ("backbone_config", "text_config") if name in fields}
    pairs = {prefix + name: (part or {}).get(name) for prefix, part in parts.items() for name in _TELLING}
    return {name: value for name, value in pairs.items() if value is not None}


def _card_on_hub(
    api: HfApi, repo_id: str, model: Any, remote_code: str | None, tags: Sequence[str]
) -> ModelCard | None:
    """Return the card on the Hub with further tags, or ours in place of none; None for no change."""
    try:
        card = ModelCard.load(api.hf_hub_download(repo_id, "README.md"))
    except EntryNotFoundError:
        with suppress(TypeError):  # a backbone alone, a class of a user, a tokenizer
            return render_card(model, None, repo_id=repo_id, tags=tags, remote_code=remote_code)
        return None
    data: Any = card.data
    data.tags = [*dict.fromkeys([*(data.tags or ()), *tags])]
    return card if tags else None


def upload(api: HfApi, folder: Path, repo_id: str, overwrite: bool = False, **options: Any) -> CommitInfo:
    """Upload a directory as one commit, in which its weights replace those that are there; refuse another model."""
    config, hub = folder / CONFIG_NAME, HfApi(token=options.get("token"))
    is_checked = config.is_file() and not overwrite  # adapters alone have none, and replace nothing
    if is_checked and (difference := _difference(hub, repo_id, config)):
        raise ValueError(f"{repo_id!r} holds another model: {difference}; pass overwrite=True to replace it")
    places = {file.parent.relative_to(folder) for file in folder.rglob("model*.safetensors")}
    replaced = [str(place / name) for place in places for name in _REPLACED]
    return api.upload_folder(repo_id=repo_id, folder_path=folder, delete_patterns=replaced, **options)


def public_copy(source: Path, target: Path, besides: Sequence[str] = (), adapters: Sequence[str] = ()) -> None:
    """Copy what may be public of a directory, without the names of local directories in its configs.

    That is files of a list (`besides` has further patterns) and code that a config names, also in the directories
    `adapters`; no links to elsewhere, and no card that shows a path of this machine. Files that are there stay.
    """
    finish(source)
    for folder in (source, *(source / name for name in (BACKBONE, *adapters))):
        for file in _code_files(folder).union(*map(folder.glob, (*_FILES, *besides))):
            copy = target / file.relative_to(source)
            if file.is_file() and file.resolve().is_relative_to(source.resolve()) and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(file, copy)
                except OSError:  # another disk, or one without links
                    shutil.copyfile(file, copy)
    for card in target.rglob("*.md"):
        try:
            check_no_local_path(card.read_text(encoding="utf-8", errors="replace"))
        except ValueError as error:
            logger.warning(f"{card.relative_to(target)} is not pushed: {error}")
            card.unlink()
    hide_local_names(target)


def _code_files(folder: Path) -> set[Path]:
    """Return the modules that the configs of a directory name (`auto_map`), and those that these import beside them."""
    found = set[Path]()
    for config in folder.glob("*config.json"):
        named = json.dumps(json.loads(config.read_text(encoding="utf-8")).get("auto_map"))
        for module in (folder / f"{name}.py" for name in re.findall(r'(\w+)\.\w+"', named)):
            if module.is_file():
                found |= {module, *map(Path, get_relative_import_files(module))}
    return found


def hide_local_names(directory: Path) -> None:
    """Remove from configs the names of local directories; names that the Hub knows are left unchanged."""
    for file in (*directory.rglob("*config.json"), *directory.rglob("trainer_state.json")):
        text = file.read_text(encoding="utf-8")
        if (public := json.loads(text, object_hook=_public)) != json.loads(text):
            replace_file(file, json.dumps(public, indent=2, ensure_ascii=False) + "\n")  # the file may be a link


def _public(fields: dict[str, Any]) -> dict[str, Any]:
    named = {name: hub_id(value) for name, value in fields.items() if name in _NAMES and isinstance(value, str)}
    return fields | named
