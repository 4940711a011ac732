"""The model card: rendered from the facts and results of a model, and written beside its weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..generation.drafter import BaseDrafter, DrafterFacts
from ..modeling.common.loading import holds_drafter_alone, read_drafter
from ..modeling.common.remote_code import CODE_DIRECTORY, REQUIREMENT, check_choice
from ..training.evaluation.decoding import CONTROL, PLAIN
from ..training.loading import load_backbone
from ..training.requests import CardRequest
from ..training.results import MeasuredResults, source_mark
from ..training.utils import replace_file, visible

_TAGS = ("tokenahead", "multi-token-prediction", "speculative-decoding")
_TEMPLATES = Path(__file__).parent / "templates"
_MARK = "\n<!-- tokenahead card "
_PATH = re.compile(r"(?<![\w:/.~<-])(?:(?P<drive>[A-Za-z]:\\(?=\w))|~/|/(?=[\w.]+/))[^\s`\"')\]|]*")
_NAME = re.compile(r"[\w.~+=@:/\\ -]+")
_TAG = re.compile(r"<(?=[A-Za-z/!?])(?!https?://)")
_RESULTS = "results.json"
"""The file of measured results beside a card."""
_KEPT = ("license", "base_model", "language", "model_name", "datasets", "tags")
_PARTS = {"training_data": "Training Data", "training_description": "Training Procedure"}
_PRIVATE = ("~/", "/home/", "/Users/", "/root/", "/tmp/", "/private/", "/mnt/", "/scratch/")


def render_card(
    config_or_model: PreTrainedConfig | PreTrainedModel,
    results: MeasuredResults | None,
    *,
    repo_id: str | None = None,
    picture: str | None = None,
    remote_code: str | None = "auto",
    compared: MeasuredResults | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    training_data: str | None = None,
    training_description: str | None = None,
    training_results: str | None = None,
    out_of_scope: str | None = None,
    **metadata: Any,
) -> ModelCard:
    """Render the card of a model that drafts, or of a drafter, with the parts of Hugging Face's annotated template.

    Args:
        config_or_model: The model, or its config (then the card has no number of parameters).
        results: Measured results; None: the card states that nothing was measured.
        repo_id: Where the model is or will be on the Hub, for the example code.
        picture: File name of the figure of accepted drafts, which lies beside the card.
        remote_code: The code that travels with the model, as for `push_to_hub`.
        compared: Results of other methods, for a table of comparison; none of their figures is the model's.
        hyperparameters: Names and values of the training run.
        training_data: As Markdown, like the three that follow.
        training_description: How the model was trained.
        training_results: The log of the training run.
        out_of_scope: Uses to avoid, before those that hold for every such model.
        **metadata: Fields of `ModelCardData`: `license`, `language`, `base_model`, `model_name` (the title), ...

    Raises:
        TypeError: The model does not draft.
        ValueError: A path of this machine would be shown, or an argument is neither a name on the Hub nor a path.

    Example:
        >>> card = render_card(model, MeasuredResults.from_json("results.json"), license="apache-2.0")
        >>> write_card(directory, card)
    """
    check_choice(remote_code)
    kind, config, facts = describe(config_or_model)
    travels = getattr(kind, "travels_when_pushed", None)  # None for a class that carries no code
    if travels is None or remote_code == "auto":
        remote_code = "bundle" if travels else None
    backbone = vars(config).get("base_model_name_or_path") if kind.is_apart else None
    backbone = hub_id(backbone) if backbone and "/" in backbone else None  # a bare name was a directory as a rule
    base_model = metadata.pop("base_model", None) or backbone
    base_models = [base_model] if isinstance(base_model, str) else base_model or []
    for argument, given in {"repo_id": [repo_id], "picture": [picture], "base_model": base_models}.items():
        for each in filter(None, given):
            if not isinstance(each, str) or not _NAME.fullmatch(each):  # which could write lines or code into a card
                raise ValueError(f"{argument}={each!r} is neither owner/name on the Hub nor a path")
    fields = {
        # otherwise the Hub would offer a line of code that cannot load the model without `import tokenahead`
        "library_name": "transformers" if remote_code == "bundle" else "tokenahead",
        "pipeline_tag": None if kind.is_apart else "text-generation",
        "base_model": base_model,
        "base_model_relation": "adapter" if kind.is_apart and base_model else None,
        "model_name": repo_id.split("/")[-1] if repo_id else kind.__name__,
        "eval_results": _eval_results(results) if results else None,
    } | {name: value for name, value in metadata.items() if value is not None}
    fields["tags"] = [*_TAGS, config.model_type, *(metadata.get("tags") or ())]
    text = ENVIRONMENT.get_template("model_card.md.jinja").render(
        data=ModelCardData(**fields),
        kind=kind,
        config=config,
        facts=facts,
        parameters=config_or_model.num_parameters() if isinstance(config_or_model, PreTrainedModel) else None,
        citations=_citations(facts.papers),
        requires=f"torch '{REQUIREMENT}'" + " peft" * (facts.kind == "uniforms"),
        has_code=remote_code == "bundle",
        base_models=base_models,
        repo_id=repo_id,
        results=results,
        compared=compared,
        picture=picture,
        hyperparameters=hyperparameters,
        training_data=training_data,
        training_description=training_description,
        training_results=training_results,
        out_of_scope=out_of_scope,
    )
    check_no_local_path(text)
    return marked(ModelCard(text))


def describe(config_or_model: PreTrainedConfig | PreTrainedModel) -> tuple[Any, PreTrainedConfig, DrafterFacts]:
    """Return the class, the configuration and the facts of a model that drafts; a TypeError of another one."""
    model = config_or_model if isinstance(config_or_model, PreTrainedModel) else None
    config: Any = config_or_model if model is None else model.config
    # not `config.architectures`: official files name classes of the official code
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or MODEL_MAPPING.get(type(config), object)
    kind: Any = known if model is None else type(model)
    if not issubclass(kind, BaseDrafter):
        raise TypeError(f"{type(config).__name__} is no config of a model that drafts, or of a drafter")
    return kind, config, kind.facts(config, model)


def hub_id(name: str | None) -> str | None:
    """Return `name` if it is a Hub id, and None for a local path."""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return None
    return name if name and not Path(name).exists() else None


def write_card(folder: str | Path, card: ModelCard, *, overwrite: bool = False) -> Path:
    """Write a card as README.md into the model's directory, atomically, and return its path.

    Raises:
        FileExistsError: README.md was written or edited by a person, and `overwrite` is False.
    """
    path = Path(folder) / "README.md"
    if path.exists() and not overwrite:
        text = path.read_text(encoding="utf-8", errors="replace")
        body = text.rpartition(_MARK)[0]
        if text != body + _mark(body):
            raise FileExistsError(f"{path} was written or edited by hand; pass overwrite=True to replace it")
    return replace_file(path, str(card))


def marked(card: ModelCard) -> ModelCard:
    """Add to a card the line by which `write_card` knows it."""
    card.text += _mark(str(card))
    return card


def _mark(body: str) -> str:
    """Return the last line of a card, a comment with the hash of what stands before it."""
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f"{_MARK}{digest}: rendered, not written by hand; once edited, it is not overwritten -->\n"


def check_no_local_path(text: str) -> None:
    """Refuse a text with a path of a home directory, or with one that exists on this machine."""
    for match in _PATH.finditer(text):
        path = match[0].rstrip(".,;:)'\"`")
        if path.startswith(_PRIVATE) or match["drive"] or Path(path).exists():
            raise ValueError(f"the card would show {path!r}, a path of one machine: name a repository of the Hub")


class _Block(str):
    """Text of several lines, and code; what templates show otherwise is one line that writes no markup."""


def _shown(value: object) -> object:
    """Return a value as a card shows it; all escaping is here."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    return text if isinstance(value, _Block) else _TAG.sub(r"\\<", " ".join(text.split())).replace("|", "\\|")


def _fenced(value: str, language: str = "") -> _Block:
    """Return a block of code, whose fence is longer than any within."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", value)), default=0))
    return _Block(f"{fence}{language}\n{value}\n{fence}")


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_TEMPLATES),
    undefined=jinja2.StrictUndefined,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    autoescape=False,  # this is Markdown, not HTML
)
ENVIRONMENT.filters |= {"block": _Block, "fenced": _fenced, "quoted": lambda value: _Block(json.dumps(value))}


def _citations(papers: tuple[str, ...]) -> str:
    """Return BibTeX entries; a paper that is not in `citations.bib` is one itself."""
    text = (_TEMPLATES / "citations.bib").read_text(encoding="utf-8")
    entries = {entry.partition("{")[2].partition(",")[0]: entry.strip() for entry in text.split("\n\n")}
    return "\n\n".join(entries.get(paper, paper) for paper in papers)


def _eval_results(results: MeasuredResults) -> list[EvalResult]:
    """Return one entry per figure; no speed-up of loops or an unsteady machine."""
    unit, units, found = results.unit, f"{results.unit.capitalize()}s", []
    for row in results.results:
        per_call = None if row.only_loops else row.tokens_per_call
        found += [
            ("tokens_per_call", f"{units} per backbone call, {row.name}", per_call),
            ("tokens_per_second", f"{units} per second, {row.name}", row.tokens_per_second),
            ("repetition", f"Share of repeated text, {row.name}", row.repeated_share),
            ("speed_up", f"Speed-up over one {unit} at a time, {row.name}", row.speed_up if row.claims_speed else None),
        ]
    found.append(("bits_per_byte", "Bits per byte", results.bits_per_byte))
    kind = re.sub(r"[^a-z0-9]+", "-", results.dataset_name.lower()).strip("-") or "text"
    return [
        EvalResult("text-generation", kind, results.dataset_name, metric, round(value, 4), metric_name=label)
        for metric, label, value in found
        if value is not None
    ]


def make_card(request: CardRequest) -> Path:
    """Write the card, and results beside it, if there are any; return the path of README.md.

    Data, recipe, licence and languages of an existing card are retained.
    """
    source, is_directory = request.model, Path(request.model).is_dir()
    if request.output is None and not is_directory:
        raise FileNotFoundError(f"{source}: no such directory; for a model of the Hub, name a directory with --output")
    output = request.output or Path(source)
    logging.disable_progress_bar()
    if holds_drafter_alone(source):
        options: dict[str, Any] = {"ignore_fields": request.ignore_fields} if request.ignore_fields else {}
        model = read_drafter(source, **options)
    else:
        model = load_backbone(source, "MODEL", "MODEL", dtype="auto")
    file = request.results or output / _RESULTS
    results = MeasuredResults.from_json(file) if request.results or file.is_file() else None
    own, others = _parted(results, request) if results else (None, None)
    known: dict[str, Any] = {"model_name": Path(source).resolve().name} | _known(source)
    asked = {"model_name": request.name, "license": request.license, "base_model": request.base_model}
    known |= {name: value for name, value in (asked | {"language": request.language}).items() if value}
    has_code = not is_directory or (Path(source) / CODE_DIRECTORY).is_dir()  # a bundle of the Hub is taken for granted
    known |= {"repo_id": None if is_directory else source, "remote_code": "bundle" if has_code else None}
    try:
        card = render_card(model, own, compared=others, **known)
    except TypeError as error:
        raise ValueError(f"{source}: {error}") from error
    path = write_card(output, card, overwrite=request.overwrite)
    if results is not None:
        results.to_json(output / _RESULTS)
    return path


def _parted(results: MeasuredResults, request: CardRequest) -> tuple[MeasuredResults | None, MeasuredResults | None]:
    """Return the results of the requested model, and those of other methods, without plain decoding; None for none."""
    rows = [row for row in results.results if row.method not in (PLAIN, CONTROL)]
    names = dict.fromkeys(str(row.method) for row in rows)
    if missing := [name for name in request.methods or () if name not in names]:
        raise ValueError(f"--methods {missing[0]}: the results have no such method; they have {', '.join(names)}")
    mark = source_mark(request.model)
    digest = mark.partition(" ")[2]  # of a directory that was renamed since, the weights are the same
    choices = [
        [row for row in rows if request.methods and row.method in request.methods],
        [row for row in rows if row.method is None],
        [row for row in rows if row.source == mark],
        [row for row in rows if digest and (row.source or "").partition(" ")[2] == digest],
    ]
    own = next(filter(None, choices), [])
    others = [row for row in rows if row not in own]
    first, second = (replace(results, results=part) if part else None for part in (own, others))
    return first, second


def _known(source: str) -> dict[str, Any]:
    """Return the facts in an existing card of the model that no config has."""
    readme = Path(source) / "README.md" if Path(source).is_dir() else source
    try:
        card = ModelCard.load(readme, ignore_metadata_errors=True)
    except (OSError, ValueError, EntryNotFoundError):
        return {}
    found = {name: card.data.get(name) for name in _KEPT}
    for name, heading in _PARTS.items():
        match = re.search(rf"^### {heading}\n(.*?)(?=^#{{1,3}} |\Z)", card.text, re.M | re.S)
        content = match[1].strip() if match else ""
        found[name] = None if content.endswith("was not described.") and "\n" not in content else content
    return {name: value for name, value in found.items() if value}
