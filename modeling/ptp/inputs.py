"""What is refused of the rows that a forward is given. Knows no network."""

from __future__ import annotations

import torch

from ...configuration.ptp import PTPConfig
from .embedding import GREEDY


def check_positions(config: PTPConfig, position_ids: torch.Tensor) -> None:
    """Learned positions end with their table."""
    limit = config.learned_positions
    if limit is not None and position_ids.numel() and int(position_ids.max()) >= limit:
        raise ValueError(
            f"position {int(position_ids.max())} is beyond the {limit} learned positions of "
            f"{config.backbone_config.model_type} (max_position_embeddings); auxiliary rows need room too"
        )


def has_slots(config: PTPConfig, uniforms: torch.Tensor | None, masks: torch.Tensor | None) -> bool:
    """Whether rows stand behind the tokens; refuses those of another variant."""
    name, given, other = ("uniforms", uniforms, masks) if config.reads_uniforms else ("masks", masks, uniforms)
    if other is not None:
        raise ValueError(f"variant={config.variant!r}: slots are given as {name}=, and nothing else")
    return given is not None


def check_uniforms(uniforms: torch.Tensor, may_be_greedy: bool) -> None:
    """Refuses numbers outside [0, 1), and dtypes of few bits."""
    if not uniforms.is_floating_point() or uniforms.dtype in (torch.float16, torch.bfloat16):
        raise ValueError(f"uniforms have dtype {uniforms.dtype}; give float32 or float64, fewer bits say too little")
    if uniforms.device.type != "cpu":
        return  # to look at their values the host would wait for an accelerator in every forward
    valid = (uniforms >= 0) & (uniforms < 1)
    if not bool((valid | (uniforms == GREEDY) if may_be_greedy else valid).all()):
        low, high = float(uniforms.min()), float(uniforms.max())
        raise ValueError(f"uniforms must lie in [0, 1), but they lie between {low} and {high}")


def check_masks(masks: torch.Tensor, count: int) -> None:
    """Refuses masks that there are not."""
    if masks.device.type != "cpu" or not masks.numel():
        return
    low, high = int(masks.min()), int(masks.max())
    if not 0 <= low <= high < count:
        raise ValueError(f"masks lie between {low} and {high}, but there are num_slots={count} of them, from 0 on")
