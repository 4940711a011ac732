"""The model card: rendered from the facts and results of a model, and written beside its weights.

Does not measure, and does not know the Hub. A card without results states that nothing was measured.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig, PreTrainedModel

from ..modeling.common.remote_code import check_choice
from ..training.results import DecodingResult, MeasuredResults
from ..training.utils import replace_file, visible
from .facts import ModelFacts, describe

TAGS = ("tokenahead", "multi-token-prediction", "speculative-decoding")
"""Tags of every card."""
_TEMPLATES = Path(__file__).parent / "templates"
_MARK = re.compile(r"\n<!-- tokenahead card ([0-9a-f]{64}): .* -->\s*$")
_PATH = re.compile(r"(?<![\w:/.~<-])(?:(?P<drive>[A-Za-z]:\\(?=\w))|~/|/(?=[\w.]+/))[^\s`\"')\]|]*")
_NAME = re.compile(r"[\w.~+=@:/\\ -]+")
_TAG = re.compile(r"<(?=[A-Za-z/!?])(?!https?://)")
_PRIVATE = ("~/", "/home/", "/Users/", "/root/", "/tmp/", "/private/", "/mnt/", "/scratch/")
_LOCAL_FIGURE = re.compile(r"!\[[^\]]*\]\((?![a-z]+://)([^)\s]+)\)")


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
    remote_code: str | None = "auto",
    language: str | list[str] | None = None,
    training_data: str | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    training_results: str | None = None,
    out_of_scope: str | None = None,
    compared: MeasuredResults | None = None,
) -> ModelCard:
    """Render the card of a model that drafts, or of a drafter, with the parts of Hugging Face's annotated template.

    Args:
        config_or_model: The model, or its config (then the card has no number of parameters).
        results: Measured results; None: the card states that nothing was measured.
        license: Licence id of the weights, as the Hub writes them; None: the card states that there is none.
        base_model: Hub id (or ids) of the model that this one derives from.
        model_name: Title; None takes the last part of `repo_id`, or the class name.
        repo_id: Where the model is or will be on the Hub, for the example code.
        picture: File name of the figure of accepted drafts, which lies beside the card.
        training_description: How the model was trained, as Markdown; None: the card states that this is unknown.
        metadata: Further fields of `ModelCardData` (`datasets`, `tags`, ...); not those that have an argument here.
        remote_code: The code that travels with the model, as for `push_to_hub`; `"bundle"` adds a section on use
            without this library.
        language: Codes of the languages that the model writes (`"en"`, `"code"`); None: the card states none.
        training_data: Its training data, as Markdown; None: the card states that they are unknown.
        hyperparameters: Names and values of the training run.
        training_results: The log of the training run, as Markdown.
        out_of_scope: Uses to avoid, as Markdown, before those that hold for every such model.
        compared: Results of other methods, for a table of comparison; none of their figures is the model's.

    Returns:
        The card; `str(card)` is the text of README.md.

    Raises:
        TypeError: The model has no multi-token head.
        ValueError: A shown value is empty, or a path of this machine; a `repo_id`, `base_model` or `picture` that is
            neither a name on the Hub nor a path; an unknown `remote_code`.

    Example:
        >>> card = render_card(model, MeasuredResults.from_json("results.json"), license="apache-2.0")
        >>> write_card(directory, card)
    """
    check_choice(remote_code)
    facts = describe(config_or_model, remote_code)
    base_model = base_model or facts.backbone
    base_models = [base_model] if isinstance(base_model, str) else base_model
    named = {"repo_id": [repo_id], "picture": [picture], "base_model": base_models or []}
    for argument, given in named.items():
        for each in filter(None, given):
            if not isinstance(each, str) or not _NAME.fullmatch(each):  # which could write lines or code into a card
                raise ValueError(f"{argument}={each!r} is neither owner/name on the Hub nor a path")
    name = model_name or (repo_id.split("/")[-1] if repo_id else facts.class_name)
    fields = {"license": license, "base_model": base_model, "language": language} | (metadata or {})
    data = card_metadata(facts, results, name, **fields)
    languages = language or (metadata or {}).get("language")
    text = (
        _environment()
        .get_template("model_card.md.jinja")
        .render(
            card_data=data.to_yaml(),
            name=name,
            facts=facts,
            results=results,
            compared=compared,
            license=license,
            base_models=base_models,
            languages=[languages] if isinstance(languages, str) else languages,
            repo_id=repo_id,
            source=repo_id or "path/to/this/directory",
            picture=picture,
            training_description=training_description,
            training_data=training_data,
            hyperparameters=hyperparameters,
            training_results=training_results,
            out_of_scope=out_of_scope,
        )
    )
    check_no_local_path(text)
    card = ModelCard(text)
    card.text += _mark(card)
    return card


def write_card(folder: str | Path, card: ModelCard, *, overwrite: bool = False) -> Path:
    """Write a card as README.md into the model's directory, atomically, and return its path.

    `overwrite` replaces a README.md that is not a card rendered here, or that was edited since.

    Raises:
        FileExistsError: README.md was written or edited by a person, and `overwrite` is False.
        FileNotFoundError: The card shows a figure that is not in the directory.
    """
    folder = Path(folder)
    path = folder / "README.md"
    for name in local_figures(card):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"the card shows the figure {name!r}, which is not in {folder}")
    if path.exists() and not overwrite and not is_generated(path):
        raise FileExistsError(
            f"{path} was written or edited by hand and would be lost; pass overwrite=True to replace it, "
            "or write the card to another directory"
        )
    return replace_file(path, str(card))


def is_generated(path: str | Path) -> bool:
    """Return whether a file is an unedited card of `render_card`: its last line is a hash of the rest."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    mark = _MARK.search(text)
    return mark is not None and mark[1] == _digest(ModelCard(text[: mark.start()], ignore_metadata_errors=True))


def local_figures(card: ModelCard) -> list[str]:
    """Return the names of the figures that must travel with a card."""
    return _LOCAL_FIGURE.findall(card.text)


def _environment() -> jinja2.Environment:
    """Return a Jinja environment in which no value can be missing, None or empty without an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # this is Markdown, not HTML
    )
    environment.filters |= {"cell": _cell, "block": _Block, "fenced": _fenced, "quoted": json.dumps}
    return environment


class _Block(str):
    """Text of several lines; what templates show is one line otherwise."""


def _shown(value: object) -> object:
    """Return a value as a card shows it: without control characters, and in one line unless it is a `_Block`."""
    if value is None or value == "":
        raise ValueError("empty value in the card's template; every value that it shows must have content")
    if not isinstance(value, str):
        return value
    text = visible(value)
    return text if isinstance(value, _Block) else _TAG.sub(r"\\<", " ".join(text.splitlines()))


def _cell(value: object) -> str:
    """Return text for one cell of a Markdown table."""
    return " ".join(str(value).replace("|", "\\|").split())


def _fenced(value: str, language: str = "") -> _Block:
    """Return a block of code, whose fence is longer than any within."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", value)), default=0))
    return _Block(f"{fence}{language}\n{value}\n{fence}")


def check_no_local_path(text: str) -> None:
    """Refuse a text with a path of a home directory, or with one that exists on this machine."""
    for match in _PATH.finditer(text):
        path = match[0].rstrip(".,;:)'\"`")
        if path.startswith(_PRIVATE) or match["drive"] or Path(path).exists():
            raise ValueError(
                f"the card would show {path!r}, a path of one machine: name a repository of the Hub, or a bare file"
            )


def _mark(card: ModelCard) -> str:
    """Return the last line of a card, a comment with its hash."""
    note = "rendered, not written by hand; once edited, it is not overwritten"
    return f"\n<!-- tokenahead card {_digest(card)}: {note} -->\n"


def _digest(card: ModelCard) -> str:
    """Return the hash of a card's content, whatever its line ends and the layout of its metadata."""
    data = json.dumps(card.data.to_dict(), sort_keys=True, default=str)
    body = "\n".join(line.rstrip() for line in card.text.strip().splitlines())
    return hashlib.sha256(f"{data}\n{body}".encode()).hexdigest()


def card_metadata(facts: ModelFacts, results: MeasuredResults | None, model_name: str, **fields: Any) -> ModelCardData:
    """Return the metadata of a card; further fields of `ModelCardData` that are None are left out.

    The library is `transformers` only if the model's own code travels with it: otherwise the Hub would offer a line
    of code that cannot load the model without `import tokenahead`.
    """
    tags = [*TAGS, facts.model_type, *(fields.pop("tags", None) or ())]
    defaults = {
        "library_name": "transformers" if facts.remote_code == "bundle" else "tokenahead",
        "pipeline_tag": None if facts.heads_only else "text-generation",
        "model_name": model_name,
        "eval_results": list(_entries(results)) if results else None,
    }
    if facts.heads_only and fields.get("base_model"):
        defaults["base_model_relation"] = "adapter"
    return ModelCardData(tags=tags, **defaults | {key: value for key, value in fields.items() if value is not None})


def _entries(results: MeasuredResults) -> Iterator[EvalResult]:
    """Return one entry per figure: three per way of decoding, then the cross-entropy."""
    for row in results.results:
        for metric, label, value in _figures(row, results.unit):
            yield _entry(results, metric, f"{label}, {row.name}", value)
    if results.bits_per_byte is not None:
        yield _entry(results, "bits_per_byte", "Bits per byte", results.bits_per_byte)


def _figures(row: DecodingResult, unit: str) -> list[tuple[str, str, float]]:
    """Return (metric id, label, value) of one way of decoding; no speed-up of loops or an unsteady machine."""
    per_call = ("tokens_per_call", f"{unit.capitalize()}s per backbone call", row.tokens_per_call)
    per_second = ("tokens_per_second", f"{unit.capitalize()}s per second", row.tokens_per_second)
    figures: list[tuple[str, str, float]] = [per_second] if row.only_loops else [per_call, per_second]
    if row.expected_tokens_per_call is not None and not row.only_loops:
        drafts = f", drafts of {row.draft_length}" if row.draft_length else ""
        label = f"Expected {unit}s per verification{drafts}"
        figures.append(("expected_tokens_per_call", label, row.expected_tokens_per_call))
    if row.repeated_share is not None:
        figures.append(("repetition", "Share of repeated text", row.repeated_share))
    if row.looping_share is not None:
        figures.append(("left_out", "Share of calls that loop and are left out", row.looping_share))
    if not row.claims_speed:
        return figures
    return [*figures, ("speed_up", f"Speed-up over one {unit} at a time", row.speed_up)]


def _entry(results: MeasuredResults, metric: str, name: str, value: float) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=re.sub(r"[^a-z0-9]+", "-", results.dataset_name.lower()).strip("-") or "text",
        dataset_name=results.dataset_name,
        metric_type=metric,
        metric_name=name,
        metric_value=round(value, 4),
    )
