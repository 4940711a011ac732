"""Modules that FSDP2 shards on their own, called in the middle of a loss.

A loss in chunks goes backward through the unembedding while the model's forward is still running. The hooks of such a
unit would take that for the end of its own backward, give its weight back and leave the gradient that comes later
unreduced. So here a unit is gathered first, and then its `forward` is called, which has no hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def is_unit(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers and shards this module on its own."""
    return hasattr(module, "unshard")


def gather(modules: Iterable[nn.Module]) -> None:
    """Make the parameters of units whole; they are sharded again in backward."""
    for module in modules:
        if is_unit(module):
            module.unshard()


def call(module: nn.Module, *args: Any) -> Any:
    """`module(*args)`, of a unit without what its hooks would do."""
    if not is_unit(module):
        return module(*args)
    module.unshard()
    return module.forward(*args)


def call_frozen(unit: nn.Module, *args: Any) -> torch.Tensor:
    """`call` of a unit, through which gradients reach the arguments but no parameter."""
    unit.unshard()
    learning = [parameter for parameter in unit.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        return unit.forward(*args)
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
