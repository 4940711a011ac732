"""The model card: rendered from what a model is and what was measured, and written beside its weights.

Does not measure, and does not know the Hub. A card without results says that nothing was measured.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard
from transformers import PreTrainedConfig, PreTrainedModel

from ..training.files import replace_text
from ..training.results import MeasuredResults
from .facts import describe
from .metadata import card_metadata

_TEMPLATES = Path(__file__).parent / "templates"
_MARK = re.compile(r"\n<!-- tokenahead card ([0-9a-f]{64}): .* -->\s*$")
_LOCAL_PICTURE = re.compile(r"!\[[^\]]*\]\((?![a-z]+://)([^)\s]+)\)")


def render_card(
    config_or_model: PreTrainedConfig | PreTrainedModel,
    results: MeasuredResults | None,
    *,
    license: str | None = None,
    base_model: str | list[str] | None = None,
    model_name: str | None = None,
    repo_id: str | None = None,
    picture: str | None = None,
    training_description: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> ModelCard:
    """Renders the card of a model with a multi-token head.

    Args:
        config_or_model: The model, or its config (then the card does not say how many parameters there are).
        results: What was measured; None gives a card that says that nothing was.
        license: Licence id of the weights, as the Hub writes them; None says that none was stated.
        base_model: Hub id (or ids) of the model that this one derives from.
        model_name: Title; None takes the last part of `repo_id`, or the class name.
        repo_id: Where the model is or will be on the Hub, for the example code.
        picture: File name of the picture of acceptance by draft position, which lies beside the card.
        training_description: How the model was trained, as Markdown; None says that this was not described.
        metadata: Further fields of `ModelCardData` (`language`, `datasets`, more `tags`, ...); not those that have an
            argument here.

    Returns:
        The card; `str(card)` is the text of README.md.

    Raises:
        TypeError: The model has no multi-token head.
        ValueError: `picture` is not a bare file name, or is given without results; `metadata` repeats an argument;
            a shown value is empty.

    Example:
        >>> card = render_card(model, MeasuredResults.from_json("results.json"), license="apache-2.0")
        >>> write_card(folder, card)
    """
    facts = describe(config_or_model)
    name = model_name or (repo_id.split("/")[-1] if repo_id else facts.class_name)
    base_model = base_model or facts.backbone
    _check_picture(picture, results)
    _check_metadata(metadata or {})
    data = card_metadata(facts, results, name, license=license, base_model=base_model, **metadata or {})
    template = _environment().get_template("model_card.md.jinja")
    text = template.render(
        card_data=data.to_yaml(),
        name=name,
        facts=facts,
        results=results,
        license=license,
        base_models=[base_model] if isinstance(base_model, str) else base_model,
        source=repo_id or "path/to/this/folder",
        picture=picture,
        training_description=training_description,
    )
    card = ModelCard(text)
    card.text += _mark(card)
    return card


def write_card(folder: str | Path, card: ModelCard, *, overwrite: bool = False) -> Path:
    """Writes `card` as README.md into `folder`, under a temporary name first.

    Args:
        folder: The model's folder; the pictures that the card shows must lie in it.
        card: The card.
        overwrite: Replace a README.md that is not a card rendered here, or that was edited since.

    Returns:
        The path of README.md.

    Raises:
        FileExistsError: README.md holds someone's own words and `overwrite` is False.
        FileNotFoundError: The card shows a picture that is not in `folder`.
    """
    folder = Path(folder)
    path = folder / "README.md"
    for name in local_pictures(card):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"the card shows the picture {name!r}, which is not in {folder}")
    if path.exists() and not overwrite and not is_generated(path):
        raise FileExistsError(
            f"{path} was written or edited by hand and would be lost; pass overwrite=True to replace it, "
            "or write the card to another folder"
        )
    return replace_text(path, str(card))


def is_generated(path: str | Path) -> bool:
    """Whether the file is a card from `render_card` that nobody has edited since, metadata included.

    Args:
        path: A Markdown file.

    Returns:
        True if the mark at its end agrees with the rest of the file.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _digest(ModelCard(text[: mark.start()], ignore_metadata_errors=True))


def local_pictures(card: ModelCard) -> list[str]:
    """Names the pictures that must travel with a card.

    Args:
        card: The card.

    Returns:
        The relative paths of the pictures that it shows; web addresses are left out.
    """
    return _LOCAL_PICTURE.findall(card.text)


def _environment() -> jinja2.Environment:
    """A Jinja environment in which no value can be missing, None or empty without an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=_refuse_empty,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # this is Markdown, not HTML
    )
    environment.filters["cell"] = _cell
    return environment


def _refuse_empty(value: Any) -> Any:
    if value is None or value == "":
        raise ValueError("the card's template was given an empty value; every value that it shows must say something")
    return value


def _cell(value: object) -> str:
    """Text for one cell of a Markdown table."""
    return " ".join(str(value).replace("|", "\\|").split())


def _check_picture(picture: str | None, results: MeasuredResults | None) -> None:
    if picture is None:
        return
    if results is None:
        raise ValueError(f"picture={picture!r} shows measurements; pass the results that it was drawn from")
    if not picture or Path(picture).name != picture or re.search(r"[\s()]", picture):
        raise ValueError(
            f"picture={picture!r} must be the bare name of a file beside the card, without spaces or parentheses, "
            "for example 'acceptance.png'"
        )


def _check_metadata(metadata: dict[str, Any]) -> None:
    taken = sorted(metadata.keys() & {"license", "base_model", "model_name", "eval_results"})
    if taken:
        raise ValueError(f"metadata={{{taken[0]!r}: ...}} would contradict the card; use the argument for it instead")


def _mark(card: ModelCard) -> str:
    """The comment that ends a card, by which a later run knows that nobody edited it."""
    note = "rendered, not written by hand; once edited, it is not overwritten"
    return f"\n<!-- tokenahead card {_digest(card)}: {note} -->\n"


def _digest(card: ModelCard) -> str:
    """Hash of what the card says, whatever its line ends and the layout of its metadata."""
    data = json.dumps(card.data.to_dict(), sort_keys=True, default=str)
    body = "\n".join(line.rstrip() for line in card.text.strip().splitlines())
    return hashlib.sha256(f"{data}\n{body}".encode()).hexdigest()
