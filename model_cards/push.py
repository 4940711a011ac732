"""Pushes of model, tokenizer and card to the Hub in one commit, without names of local directories."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard, RepoUrl
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import CONFIG_NAME, logging

from ..configuration import BlockDrafterConfig, EagleHeadConfig
from ..generation.tensors.saving import finish
from ..modeling.block.layouts import layout_named
from ..modeling.common.loading import TRAVELLERS
from ..modeling.common.remote_code import code_when_pushed
from ..modeling.eagle.export import layout_config
from ..modeling.heads.joint import BACKBONE
from ..training.utils import replace_file
from .card import check_no_local_path, local_figures, render_card, write_card
from .facts import hub_id

logger = logging.get_logger(__name__)
_NAMES = {"base_model_name_or_path", "_name_or_path", "name_or_path", "best_model_checkpoint"}
"""Fields that hold the name of a model or its directory, in config.json of any layout and in files of peft and
Trainer."""
_FILES = {"config.json", "adapter_config.json", "tokenizer_config.json", "trainer_state.json"}
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".msgpack", ".h5", ".onnx")
_TELLING = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Fields that distinguish two models; retraining changes none of them."""


def check_same_model(api: HfApi, repo_id: str, model: PreTrainedModel) -> None:
    """Refuse a repository with another architecture or sizes, or with weights that no config.json describes."""
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
    """Return the fields of the config.json to be written."""
    if isinstance(model.config, EagleHeadConfig) and model.config.layout != "tokenahead":
        return layout_config(model.config, model.config.layout, model.dtype)
    if isinstance(model.config, BlockDrafterConfig) and model.config.layout != "tokenahead":
        return layout_named(model.config.layout).write(model.config)
    return json.loads(model.config.to_json_string(use_diff=True))


def _difference(ours: dict[str, Any], theirs: dict[str, Any], within: str = "") -> str:
    """Return the first field in which the two differ, in words; empty where there is none."""
    for name in _TELLING:
        if ours.get(name) != theirs.get(name) and None not in (ours.get(name), theirs.get(name)):
            return f"{within}{name} is {theirs[name]!r} there and {ours[name]!r} here"
    for name in ("backbone_config", "text_config"):
        both = isinstance(ours.get(name), dict) and isinstance(theirs.get(name), dict)
        if both and (difference := _difference(ours[name], theirs[name], f"{name}.")):
            return difference
    return ""


MODEL_FILES = (
    *("model*.safetensors", "model*.safetensors.index.json", "adapter_model*.safetensors", "register.safetensors"),
    *("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index.json", "adapter_model.bin"),
    *("medusa_lm_head.*", "config.json", "generation_config.json", "adapter_config.json", "README.md"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json"),
    "additional_chat_templates/*.jinja",
)
"""Patterns of what `save_pretrained` of models, adapters, tokenizers and processors writes."""


def public_copy(
    source: Path,
    target: Path,
    allowed: Sequence[str] = MODEL_FILES,
    adapters: Sequence[str] = (),
    also: Sequence[Path] = (),
) -> None:
    """Copy what may be public of a directory, without the names of local directories in its configs.

    Nothing else is copied but logs for TensorBoard and code that a config names, and nothing that a link brings in from
    elsewhere. A card that shows a path of this machine is left out, with a warning. Files are linked where the disk
    supports it.

    Args:
        source: The directory.
        target: Where to.
        allowed: Patterns of files, in `source` and in the directories of its backbone and its adapters.
        adapters: Names of the latter.
        also: Further files for the top of `target`.
    """
    finish(source)
    folders = [source, *(source / name for name in (BACKBONE, *adapters) if (source / name).is_dir())]
    files = {*source.glob("runs/**/events.out.tfevents.*")}
    for folder in folders:
        files |= _code_files(folder).union(*map(folder.glob, allowed))
    for file in files:
        if file.is_file() and file.resolve().is_relative_to(source.resolve()):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            _link(file, copy)
    for file in also:
        _link(file, target / file.name)
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
        named = json.loads(config.read_text(encoding="utf-8")).get("auto_map") or {}
        for each in (one for value in named.values() for one in (value if isinstance(value, list) else [value]) if one):
            module = folder / f"{each.rpartition('--')[2].split('.')[0]}.py"
            if module.is_file():
                found |= {module, *map(Path, get_relative_import_files(module))}
    return found


def hide_local_names(directory: Path) -> None:
    """Remove from configs the names of local directories; names that the Hub knows are left unchanged."""
    for file in directory.rglob("*.json"):
        if file.name in _FILES:
            values = json.loads(file.read_text(encoding="utf-8"))
            if (public := _public(values)) != values:  # replaced, not rewritten: the file may be a link
                replace_file(file, json.dumps(public, indent=2, ensure_ascii=False) + "\n")


def _public(values: object) -> object:
    if isinstance(values, list):
        return [_public(value) for value in values]
    if not isinstance(values, dict):
        return values
    return {name: hub_id(value) if name in _NAMES and isinstance(value, str) else _public(value)
            for name, value in values.items()}  # fmt: skip


def _link(file: str | Path, target: str | Path) -> None:
    Path(target).unlink(missing_ok=True)  # writing into a link would change its source
    try:
        os.link(file, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, target)


__all__ = [
    "WEIGHTS",
    "hub_id",
    "public_copy",
    "push_model",
    "push_to_hub",
    "render_card",
    "write_card",
]

# the names under which transformers saves weights: an upload adds files and removes none, and a loader that finds
# one file of an earlier push beside the shards of this one would take the old weights
WEIGHTS = ["model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"]

_BLANK, _MANY = "[More Information Needed]", 10
"""The blanks that transformers writes into the card of a first push, for example a tokenizer's, and their number."""


def push_to_hub(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    card: ModelCard,
    repo_id: str,
    *,
    files: Sequence[str | Path] = (),
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    remote_code: str | None = "auto",
    overwrite: bool = False,
) -> str:
    """Push a model, its tokenizer, its card and further files as one commit; if nothing changed, as none.

    `model.push_to_hub` works as well and keeps a card that is already on the Hub, but every object makes its own
    commit. Weight files of an earlier push that this one does not replace (other shards) are deleted; nothing else is.

    Args:
        model: The model; saved with its `save_pretrained`.
        tokenizer: The tokenizer; None if there is none (heads apart from a backbone).
        card: The card, which becomes README.md and replaces the one on the Hub. The Hub checks its metadata first.
        repo_id: `"user/name"`; created if it does not exist.
        files: Further files for the top directory: the figure that the card shows, the measured results.
        private: Whether a new repository is private; None takes the account's default.
        token: Access token; None takes the one of this machine (`hf auth login`).
        commit_message: First line of the commit.
        remote_code: The code that travels with it, as for `save_pretrained` and for the card.
        overwrite: Push also where the repository holds another model.

    Returns:
        The address of the repository.

    Raises:
        ValueError: The Hub finds the card's metadata malformed; `files` clash with what is saved; `private` is True
            and the repository exists and is public; or it holds another model.
        FileNotFoundError: A file of `files` does not exist, or the card shows a figure that is not among them.
        huggingface_hub.errors.HfHubHTTPError: The Hub refuses, for example a wrong token or none (401).

    Example:
        >>> card = render_card(model, results, license="apache-2.0", repo_id="me/toy", picture="acceptance.png")
        >>> push_to_hub(model, tokenizer, card, "me/toy", files=["acceptance.png", "results.json"])
        'https://huggingface.co/me/toy'
    """
    # cheap checks first: saving and hashing the weights of a large model takes minutes
    sources = {Path(file).name: Path(file) for file in files}
    for source in sources.values():
        if not source.is_file():
            raise FileNotFoundError(f"files: {source} is not a file")
    if len(sources) < len(files):
        raise ValueError(f"files={[str(file) for file in files]}: two have the same name, and all go to one directory")
    for name in local_figures(card):
        if name not in sources:
            raise FileNotFoundError(f"the card shows the figure {name!r}; pass its path in files=[...]")
    card.validate()
    api, repo = _repository(model, repo_id, token, private, overwrite)
    message = commit_message or f"Upload {type(model).__name__}, tokenizer and card"
    _upload(api, repo.repo_id, model, tokenizer, card, sources, remote_code, commit_message=message)
    return str(repo)


def push_model(
    model: PreTrainedModel,
    repo_id: str,
    *,
    remote_code: str | None = "auto",
    commit_message: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    max_shard_size: int | str = "50GB",
    tags: list[str] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> CommitInfo:
    """Push a model alone, as its `push_to_hub` does, with a card where the repository has none.

    Args:
        model: A model or a drafter of this library.
        repo_id: `"user/name"`; created if it does not exist.
        remote_code: The code that travels with it; `"auto"`: a bundle with models, none with drafters.
        commit_message: First line of the commit.
        private: Whether a new repository is private; None takes the account's default.
        token: Access token; None or True takes the one of this machine.
        revision: Branch to push to; made if it is not there.
        max_shard_size: As for `save_pretrained`.
        tags: Further tags of the card.
        overwrite: Push also where the repository holds another model.
        **options: `create_pr` and `commit_description`, as for `HfApi.upload_folder`.

    Returns:
        The commit.

    Raises:
        ValueError: A repository that holds another model.
    """
    options |= {"commit_message": commit_message or f"Upload {type(model).__name__}", "revision": revision}
    api, url = _repository(model, repo_id, token, private, overwrite)
    repo = url.repo_id
    if revision and not revision.startswith("refs/pr"):
        api.create_branch(repo, branch=revision, exist_ok=True)
    card = _card_of_push(api, repo, model, remote_code, tags or [])
    return _upload(api, repo, model, None, card, {}, remote_code, max_shard_size, **options)


def _repository(
    model: PreTrainedModel, repo_id: str, token: str | bool | None, private: bool | None, overwrite: bool
) -> tuple[HfApi, RepoUrl]:
    """Return a client and the repository for a model, which is made if missing; refuse another model's."""
    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True)
    if private and not api.model_info(repo.repo_id).private:  # an existing one is left unchanged, silently
        raise ValueError(
            f"private=True, but {repo_id!r} exists and is public: make it private there, or push to another name"
        )
    if not overwrite:
        check_same_model(api, repo.repo_id, model)
    return api, repo


def _upload(
    api: HfApi,
    repo_id: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    card: ModelCard | None,
    sources: dict[str, Path],
    remote_code: str | None,
    max_shard_size: int | str = "50GB",
    **options: Any,
) -> CommitInfo:
    """Save model, tokenizer, card and files into one directory, and upload it as one commit."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        model.save_pretrained(directory, max_shard_size=max_shard_size, **_code(model, remote_code))
        if tokenizer is not None:
            tokenizer.save_pretrained(directory, **_code(tokenizer, remote_code))
        hide_local_names(directory)
        for file, source in sources.items():
            if (directory / file).exists():
                raise ValueError(f"files: {source} has the name of a file that the model itself saves; rename it")
            shutil.copyfile(source, directory / file)
        if card is not None:  # after the model: a save_pretrained may write a README.md of its own
            replace_file(directory / "README.md", str(card))
        return api.upload_folder(repo_id=repo_id, folder_path=directory, delete_patterns=WEIGHTS, **options)


def _code(saved: PreTrainedModel | PreTrainedTokenizerBase, remote_code: str | None) -> dict[str, Any]:
    """Return options of `save_pretrained`; classes of other libraries take none."""
    return {"remote_code": code_when_pushed(saved, remote_code)} if isinstance(saved, TRAVELLERS) else {}


def _card_of_push(
    api: HfApi, repo_id: str, model: PreTrainedModel, remote_code: str | None, tags: list[str]
) -> ModelCard | None:
    """Return a new card (also for an unfilled form), the existing one with further tags, or None for no change."""
    old = None
    if api.file_exists(repo_id, "README.md"):
        old = ModelCard.load(api.hf_hub_download(repo_id, "README.md"))
    if old is None or old.text.count(_BLANK) >= _MANY:
        try:
            return render_card(model, None, repo_id=repo_id, metadata={"tags": tags}, remote_code=remote_code)
        except TypeError:  # a backbone alone, or a class of a user: nothing of ours to describe
            return None
    known = old.data.get("tags") or []
    old.data["tags"] = list(dict.fromkeys([*known, *tags]))
    return old if {*tags} - {*known} else None
