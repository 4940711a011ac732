"""The configuration of a new head for a backbone, and the hidden states that a head reads."""

from __future__ import annotations

from inspect import get_annotations
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ...configuration import EagleHeadConfig
from ...configuration.fields import check_options, field

logger = logging.get_logger(__name__)
_FROM_BACKBONE = ("target_hidden_size", "base_model_name_or_path", "base_model_type")
_DEFAULT_LAYERS = 7
"""With fewer layers, the default choice of hidden states would repeat one."""


def resolved_aux_layers(config: EagleHeadConfig, num_layers: int) -> list[int]:
    """Return indices of the hidden states that `fc` reads; [] where it reads none.

    Args:
        config: The head's.
        num_layers: L, the backbone's layers.

    Raises:
        ValueError: The backbone has too few layers.
    """
    if not config.num_aux:
        return []
    if config.aux_layers is None:
        if num_layers < _DEFAULT_LAYERS:
            raise ValueError(
                f"aux_layers=None: a head with the default hidden states needs a backbone with at least "
                f"{_DEFAULT_LAYERS} layers, not {num_layers}; pass aux_layers= if you know them"
            )
        return [2, num_layers // 2, num_layers - 3]
    if not all(0 <= index <= num_layers for index in config.aux_layers):
        raise ValueError(
            f"aux_layers={config.aux_layers}: a backbone of {num_layers} layers has hidden states 0..{num_layers}"
        )
    return list(config.aux_layers)


def backbone_config(backbone: PreTrainedModel, **options: Any) -> EagleHeadConfig:
    """Return the configuration of a new head: the backbone's sizes and rope, unless `options` has others.

    Raises:
        TypeError: An option that is not a field of `EagleHeadConfig`.
        ValueError: A backbone with several parallel hidden states (Gemma 3n).
    """
    own = [name for name in options if name not in get_annotations(LlamaConfig)]
    check_options(own, EagleHeadConfig, "EagleHead.from_backbone", _FROM_BACKBONE)
    text = backbone.config.get_text_config()
    if field(text, "altup_num_inputs", 1) > 1:
        raise ValueError(
            f"{type(backbone).__name__}: altup_num_inputs={text.altup_num_inputs}; an EAGLE head reads one state per "
            "layer (MTPHeads read the last one)"
        )
    heads = options.get("num_attention_heads", text.num_attention_heads)
    defaults = {
        "hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "intermediate_size": _shared(text, "intermediate_size") or 4 * text.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": _shared(text, "num_key_value_heads") or heads,
        "head_dim": _shared(text, "head_dim") or text.hidden_size // heads,
        "rms_norm_eps": _shared(text, "rms_norm_eps") or 1e-6,
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": _rope(text),
        "bos_token_id": text.bos_token_id,
        "eos_token_id": text.eos_token_id,
        "pad_token_id": text.pad_token_id,
        "base_model_name_or_path": backbone.config.name_or_path or None,
        "base_model_type": text.model_type,
    }
    if options.get("version", 3) == 3 and options.get("use_aux_hidden_state", True):
        defaults["aux_layers"] = _small_aux_layers(text.num_hidden_layers)
    return EagleHeadConfig(**(defaults | options))


def warn_of_another_kind(config: EagleHeadConfig, backbone: PreTrainedModel) -> None:
    """Warn about a backbone of another kind than the one the head was made for; output remains exact.

    Args:
        config: The head's.
        backbone: The model that it is attached to.
    """
    is_named = config.base_model_name_or_path is not None
    if config.base_model_type is None or (is_named and config.base_model_name_or_path == backbone.config.name_or_path):
        return
    kinds = {part.model_type for part in (backbone.config, backbone.config.get_text_config())}
    # several kinds may share a class, and the text model of a multimodal model has its own kind
    if _class_of(config.base_model_type) not in map(_class_of, kinds):
        logger.warning_once(
            f"This EAGLE head was made for a backbone of model_type {config.base_model_type!r}, and is attached to a "
            f"{type(backbone).__name__} of model_type {backbone.config.model_type!r}: output remains exact, but few "
            "drafts may be accepted."
        )


def _class_of(kind: str) -> str:
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind)


def _shared(config: PreTrainedConfig, name: str) -> Any:
    """Return a size of the layers; of a list the first, and None where layers differ and the config raises."""
    try:
        value = field(config, name)
    except RuntimeError:
        return None
    return value[0] if isinstance(value, (list, tuple)) else value


def _small_aux_layers(num_layers: int) -> list[int]:
    """Return the default choice for a small backbone, three different states where it has three."""
    last = max(num_layers - 1, 1)
    wanted = sorted(min(max(index, 1), last) for index in (2, num_layers // 2, num_layers - 3))
    if last < len(wanted):
        return wanted
    for index in range(1, len(wanted)):
        wanted[index] = max(wanted[index], wanted[index - 1] + 1)
    return wanted


def _rope(text: PreTrainedConfig) -> dict[str, Any]:
    """Return the backbone's rope where all layers share it, over whole heads; else a default one with its base."""
    rope = field(text, "rope_parameters") or {}
    nested = [value for value in rope.values() if isinstance(value, dict) and "rope_theta" in value]
    if nested or "partial_rotary_factor" in rope or "rope_type" not in rope:
        theta = (nested or [rope])[0].get("rope_theta", 10_000.0)
        return {"rope_type": "default", "rope_theta": theta}
    return dict(rope)
