"""One push of model, tokenizer and card to the Hub, in one commit. Renders no card and measures nothing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, ModelCard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training.files import replace_text
from .card import local_pictures

# the names under which transformers saves weights: an upload adds files and removes none, and a loader that finds
# one file of an earlier push beside the shards of this one would take the old weights
_WEIGHTS = ["model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"]


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
) -> str:
    """Pushes a model, its tokenizer, its card and further files as one commit; if nothing changed, as none.

    `model.push_to_hub` works as well and keeps a card that is already on the Hub, but the first such push writes
    transformers' own card, and every object makes its own commit. Weight files of an earlier push that this one does
    not replace (other shards) are deleted from the head of the branch; nothing else on the Hub is.

    Args:
        model: The model; saved with its `save_pretrained`.
        tokenizer: The tokenizer; None if there is none (heads apart from a backbone).
        card: The card, which becomes README.md and replaces the one on the Hub. The Hub checks its metadata first.
        repo_id: `"user/name"`; created if it does not exist.
        files: Further files for the top folder: the picture that the card shows, the measured results.
        private: Whether a new repository is private; None takes the account's default.
        token: Access token; None takes the one of this machine (`hf auth login`).
        commit_message: First line of the commit.

    Returns:
        The address of the repository.

    Raises:
        ValueError: The Hub finds the card's metadata malformed, `files` clash with what is saved, or `private` is True
            and the repository exists and is public.
        FileNotFoundError: A file of `files` does not exist, or the card shows a picture that is not among them.
        huggingface_hub.errors.HfHubHTTPError: The Hub refuses, for example a wrong token (401).

    Example:
        >>> card = render_card(model, results, license="apache-2.0", repo_id="me/toy", picture="acceptance.png")
        >>> push_to_hub(model, tokenizer, card, "me/toy", files=["acceptance.png", "results.json"])
        'https://huggingface.co/me/toy'
    """
    api = HfApi(token=token)
    # cheap checks first: saving and hashing the weights of a large model takes minutes
    sources = _check_files(files)
    _check_pictures(card, sources)
    card.validate()
    repo = api.create_repo(repo_id, private=private, exist_ok=True)
    if private:
        _check_private(api, repo.repo_id)
    with TemporaryDirectory() as folder:
        _save(model, tokenizer, card, sources, Path(folder))
        api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            commit_message=commit_message or f"Upload {type(model).__name__}, tokenizer and card",
            delete_patterns=_WEIGHTS,
        )
    return str(repo)


def _check_files(files: Sequence[str | Path]) -> dict[str, Path]:
    """The further files by the name that they get; each must exist."""
    sources = {Path(file).name: Path(file) for file in files}
    for source in sources.values():
        if not source.is_file():
            raise FileNotFoundError(f"files: {source} is not a file")
    if len(sources) < len(files):
        raise ValueError(f"files={[str(file) for file in files]}: two have the same name, and all go to one folder")
    return sources


def _check_pictures(card: ModelCard, sources: dict[str, Path]) -> None:
    """Refuses a card whose pictures would be broken links on the Hub."""
    missing = [name for name in local_pictures(card) if name not in sources]
    if missing:
        raise FileNotFoundError(f"the card shows the picture {missing[0]!r}; pass its path in files=[...]")


def _check_private(api: HfApi, repo_id: str) -> None:
    """`create_repo` leaves an existing repository as it is, silently."""
    if not api.model_info(repo_id).private:
        raise ValueError(
            f"private=True, but {repo_id!r} exists and is public: make it private there, or push to another name"
        )


def _save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    card: ModelCard,
    sources: dict[str, Path],
    folder: Path,
) -> None:
    """Saves all that is to be uploaded into `folder`."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    # after the model: a save_pretrained may write a README.md of its own
    replace_text(folder / "README.md", str(card))
    for name, source in sources.items():
        if (folder / name).exists():
            raise ValueError(f"files: {source} has the name of a file that the model itself saves; rename it")
        shutil.copyfile(source, folder / name)
