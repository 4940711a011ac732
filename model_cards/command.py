"""`tokenahead card`: writes the card of a model with measured results. Knows no argument parser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import PreTrainedModel
from transformers.utils import logging

from ..modeling.common.remote_code import CODE_DIRECTORY
from ..modeling.common.stored_drafters import holds_drafter_alone, read_drafter
from ..training.evaluation.bench import CONTROL, PLAIN
from ..training.loading import load_backbone
from ..training.requests import CardRequest
from ..training.results import MeasuredResults, source_mark
from .card import render_card, write_card

_RESULTS = "results.json"
"""The file of measured results beside a card."""
_KEPT = ("license", "base_model", "language", "model_name", "datasets", "tags")
_PARTS = {"training_data": "Training Data", "training_description": "Training Procedure"}


def make_card(request: CardRequest) -> Path:
    """Write the card, and results beside it, if there are any; return the path of README.md.

    Data, recipe, licence and languages of an existing card are retained.

    Raises:
        FileNotFoundError: No such directory or file of results.
        FileExistsError: A card that a person wrote, without `overwrite`.
        ValueError: A model that does not draft, results that are none, or methods that were not measured.
        OSError: What the Hub cannot give.
    """
    source, is_directory = request.model, Path(request.model).is_dir()
    if request.output is None and not is_directory:
        raise FileNotFoundError(f"{source}: no such directory; for a model of the Hub, name a directory with --output")
    output = request.output or Path(source)
    model = _load(source, request.ignore_fields)
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


def _load(source: str, ignored: list[str] | None) -> PreTrainedModel:
    logging.disable_progress_bar()
    if holds_drafter_alone(source):
        options: dict[str, Any] = {"ignore_fields": ignored} if ignored else {}
        return read_drafter(source, **options).eval()
    return load_backbone(source, "MODEL", "MODEL", dtype="auto").eval()


def _parted(results: MeasuredResults, request: CardRequest) -> tuple[MeasuredResults | None, MeasuredResults | None]:
    """Return the results of the requested model, and those of other methods, without plain decoding; None for none."""
    rows = [row for row in results.results if row.method not in (PLAIN, CONTROL)]
    names = dict.fromkeys(str(row.method) for row in rows)
    if missing := [name for name in request.methods or () if name not in names]:
        raise ValueError(f"--methods {missing[0]}: the results have no such method; they have {', '.join(names)}")
    mark = source_mark(request.model)
    digest = mark.partition(" ")[2]  # of a directory that was renamed since, the weights are the same
    if request.methods:
        own = [row for row in rows if row.method in request.methods]
    else:
        own = [row for row in rows if row.method is None] or [row for row in rows if row.source == mark]
        own = own or [row for row in rows if digest and (row.source or "").partition(" ")[2] == digest]
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
