"""Configurations of new block drafters for a backbone."""

from __future__ import annotations

from inspect import get_annotations
from typing import Any

from transformers import PreTrainedModel, Qwen3Config

from ...configuration.block import BlockDrafterConfig
from ...configuration.fields import check_options, field
from ...generation.tensors.wrapped_models import input_embeddings
from ..common.drafter_configs import check_kind, layer_fields
from .layouts.flat import default_ids

_FROM_BACKBONE = ("target_hidden_size", "num_target_layers", "base_model_name_or_path", "base_model_type")


def backbone_config(backbone: PreTrainedModel, **options: Any) -> BlockDrafterConfig:
    """Return the configuration of a new drafter: the backbone's sizes and rope, unless `options` has others."""
    own = [name for name in options if name not in get_annotations(Qwen3Config)]
    check_options(own, BlockDrafterConfig, "BlockDrafter.from_backbone", _FROM_BACKBONE)
    check_kind(backbone)
    text = backbone.config.get_text_config()
    total = text.num_hidden_layers
    defaults = layer_fields(text, options) | {
        "target_hidden_size": text.hidden_size,
        "num_target_layers": total,
        "feature_layers": _feature_layers(total, options.get("num_hidden_layers", 5)),
        "mask_token_id": _unused_row(backbone),
        "base_model_name_or_path": backbone.config.name_or_path or None,
        "base_model_type": text.model_type,
    }
    return BlockDrafterConfig(**(defaults | options))


def _feature_layers(total: int, layers: int) -> list[int]:
    """Return z-lab's choice of hidden states, distinct ones before the final norm of a backbone with few layers."""
    wanted = [index + 1 for index in default_ids(total, layers)]
    return sorted({min(max(index, 1), max(total - 1, 0)) for index in wanted})


def _unused_row(backbone: PreTrainedModel) -> int:
    """Return the last row of the table of embeddings, which no text has where the table is padded."""
    rows = len(input_embeddings(backbone).weight)
    return min(rows, field(backbone.config.get_text_config(), "vocab_size", default=rows)) - 1
