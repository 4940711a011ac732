"""`tokenahead card`: writes the card of a model with measured results. Knows no argument parser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging

from ..generation.tensors.tensor_files import check_index
from ..modeling.common.remote_code import CODE_DIRECTORY
from ..modeling.common.stored_drafters import holds_drafter_alone, read_drafter
from ..training.evaluation.bench import CONTROL, PLAIN
from ..training.loading import causal_class
from ..training.requests import CardRequest
from ..training.results import DecodingResult, MeasuredResults, source_mark
from .card import render_card, write_card
from .facts import describe

RESULTS = "results.json"
"""The file of measured results beside a card."""
_UNTOLD = re.compile(r"(What this model was trained on|How this model was trained) was not described\.")


def make_card(request: CardRequest) -> Path:
    """Write the card, and results beside it, if there are any; return the path of README.md.

    Data, recipe, licence and languages of an existing card are retained.

    Raises:
        FileNotFoundError: No such directory or file of results.
        FileExistsError: A card that a person wrote, without `overwrite`.
        ValueError: A model that does not draft, results that are none, or methods that were not measured.
        OSError: What the Hub cannot give.
    """
    output = request.output or Path(request.model)
    if request.output is None and not output.is_dir():
        raise FileNotFoundError(
            f"{request.model}: no such directory; for a model of the Hub, name a directory with --output"
        )
    model = _load(request.model, request.ignore_fields)
    try:
        describe(model)
    except TypeError as error:
        raise ValueError(f"{request.model}: {error}") from error
    known = _known(request.model)
    file = request.results or output / RESULTS
    results = MeasuredResults.from_json(file) if request.results or file.is_file() else None
    own, others = _parted(results, request) if results else (None, None)
    card = render_card(
        model,
        own,
        compared=others,
        license=request.license or known.pop("license", None),
        base_model=request.base_model or known.pop("base_model", None),
        language=request.language or known.pop("language", None),
        model_name=request.name or known.pop("model_name", None) or Path(request.model).resolve().name,
        repo_id=None if Path(request.model).is_dir() else request.model,
        training_data=known.pop("training_data", None),
        training_description=known.pop("training_description", None),
        metadata={name: known[name] for name in ("datasets", "tags") if known.get(name)},
        remote_code=_travelling(request.model),
    )
    output.mkdir(parents=True, exist_ok=True)
    path = write_card(output, card, overwrite=request.overwrite)
    if results is not None:
        results.to_json(output / RESULTS)
    return path


def _load(source: str, ignored: list[str] | None) -> PreTrainedModel:
    logging.disable_progress_bar()
    if holds_drafter_alone(source):
        return read_drafter(source, **({"ignore_fields": ignored} if ignored else {})).eval()
    config = AutoConfig.from_pretrained(source)
    check_index(source)
    return causal_class(config).from_pretrained(source, config=config, dtype="auto").eval()


def _parted(results: MeasuredResults, request: CardRequest) -> tuple[MeasuredResults | None, MeasuredResults | None]:
    """Return the results of the requested model, and those of other methods, without plain decoding; None for none."""
    rows = [row for row in results.results if row.method not in (PLAIN, CONTROL)]
    if request.methods is not None:
        if missing := sorted({*request.methods} - {str(row.method) for row in rows}):
            names = ", ".join(dict.fromkeys(str(row.method) for row in rows))
            raise ValueError(f"--methods {missing[0]}: the results have no such method; they have {names}")
        own = [row for row in rows if row.method in request.methods]
    else:
        own = [row for row in rows if row.method is None] or _of_source(rows, source_mark(request.model))
    others = [row for row in rows if row not in own]
    parts = (replace(results, results=part) if part else None for part in (own, others))
    return next(parts), next(parts)


def _of_source(rows: list[DecodingResult], mark: str) -> list[DecodingResult]:
    """Return the rows of a source; of a directory that was renamed since, those of the same weights."""
    exact = [row for row in rows if row.source == mark]
    digest = mark.partition(" ")[2]
    return exact or [row for row in rows if digest and row.source and row.source.partition(" ")[2] == digest]


def _known(source: str) -> dict[str, Any]:
    """Return the facts in an existing card of the model that no config has."""
    readme, is_directory = Path(source) / "README.md", Path(source).is_dir()
    if is_directory and not readme.is_file():
        return {}
    try:
        card = ModelCard.load(readme if is_directory else source, ignore_metadata_errors=True)
    except (OSError, EntryNotFoundError):
        return {}
    names = ("license", "base_model", "language", "model_name", "datasets", "tags")
    fields = {name: card.data.get(name) for name in names if card.data.get(name)}
    data, how = _part(card.text, "Training Data"), _part(card.text, "Training Procedure")
    return fields | {name: text for name, text in (("training_data", data), ("training_description", how)) if text}


def _part(text: str, heading: str) -> str | None:
    """Return the content under a heading of the third level, unless it states that there is none."""
    match = re.search(rf"^### {heading}\n(.*?)(?=^#{{1,3}} |\Z)", text, re.M | re.S)
    content = match[1].strip() if match else ""
    return content if content and not _UNTOLD.fullmatch(content) else None


def _travelling(source: str) -> str | None:
    """Return the code in a directory (`"bundle"`, `"package"` or None); for a repository of the Hub a bundle."""
    code = Path(source) / CODE_DIRECTORY
    if Path(source).is_dir() and not code.is_dir():
        return None
    return "package" if code.is_dir() and len(list(code.glob("modeling_*.py"))) == 1 else "bundle"
