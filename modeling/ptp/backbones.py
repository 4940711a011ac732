"""Checks that a model can carry auxiliary rows: full attention with dense masks, and explicit positions."""

from __future__ import annotations

from inspect import signature

from transformers import PreTrainedConfig, PreTrainedModel

from ...configuration.fields import field


def check_config(config: PreTrainedConfig) -> None:
    """Refuse a model by its configuration.

    Raises:
        ValueError: Sliding windows, or layers of other kinds than full attention.
    """
    kinds, window = set(field(config, "layer_types") or []), field(config, "sliding_window")
    if window and field(config, "use_sliding_window") is not False and kinds != {"full_attention"}:
        raise ValueError(
            f"{config.model_type}: sliding_window={window}; auxiliary rows need a backbone with full "
            "attention in every layer"
        )
    if kinds - {"full_attention"}:
        raise ValueError(f"{config.model_type}: layers of types {sorted(kinds)}; only full attention can be verified")


def check_logits(config: PreTrainedConfig) -> None:
    """Refuse a model whose logits are not those of its head.

    Raises:
        ValueError: Logits that are scaled or capped.
    """
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if (value := field(config, name)) not in (None, 1.0):
            raise ValueError(f"{config.model_type}: {name}={value}; logits must be lm_head's own")


def check_model(backbone: PreTrainedModel) -> None:
    """Refuse a model by its class.

    Raises:
        ValueError: A recurrent state, positions that cannot be chosen, attention without dense masks.
    """
    name = backbone.config.model_type
    if hasattr(backbone, "_new_cache"):
        raise ValueError(f"{name}: its attention has a cache of its own and takes no dense masks, which rows need")
    if backbone._is_stateful:
        raise ValueError(f"{name}: a recurrent state cannot be cropped; only full attention can be verified")
    if "position_ids" not in signature(backbone.get_decoder().forward).parameters:
        raise ValueError(f"{name}: its forward takes no position_ids, and auxiliary rows need their own positions")
    check_attention(backbone.config, "auxiliary rows")


def check_attention(config: PreTrainedConfig, rows: str) -> None:
    """Refuse an implementation of attention that takes no dense masks.

    Args:
        config: Of the model.
        rows: What needs them, for the message.

    Raises:
        ValueError: It is neither eager nor sdpa.
    """
    used = config.get_text_config()._attn_implementation
    if used not in ("eager", "sdpa"):
        raise ValueError(
            f"{config.model_type}: attn_implementation={used!r} takes no dense masks, which {rows} need; load it with "
            "'sdpa' or 'eager'"
        )
