"""The facts of a model for its card, without measuring: class, head, sizes. Reads configs, opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel

from ..generation.drafter import BaseDrafter
from ..modeling.common.loading import StrictLoadingMixin
from ..modeling.common.remote_code import REQUIREMENT

_SIZES = {
    "hidden_size": "Width",
    "num_hidden_layers": "Layers",
    "num_attention_heads": "Attention heads",
    "intermediate_size": "Feed-forward width",
    "vocab_size": "Token ids",
    "window_size": "Attention window (tokens)",
    "chunk_size": "Attention chunk (tokens)",
    "max_position_embeddings": "Longest context (tokens)",
}


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model for the template.

    Args:
        class_name: The class of tokenahead that loads it.
        model_type: Its `model_type`.
        drafting: Rows (label, value) that describe the drafter.
        window: The longest draft and one.
        kind: `"heads"`, `"modules"`, `"uniforms"`, `"eagle"` or `"block"`: the type of drafter.
        sizes: Rows (label, value) of the table of sizes.
        heads_only: Whether it is a drafter without a backbone, to be attached to one.
        remote_code: The code that travels with it: `"bundle"`, `"package"` or None.
        requires: Packages that this code needs, for `pip install`.
        backbone: Hub id of the backbone that a drafter without one was trained for, if known.
        citations: BibTeX entries of the papers that describe it.
    """

    class_name: str
    model_type: str
    drafting: list[tuple[str, str]]
    window: int
    kind: str
    sizes: list[tuple[str, str]]
    heads_only: bool
    remote_code: str | None
    requires: tuple[str, ...]
    backbone: str | None
    citations: list[str]


def describe(config_or_model: PreTrainedConfig | PreTrainedModel, remote_code: str | None = "auto") -> ModelFacts:
    """Return the facts of a model, or of a config alone (then without the number of parameters).

    `remote_code` is the code that travels with it, as for `push_to_hub`.

    Raises:
        TypeError: Neither a config nor a model, or one without a multi-token head.
    """
    model = config_or_model if isinstance(config_or_model, PreTrainedModel) else None
    config = config_or_model if model is None else model.config
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config_or_model is a {type(config).__name__}; it must be a model or its config")
    model_class = _class(config) if model is None else type(model)
    if not issubclass(model_class, BaseDrafter):
        raise TypeError(
            f"{type(config).__name__} has no `mtp_head`, and is no config of a drafter: cards are for models that draft"
        )
    facts, heads_only = model_class.facts(config, model), model_class.is_apart
    if not issubclass(model_class, StrictLoadingMixin):
        remote_code = None
    elif remote_code == "auto":
        remote_code = "bundle" if model_class.travels_when_pushed else None
    needs = [f"'{REQUIREMENT}'", *(["peft"] if facts.kind == "uniforms" else [])]
    return ModelFacts(
        class_name=model_class.__name__,
        model_type=config.model_type,
        drafting=facts.rows,
        window=facts.window,
        kind=facts.kind,
        sizes=_sizes(config.get_text_config(), model),
        heads_only=heads_only,
        remote_code=remote_code,
        requires=("torch", *needs),
        backbone=backbone_id(vars(config).get("base_model_name_or_path")) if heads_only else None,
        citations=_citations(facts.papers),
    )


def _citations(papers: tuple[str, ...]) -> list[str]:
    """Return BibTeX entries; a paper that is not in `citations.bib` is one itself."""
    text = (Path(__file__).parent / "templates" / "citations.bib").read_text(encoding="utf-8")
    entries = {entry.partition("{")[2].partition(",")[0]: entry.strip() for entry in text.split("\n\n")}
    return [entries.get(paper, paper) for paper in papers]


def hub_id(name: str | None) -> str | None:
    """Return `name` if it is a Hub id, and None for a local path."""
    if not name or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def backbone_id(name: str | None) -> str | None:
    """Return `name` if it is `owner/name` on the Hub: a bare name in a config was a directory as a rule."""
    return hub_id(name) if name and "/" in name else None


def _class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that the Auto classes would build.

    Not `config.architectures`: official files name classes of the official code.
    """
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if (model_class := mapping.get(type(config), None)) is not None:
            return cast(type[PreTrainedModel], model_class)
    raise TypeError(f"{type(config).__name__} has no model class that AutoModelForCausalLM knows; pass the model")


def _sizes(config: PreTrainedConfig, model: PreTrainedModel | None) -> list[tuple[str, str]]:
    """Return rows of the table of sizes: parameters if there is a model, then fields of the config."""
    rows = [] if model is None else [("Parameters", f"{model.num_parameters():,}")]
    values = ((label, getattr(config, name, None)) for name, label in _SIZES.items())
    return rows + [(label, f"{value:,}") for label, value in values if value is not None]
