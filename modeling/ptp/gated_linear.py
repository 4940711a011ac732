"""peft's adapter of a linear layer, behind a gate. Apart from `gated_lora`, so that peft is imported only where used.

At the top of a module, so that models can be pickled; the gate is the layer's own, so that a copy follows its copy's.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear

from .gated_lora import Gate, with_adapter


class GatedLinear(Linear):
    """W x everywhere, and s B (A x) added on auxiliary rows.

    Attributes:
        gate: Which rows those are; all layers of a model share one.
    """

    gate = Gate()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., in] to [..., out]."""
        result = self.base_layer(x)
        return result if self.gate.start is None else with_adapter(self, self.gate, x, result)

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        """Makes the adapter, once.

        Raises:
            ValueError: Another adapter, which could not be told from this one.
        """
        if self.lora_A:
            raise ValueError(
                "this layer has gated adapters of its own (PTPForCausalLM), and takes no others: adapt and merge the "
                "backbone before PTPForCausalLM.from_backbone, or train the student with train_only('student')"
            )
        super().update_layer(*args, **kwargs)
