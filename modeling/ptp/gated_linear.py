"""peft's adapter of a linear layer with a gate, apart from `gated_lora`, so that peft is imported only where used."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import Linear
from torch import Tensor

from .gated_lora import Siblings, current_gate, with_adapter


class GatedLinear(Linear):
    """W x everywhere, and s B (A x) added at auxiliary positions.

    Attributes:
        siblings: The adapters that read the same input, this one among them.
    """

    siblings: Siblings | None = None

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Map [..., in] to [..., out]."""
        result, gate = self.base_layer(x), current_gate()
        return result if gate is None else with_adapter(self, gate, x, result)

    def train(self, mode: bool = True) -> GatedLinear:
        """Set the mode, as of any module; packed weights are made again."""
        self._forget()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> GatedLinear:
        self._forget()
        return super()._apply(*args, **kwargs)

    def _forget(self) -> None:
        if self.siblings is not None:
            self.siblings.forget()

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        """Make the adapter, once."""
        if self.lora_A:
            raise ValueError("PTPForCausalLM has gated adapters and takes no others: merge them before from_backbone")
        super().update_layer(*args, **kwargs)
