"""The parts of a model that a trainer trains, within what peft and joint training wrap around it."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from torch import nn

from ..configuration import MTPHeadConfig
from ..modeling import DeepSeekMTP, EvaByteForMTPC, MTPHeads
from ..modeling.heads.joint import JointMTPModel


def without_peft(model: Any) -> Any:
    """Return the model within a PeftModel, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def drafter_of(model: nn.Module) -> nn.Module:
    """Return the module that drafts, within a model that a trainer trains."""
    owner = without_peft(model)
    if isinstance(owner, JointMTPModel):
        return owner.heads
    if isinstance(owner, DeepSeekMTP):
        return owner.mtp
    return owner.head if isinstance(owner, EvaByteForMTPC) else owner


def head_of(model: nn.Module) -> nn.Module:
    """Return the part of the drafter that learns in a warm-up: all of it but draft layers."""
    drafter = drafter_of(model)
    return drafter.head if isinstance(drafter, MTPHeads) and drafter.draft_layers is not None else drafter


def draft_layers_of(model: Any) -> nn.Module | None:
    """Return the adapted layers of the backbone that draft; None for models without them."""
    owner = without_peft(model)
    return owner.draft_layers if isinstance(owner, (MTPHeads, EvaByteForMTPC)) else None


def head_config(model: Any) -> MTPHeadConfig | None:
    """Return the config of a model's heads; None for models without heads."""
    owner = without_peft(model)
    config = owner.config.mtp_head if isinstance(owner, EvaByteForMTPC) else owner.config
    return config if isinstance(config, MTPHeadConfig) else None
