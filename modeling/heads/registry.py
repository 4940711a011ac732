"""Building and initialising a head of any family."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from ...configuration import MTPHeadConfig
from .circuit_head import CircuitHead as CircuitHead
from .family import FAMILIES
from .ff import FFHead as FFHead
from .hydra import HydraHead as HydraHead
from .layer import LayerHead as LayerHead
from .medusa import MedusaHead as MedusaHead


@runtime_checkable
class Resettable(Protocol):
    """A module that initialises its own parameters."""

    def reset_head(self, std: float) -> None:
        """Initialise all but loaded tensors; `std` is `initializer_range` of the model."""


def build_head(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> nn.Module:
    """Return the head module that `config` describes."""
    return FAMILIES[config.head_type].build(config, hidden_size, vocab_size)


def init_head(module: nn.Module, std: float = 0.02) -> None:
    """Initialise the parameters that a module of a head holds itself (`Resettable`), for a model's `_init_weights`."""
    if isinstance(module, Resettable):
        module.reset_head(std)
