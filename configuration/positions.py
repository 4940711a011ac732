"""How far a model's positions go. Knows no torch."""

from __future__ import annotations

from transformers import PreTrainedConfig


def learned_positions(config: PreTrainedConfig | None) -> int | None:
    """Size of a backbone's table of positions; None where positions are computed, and go on."""
    if getattr(config, "rope_parameters", None) is not None:
        return None
    return getattr(config, "max_position_embeddings", None)


def rotary_border(config: PreTrainedConfig | None) -> tuple[str, int] | None:
    """The rope type of a backbone whose rotary frequencies depend on how long the text is, and up to which length not.

    Two of transformers' types take them from the longest position of a forward: `"dynamic"` and `"longrope"` (Phi-3).
    None: positions have the same frequencies in every text.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    layers = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    kinds = [part for part in layers if part.get("rope_type") in ("dynamic", "longrope")]
    if not kinds:
        return None
    length = getattr(config, "max_position_embeddings", None) or 0
    borders = [part.get("original_max_position_embeddings") or length for part in kinds]
    return kinds[0]["rope_type"], min(borders)
