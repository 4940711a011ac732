"""`tokenahead card`: measures a model on prompts and writes its card. Knows no argument parser."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging

from .. import __version__
from ..modeling.remote_code import CODE_FOLDER
from ..training.byte_text import is_byte_level
from ..training.checkpoints import adapters_for, has_adapters, put_adapters, tokenizer_source, trained_backbone
from ..training.completion import DRAFTERS, causal_class
from ..training.evaluation import MODES, Measurement, environment, hardware
from ..training.evaluation.prompts import read_prompts
from ..training.results import MeasuredResults
from .card import render_card, write_card
from .facts import describe, hub_id

RESULTS = "results.json"
"""The file beside a card that holds the figures as they were measured."""
_UNTOLD = re.compile(r"(What this model was trained on|How this model was trained) was not described\.")


@dataclass(frozen=True)
class CardRequest:
    """Options of `tokenahead card`, whose help says what each is."""

    model: str
    measure: Path | None = None
    backbone: str | None = None
    new_tokens: int = 128
    output: Path | None = None
    license: str | None = None
    language: list[str] | None = None
    base_model: str | None = None
    template: Path | None = None
    overwrite: bool = False
    dtype: str = "auto"


def make_card(request: CardRequest) -> Path:
    """Write the card, and with it the figures, if any were measured.

    What a card there says of data, recipe, licence and languages is kept, and figures of an earlier run are used
    where nothing is measured.

    Returns:
        The path of README.md.

    Raises:
        FileNotFoundError: No such directory, prompts or template.
        FileExistsError: A card that a person wrote, without `overwrite`.
        ValueError: A model that does not draft; no prompts, a drafter without a backbone, a template with an unknown
            field.
        OSError: What the Hub cannot give.
    """
    output = request.output or Path(request.model)
    if request.output is None and not output.is_dir():
        raise FileNotFoundError(
            f"{request.model}: no such directory; for a model of the Hub, name a directory with --output"
        )
    prompts = [] if request.measure is None else [each.turns[0] for each in read_prompts(request.measure)[0]]
    model, generator, tokenizer = _load(request, needs_backbone=bool(prompts))
    try:
        describe(model)
    except TypeError as error:  # before it is measured
        raise ValueError(f"{request.model}: {error}") from error
    known = _known(request.model)
    results = _measured(request, model, generator, tokenizer, prompts) if prompts else _earlier(output)
    card = render_card(
        model,
        results,
        license=request.license or known.pop("license", None),
        base_model=request.base_model or known.pop("base_model", None),
        language=request.language or known.pop("language", None),
        model_name=known.pop("model_name", None) or Path(request.model).resolve().name,
        repo_id=None if Path(request.model).is_dir() else request.model,
        training_data=known.pop("training_data", None),
        training_description=known.pop("training_description", None),
        metadata={name: known[name] for name in ("datasets", "tags") if known.get(name)},
        remote_code=_travelling(request.model),
        template=request.template,
    )
    output.mkdir(parents=True, exist_ok=True)
    path = write_card(output, card, overwrite=request.overwrite)
    if prompts and results is not None:
        results.to_json(output / RESULTS)
    return path


def _load(request: CardRequest, needs_backbone: bool) -> tuple[PreTrainedModel, Any, Tokenizer | None]:
    """Return the model or drafter, what generates with it, and the tokenizer; the last two only to write text."""
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(request.model)
    stands_apart = isinstance(config, DRAFTERS)
    kind = AutoModel if stands_apart else causal_class(config)
    model: PreTrainedModel = kind.from_pretrained(request.model, config=config, dtype=request.dtype).eval()
    if not needs_backbone:
        return model, None, None
    if not stands_apart:
        return model, model, AutoTokenizer.from_pretrained(request.model)
    trained = trained_backbone(request.model)
    name = request.backbone or model.config.base_model_name_or_path
    if not request.backbone and trained is not None and not has_adapters(trained):
        name = str(trained)
    if not name:
        raise ValueError(f"{request.model} holds a drafter, and names no backbone: name one with --backbone")
    backbone = AutoModelForCausalLM.from_pretrained(name, dtype=request.dtype).eval()
    if adapters := adapters_for(request.model, name, "--backbone"):
        put_adapters(backbone, adapters)
    return model, cast(Any, model).attach(backbone), AutoTokenizer.from_pretrained(tokenizer_source(name))


def _measured(
    request: CardRequest, model: PreTrainedModel, generator: Any, tokenizer: Tokenizer | None, prompts: list[str]
) -> MeasuredResults:
    assert tokenizer is not None and request.measure is not None  # there are prompts
    (found,) = Measurement(prompts, request.new_tokens).compare({"drafts": generator}, tokenizer, MODES).values()
    return MeasuredResults(
        results=[comparison.result for comparison in found],
        dataset_name=request.measure.name,
        dataset_description=f"{len(prompts)} prompts, at most {request.new_tokens} new tokens each, one at a time.",
        hardware=torch.cuda.get_device_name() if model.device.type == "cuda" else hardware(),
        dtype=str(model.dtype).removeprefix("torch."),
        command=_command(request),
        library_version=__version__,
        unit="byte" if is_byte_level(tokenizer) else "token",
        accepted_by_position=found[0].result.accepted_by_position,
        environment=environment(),
    )


def _command(request: CardRequest) -> str:
    """Return the command that repeats the run, with names in place of paths of this machine."""
    prompts = request.measure.name if request.measure else ""
    words = ["tokenahead card", hub_id(request.model) or Path(request.model).resolve().name]
    words += ["--measure", prompts, "--new-tokens", str(request.new_tokens)]
    if request.backbone:
        words += ["--backbone", hub_id(request.backbone) or Path(request.backbone).resolve().name]
    return " ".join(words)


def _earlier(output: Path) -> MeasuredResults | None:
    return MeasuredResults.from_json(output / RESULTS) if (output / RESULTS).is_file() else None


def _known(source: str) -> dict[str, Any]:
    """Return what a card of this library beside the model says, and no config does."""
    readme, is_folder = Path(source) / "README.md", Path(source).is_dir()
    if is_folder and not readme.is_file():
        return {}
    try:
        card = ModelCard.load(readme if is_folder else source, ignore_metadata_errors=True)
    except (OSError, EntryNotFoundError):
        return {}
    names = ("license", "base_model", "language", "model_name", "datasets", "tags")
    fields = {name: card.data.get(name) for name in names if card.data.get(name)}
    data, how = _part(card.text, "Training Data"), _part(card.text, "Training Procedure")
    return fields | {name: text for name, text in (("training_data", data), ("training_description", how)) if text}


def _part(text: str, heading: str) -> str | None:
    """Return what stands under a heading of the third level, unless it says that nothing was said."""
    match = re.search(rf"^### {heading}\n(.*?)(?=^#{{1,3}} |\Z)", text, re.M | re.S)
    found = match[1].strip() if match else ""
    return found if found and not _UNTOLD.fullmatch(found) else None


def _travelling(source: str) -> str | None:
    """Return what of the code lies in a directory, or in a repository of the Hub by what its config says."""
    folder = Path(source) / CODE_FOLDER
    if Path(source).is_dir() and not folder.is_dir():
        return None
    return "package" if folder.is_dir() and len(list(folder.glob("modeling_*.py"))) == 1 else "bundle"
