"""One push of model, tokenizer and card to the Hub, in one commit. Renders no card and measures nothing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitInfo, HfApi, ModelCard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling.remote_code import TravellingMixin
from ..training.utils import replace_text
from .card import local_pictures, render_card, write_card
from .facts import hub_id
from .hub import check_same_model, check_token, hide_local_names, public_copy, reachable

__all__ = [
    "WEIGHTS",
    "check_token",
    "hub_id",
    "public_copy",
    "push_model",
    "push_to_hub",
    "reachable",
    "render_card",
    "write_card",
]

# the names under which transformers saves weights: an upload adds files and removes none, and a loader that finds
# one file of an earlier push beside the shards of this one would take the old weights
WEIGHTS = ["model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"]

_BLANK, _MANY = "[More Information Needed]", 10
"""What transformers writes into the card of a first push, a tokenizer's for example, and how often at least."""


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
        remote_code: What of the code travels with it, as for `save_pretrained`; the card should say the same.
        overwrite: Push also where the repository holds another model.

    Returns:
        The address of the repository.

    Raises:
        ValueError: No token; the Hub finds the card's metadata malformed; `files` clash with what is saved; `private`
            is True and the repository exists and is public; or it holds another model.
        ConnectionError: The Hub cannot be reached.
        FileNotFoundError: A file of `files` does not exist, or the card shows a figure that is not among them.
        huggingface_hub.errors.HfHubHTTPError: The Hub refuses, for example a wrong token (401).

    Example:
        >>> card = render_card(model, results, license="apache-2.0", repo_id="me/toy", picture="acceptance.png")
        >>> push_to_hub(model, tokenizer, card, "me/toy", files=["acceptance.png", "results.json"])
        'https://huggingface.co/me/toy'
    """
    # cheap checks first: saving and hashing the weights of a large model takes minutes
    sources = _check_files(files)
    _check_pictures(card, sources)
    check_token(token)
    api = HfApi(token=token)
    with reachable(repo_id):
        card.validate()
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        if private:
            _check_private(api, repo.repo_id)
        if not overwrite:
            check_same_model(api, repo.repo_id, model)
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
        remote_code: What of the code travels with it; `"auto"`: a bundle with models, none with drafters.
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
        ValueError: No token, or a repository that holds another model.
        ConnectionError: The Hub cannot be reached.
    """
    check_token(token)
    api = HfApi(token=token)
    options |= {"commit_message": commit_message or f"Upload {type(model).__name__}", "revision": revision}
    with reachable(repo_id):
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if not overwrite:
            check_same_model(api, repo, model)
        if revision and not revision.startswith("refs/pr"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        card = _card_of_push(api, repo, model, remote_code, tags or [])
        return _upload(api, repo, model, None, card, {}, remote_code, max_shard_size, **options)


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
    """Save all that is to be uploaded into one directory, and upload it as one commit."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        model.save_pretrained(folder, max_shard_size=max_shard_size, **_code(model, remote_code))
        if tokenizer is not None:
            tokenizer.save_pretrained(folder, **_code(tokenizer, remote_code))
        hide_local_names(folder)
        for file, source in sources.items():
            if (folder / file).exists():
                raise ValueError(f"files: {source} has the name of a file that the model itself saves; rename it")
            shutil.copyfile(source, folder / file)
        if card is not None:  # after the model: a save_pretrained may write a README.md of its own
            replace_text(folder / "README.md", str(card))
        return api.upload_folder(repo_id=repo_id, folder_path=folder, delete_patterns=WEIGHTS, **options)


def _code(saved: PreTrainedModel | PreTrainedTokenizerBase, remote_code: str | None) -> dict[str, Any]:
    """Return options of `save_pretrained`; what is not of this library takes none."""
    return {"remote_code": saved.code_when_pushed(remote_code)} if isinstance(saved, TravellingMixin) else {}


def _card_of_push(
    api: HfApi, repo_id: str, model: PreTrainedModel, remote_code: str | None, tags: list[str]
) -> ModelCard | None:
    """Return a new card (also for an unfilled form), the one that is there with further tags, or None to keep that."""
    there = ModelCard(_text_of(api, repo_id)) if api.file_exists(repo_id, "README.md") else None
    if there is None or there.text.count(_BLANK) >= _MANY:
        try:
            return render_card(model, None, repo_id=repo_id, metadata={"tags": tags}, remote_code=remote_code)
        except TypeError:  # a backbone alone, or a class of a user: nothing of ours to describe
            return None
    known = there.data.get("tags") or []
    there.data["tags"] = list(dict.fromkeys([*known, *tags]))
    return there if {*tags} - {*known} else None


def _text_of(api: HfApi, repo_id: str) -> str:
    return Path(api.hf_hub_download(repo_id, "README.md")).read_text(encoding="utf-8")


def _check_files(files: Sequence[str | Path]) -> dict[str, Path]:
    """Return the further files by the name that they get; each must exist."""
    sources = {Path(file).name: Path(file) for file in files}
    for source in sources.values():
        if not source.is_file():
            raise FileNotFoundError(f"files: {source} is not a file")
    if len(sources) < len(files):
        raise ValueError(f"files={[str(file) for file in files]}: two have the same name, and all go to one directory")
    return sources


def _check_pictures(card: ModelCard, sources: dict[str, Path]) -> None:
    """Refuse a card whose figures would be broken links on the Hub."""
    missing = [name for name in local_pictures(card) if name not in sources]
    if missing:
        raise FileNotFoundError(f"the card shows the figure {missing[0]!r}; pass its path in files=[...]")


def _check_private(api: HfApi, repo_id: str) -> None:
    """Refuse a public repository: `create_repo` leaves an existing one unchanged, silently."""
    if not api.model_info(repo_id).private:
        raise ValueError(
            f"private=True, but {repo_id!r} exists and is public: make it private there, or push to another name"
        )
