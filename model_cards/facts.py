"""What a card can say of a model without measuring: its class, its head, its sizes. Reads configs, opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from ..configuration import MTPHeadConfig

_HEADS = {"ff": "independent positions"}

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
        head: The config of its multi-token head, with `window` set.
        sizes: Rows (label, value) of the table of sizes.
        heads_only: Whether it is heads without a backbone.
        remote_code: Whether its own code travels with it (`auto_map`).
        backbone: Hub id of the backbone that heads without one were trained for, if the config says.
    """

    class_name: str
    model_type: str
    head: MTPHeadConfig
    sizes: list[tuple[str, str]]
    heads_only: bool
    remote_code: bool
    backbone: str | None

    @property
    def head_description(self) -> str:
        """The head's family in words."""
        return _HEADS.get(self.head.head_type, f"a circuit of rank {self.head.rank}")


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
    head = _head_of(config)
    heads_only = head is config
    return ModelFacts(
        class_name="MTPHeads" if heads_only else _class_name(config, model),
        model_type=config.model_type,
        head=head,
        sizes=_sizes(config, model),
        heads_only=heads_only,
        remote_code=bool(getattr(config, "auto_map", None)),
        backbone=_hub_id(head.base_model_name_or_path) if heads_only else None,
    )


def _head_of(config: object) -> MTPHeadConfig:
    """The head's config: of the model's, or the config itself for heads apart."""
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config_or_model is a {type(config).__name__}; it must be a model or its config")
    head = config if config.model_type == MTPHeadConfig.model_type else getattr(config, "mtp_head", None)
    if head is None:
        raise TypeError(f"{type(config).__name__} has no `mtp_head`: cards are for models with such a head")
    if head.window is None:
        raise TypeError(f"{type(config).__name__} leaves the head's `window` open; set it before rendering a card")
    return head


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
