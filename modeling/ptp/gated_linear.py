"""peft's adapter of a linear layer with a gate, apart from `gated_lora`, so that peft is imported only where used."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import Linear
from torch import Tensor

from .gated_lora import PackedMixin, current_gate, with_adapter


class GatedLinear(PackedMixin, Linear):
    """W x everywhere, and s B (A x) added at auxiliary positions."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Map [..., in] to [..., out]."""
        result, gate = self.base_layer(x), current_gate()
        return result if gate is None else with_adapter(self, gate, x, result)

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        """Make the adapter, once."""
        if self.lora_A:
            raise ValueError("PTPForCausalLM has gated adapters and takes no others: merge them before from_backbone")
        super().update_layer(*args, **kwargs)
