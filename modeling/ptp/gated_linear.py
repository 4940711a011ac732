"""Gated adapters as layers of peft, which is imported with this file: only models with slots wait for it."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...generation.backbone.wrapped_models import LayerDivision
from .gated_lora import ADAPTER, PackedMixin, current_gate, join_siblings, with_adapter


class GatedLinear(PackedMixin, Linear):
    """W x everywhere, and s B (A x) added at auxiliary positions."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        result, gate = self.base_layer(x), current_gate()
        return result if gate is None else with_adapter(self, gate, x, result)

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        if self.lora_A:
            raise ValueError("PTPForCausalLM has gated adapters and takes no others: merge them before from_backbone")
        if isinstance(layer := self.base_layer, nn.Linear):  # peft counts the features of this process
            self.in_features, self.out_features = layer.in_features, layer.out_features
        self.division = LayerDivision.of(layer)
        super().update_layer(*args, **kwargs)


def gate_linears(model: nn.Module, rank: int, alpha: float, skip: nn.Module | None = None) -> None:
    """Give all linear layers of a model but `skip` gated adapters, float32 (float64 in float64 layers), in place."""
    kinds = (nn.Linear, Conv1D)
    targets = [name for name, layer in model.named_modules() if isinstance(layer, kinds) and layer is not skip]
    if not targets:
        raise ValueError(f"{type(model).__name__} has no linear layers that gated adapters could be added to")
    config: LoraConfig = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)  # type: ignore[arg-type]
    config._register_custom_module(dict.fromkeys(kinds, GatedLinear))
    inject_adapter_in_model(config, model, ADAPTER)
    for layer in model.modules():
        if isinstance(layer, GatedLinear):
            dtype = torch.promote_types(layer.weight.dtype, torch.float32)
            layer.lora_A.to(dtype), layer.lora_B.to(dtype)
    join_siblings(model)
