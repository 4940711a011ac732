"""How far a model's positions go. Knows no torch."""

from __future__ import annotations

from transformers import PreTrainedConfig


def learned_positions(config: PreTrainedConfig | None) -> int | None:
    """Size of a backbone's table of positions; None where positions are computed, and go on."""
    if getattr(config, "rope_parameters", None) is not None:
        return None
    return getattr(config, "max_position_embeddings", None)
