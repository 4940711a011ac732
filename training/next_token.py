"""Accuracy and entropy of the backbone's own next-token distribution, which TRL logs beside every loss. Knows no
trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..modeling.heads.backbone_parts import backbone_parts
from ..modeling.heads.chunks import LOGITS_PER_CHUNK
from ..modeling.heads.losses import IGNORE, depth_targets

NAMES = ("mean_token_accuracy", "entropy")
"""What is measured, as TRL calls it; entropy in nats."""


@torch.no_grad()
def next_token_sums(model: Any, states: torch.Tensor, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over all targets, so many positions at a time that their logits stay small.

    Args:
        model: A model with a next-token head, or a drafter that is attached to one.
        states: The backbone's last hidden states, [B, L, d].
        inputs: `labels` or `shift_labels`, and what there is of `attention_mask` and `position_ids`.

    Returns:
        Sums [2] of `NAMES`, and counts [2].
    """
    names = ("labels", "attention_mask", "position_ids", "shift_labels")
    labels, mask, positions, shifted = (inputs.get(name) for name in names)
    targets = depth_targets(labels, 1, mask, positions, shifted)[..., 0]
    scored = targets != IGNORE
    unembed, sums = _unembedding(model), states.new_zeros(2, dtype=torch.float32)
    size = max(1, LOGITS_PER_CHUNK // model.config.get_text_config().vocab_size)
    for part, target in zip(states[scored].split(size), targets[scored].split(size)):
        log_distribution = unembed(part).float().log_softmax(-1)
        sums[0] += (log_distribution.argmax(-1) == target).sum()
        sums[1] -= (log_distribution.exp() * log_distribution).nan_to_num(nan=0.0).sum()
    return sums, scored.sum().expand(2)


def _unembedding(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return getattr(model, "readout", None) or backbone_parts(getattr(model, "backbone", model)).unembed
