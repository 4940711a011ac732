"""What a head must know of its backbone: the hidden states that it reads, and the sizes of a new head."""

from __future__ import annotations

from inspect import get_annotations
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ...configuration import EagleHeadConfig
from ...configuration.fields import check_options

logger = logging.get_logger(__name__)
_FROM_BACKBONE = ("target_hidden_size", "base_model_name_or_path", "base_model_type")
_DEFAULT_LAYERS = 7
"""Below so many layers, the default choice of hidden states would take one twice."""


def resolved_aux_layers(config: EagleHeadConfig, num_layers: int) -> list[int]:
    """Indices of the hidden states that `fc` reads; [] where it reads none.

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
                f"the backbone has {num_layers} layers, but a head that does not say which hidden states it reads was "
                f"trained on one with at least {_DEFAULT_LAYERS}; pass aux_layers= if you know them"
            )
        return [2, num_layers // 2, num_layers - 3]
    if not all(0 <= index <= num_layers for index in config.aux_layers):
        raise ValueError(
            f"aux_layers={config.aux_layers}: the backbone has {num_layers} layers, so hidden states 0..{num_layers}"
        )
    return list(config.aux_layers)


def backbone_config(backbone: PreTrainedModel, **options: Any) -> EagleHeadConfig:
    """Configuration of a new head: the backbone's sizes and rope, unless `options` says otherwise.

    Raises:
        TypeError: An option that is no field of `EagleHeadConfig`.
        ValueError: A backbone that has several states side by side (Gemma 3n).
    """
    own = [name for name in options if name not in get_annotations(LlamaConfig)]
    check_options(own, EagleHeadConfig, "EagleHead.from_backbone", _FROM_BACKBONE)
    text = backbone.config.get_text_config()
    if getattr(text, "altup_num_inputs", 1) > 1:
        raise ValueError(
            f"{type(backbone).__name__}: its layers hand on {text.altup_num_inputs} states side by side, which an "
            "EAGLE head does not read; MTPHeads do with the last one"
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
    """Warns where a head was made for another kind of model than the one whose sizes fit it; texts stay exact.

    Args:
        config: The head's.
        backbone: What it is attached to.
    """
    is_named = config.base_model_name_or_path is not None
    if config.base_model_type is None or (is_named and config.base_model_name_or_path == backbone.config.name_or_path):
        return
    kinds = {part.model_type for part in (backbone.config, backbone.config.get_text_config())}
    # several kinds may share a class, and a multimodal model has a text model of a kind of its own
    if _class_of(config.base_model_type) not in map(_class_of, kinds):
        logger.warning_once(
            f"This EAGLE head was made for a backbone of model_type {config.base_model_type!r}, and is attached to a "
            f"{type(backbone).__name__} of model_type {backbone.config.model_type!r}: texts stay exact, but few of its "
            "drafts may be accepted."
        )


def _class_of(kind: str) -> str:
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, kind)


def _shared(config: PreTrainedConfig, name: str) -> Any:
    """A size of the layers; of a list the first, and None where layers differ and the config will not say one."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:
        return None
    return value[0] if isinstance(value, (list, tuple)) else value


def _small_aux_layers(num_layers: int) -> list[int]:
    """The default choice, kept inside a small backbone, and three different states where it has as many."""
    last = max(num_layers - 1, 1)
    wanted = sorted(min(max(index, 1), last) for index in (2, num_layers // 2, num_layers - 3))
    if last < len(wanted):
        return wanted
    for place in range(1, len(wanted)):
        wanted[place] = max(wanted[place], wanted[place - 1] + 1)
    return wanted


def _rope(text: PreTrainedConfig) -> dict[str, Any]:
    """The backbone's rope where every layer has the same, over whole heads; else a plain one with its base."""
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict) and "rope_theta" in value]
    if nested or "partial_rotary_factor" in rope or "rope_type" not in rope:
        theta = (nested or [rope])[0].get("rope_theta", 10_000.0)
        return {"rope_type": "default", "rope_theta": theta}
    return dict(rope)
