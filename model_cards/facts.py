"""What a card can say of a model without measuring: its class, its head, its sizes. Reads configs, opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from ..configuration import MTPHeadConfig, PTPConfig

_SLOTS = {
    "one_hot": "parallel token prediction; a slot predicts the token that its own uniform picks",
    "categorical": "parallel token prediction; a slot predicts the law of the token behind its own",
}

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
    """What the template says of a model.

    Args:
        class_name: The class of tokenahead that loads it.
        model_type: Its `model_type`.
        drafting: Rows (label, value) that say what drafts.
        window: The longest draft and one.
        kind: `"heads"`, `"modules"` or `"uniforms"`: what the drafts are made with.
        sizes: Rows (label, value) of the table of sizes.
        heads_only: Whether it is heads without a backbone.
        remote_code: Whether its own code travels with it (`auto_map`).
        backbone: Hub id of the backbone that heads without one were trained for, if the config says.
    """

    class_name: str
    model_type: str
    drafting: list[tuple[str, str]]
    window: int
    kind: str
    sizes: list[tuple[str, str]]
    heads_only: bool
    remote_code: bool
    backbone: str | None


def describe(config_or_model: PreTrainedConfig | PreTrainedModel) -> ModelFacts:
    """Collects the facts of a model, or of a config alone (then without the number of parameters).

    Args:
        config_or_model: A model with a multi-token head, heads apart from a backbone, or the config of either.

    Returns:
        The facts.

    Raises:
        TypeError: Neither a config nor a model, or one without a multi-token head.
    """
    model = config_or_model if isinstance(config_or_model, PreTrainedModel) else None
    config = config_or_model if model is None else model.config
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config_or_model is a {type(config).__name__}; it must be a model or its config")
    kind, window, drafting = _drafting(config, model)
    heads_only = config.model_type == MTPHeadConfig.model_type
    return ModelFacts(
        class_name="MTPHeads" if heads_only else _class_name(config, model),
        model_type=config.model_type,
        drafting=drafting,
        window=window,
        kind=kind,
        sizes=_sizes(config.get_text_config(), model),
        heads_only=heads_only,
        remote_code=bool(getattr(config, "auto_map", None)),
        backbone=_hub_id(config.base_model_name_or_path) if heads_only else None,
    )


def _drafting(config: PreTrainedConfig, model: PreTrainedModel | None) -> tuple[str, int, list[tuple[str, str]]]:
    """Kind, window, and rows of the table."""
    if isinstance(config, PTPConfig):
        return _slots(config)
    if modules := getattr(model, "num_modules", 0):
        return (
            "modules",
            modules + 1,
            [("Modules", f"{modules}, sequential; the last one is used again in longer drafts")],
        )
    return _head(config)


def _slots(config: PTPConfig) -> tuple[str, int, list[tuple[str, str]]]:
    window = config.num_slots + (config.variant == "categorical")
    law = ", ".join(f"{name} {value}" for name, value in config.sampling.items())
    rows = [
        ("Drafts", f"`{config.variant}`: {_SLOTS[config.variant]}"),
        ("Slots", f"{config.num_slots}: {window - 1} drafted beside the next token"),
        ("Uniforms as", f"`{config.features}`, {config.feature_dim} features"),
        ("Learned for", law),
    ]
    return "uniforms", window, rows


def _head(config: PreTrainedConfig) -> tuple[str, int, list[tuple[str, str]]]:
    """Of a model's head, or of heads apart."""
    head = config if config.model_type == MTPHeadConfig.model_type else getattr(config, "mtp_head", None)
    if head is None:
        raise TypeError(f"{type(config).__name__} has no `mtp_head`: cards are for models with such a head")
    if head.window is None:
        raise TypeError(f"{type(config).__name__} leaves the head's `window` open; set it before rendering a card")
    rows = [
        ("Head", f"`{head.head_type}`: {head.describe()} ({head.family.citation})"),
        ("Window", f"{head.window}: the next token and {head.window - 1} drafted"),
    ]
    return "heads", head.window, rows


def _hub_id(name: str | None) -> str | None:
    """`name` if it is a Hub id; a path on the machine that trained the heads is nobody else's business."""
    if not name or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _class_name(config: PreTrainedConfig, model: PreTrainedModel | None) -> str:
    """The class to load the model with; a config alone names the one that the Auto classes would build.

    Not `config.architectures`: official files name classes of the official code.
    """
    if model is not None:
        return type(model).__name__
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None:
        raise TypeError(f"{type(config).__name__} has no model class that AutoModelForCausalLM knows; pass the model")
    return found.__name__


def _sizes(config: PreTrainedConfig, model: PreTrainedModel | None) -> list[tuple[str, str]]:
    """Rows of the table of sizes: parameters if a model is at hand, then what the config holds."""
    rows = [] if model is None else [("Parameters", f"{model.num_parameters():,}")]
    values = ((label, getattr(config, name, None)) for name, label in _SIZES.items())
    return rows + [(label, f"{value:,}") for label, value in values if value is not None]
