"""Low-rank adapters that act on auxiliary rows only: W x everywhere, and B (A x) added on those rows.

The rows of ordinary tokens are computed by the untouched base layers alone, so one checkpoint is exactly the base model
and the student at once. peft makes, initialises and names the adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
"""Name of the adapter, as in peft's parameter names."""


@dataclass
class Gate:
    """Which rows are auxiliary: those from `start` on; None closes the gate.

    Attributes:
        start: Number of ordinary tokens before them.
    """

    start: int | None = None


def gate_linears(model: nn.Module, rank: int, alpha: float, skip: nn.Module | None = None) -> Gate:
    """Gives every linear layer of a model a gated adapter, and returns the gate that they share.

    Args:
        model: Changed in place: its linear layers get peft's `lora_A`, `lora_B` and `base_layer`.
        rank: r.
        alpha: Scale times r.
        skip: A layer to leave alone, the head say.

    Raises:
        ValueError: The model has no linear layers to adapt.
        ImportError: peft is not installed.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora.layer import Linear

    gate = Gate()

    class GatedLinear(Linear):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            result = self.base_layer(x)
            if gate.start is None:
                return result
            rows = x[:, gate.start :]
            low = self.lora_A[ADAPTER](rows.to(self.lora_A[ADAPTER].weight.dtype))
            added = self.lora_B[ADAPTER](low) * self.scaling[ADAPTER]
            return torch.cat([result[:, : gate.start], result[:, gate.start :] + added.to(result.dtype)], dim=1)

    targets = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not skip]
    if not targets:
        raise ValueError(f"{type(model).__name__} has no nn.Linear layers that gated adapters could be added to")
    config: LoraConfig = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    config._register_custom_module({nn.Linear: GatedLinear})
    inject_adapter_in_model(config, model, ADAPTER)
    return gate
