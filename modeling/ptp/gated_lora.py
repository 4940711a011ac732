"""Low-rank adapters that act on auxiliary rows only: W x everywhere, and B (A x) added on those rows.

The rows of ordinary tokens are computed by the untouched base layers alone, so one checkpoint is exactly the base model
and the student at once. peft makes, initialises and names the adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
"""Name of the adapter, as in peft's parameter names."""


@dataclass
class Gate:
    """Which rows are auxiliary: those from `start` on; None closes the gate.

    Attributes:
        start: Number of ordinary tokens before them.
        length: Rows in all, to find them where a layer sees the rows of all sequences in one axis.
    """

    start: int | None = None
    length: int = 0

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """A view of x, [B, Q, d] or [B Q, d], with an axis of rows: [B, Q, d].

        Raises:
            ValueError: A layer that sees only some rows (those that were routed to an expert, say).
        """
        if x.dim() == 3 and x.shape[1] == self.length:
            return x
        if x.dim() != 2 or x.shape[0] % self.length:
            raise ValueError(f"a layer sees rows {tuple(x.shape)}, not all {self.length} of every sequence: {_ROUTED}")
        return x.unflatten(0, (-1, self.length))


_ROUTED = "auxiliary rows cannot be told apart there, and gated adapters do not fit this backbone"


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

    from .gated_linear import GatedLinear

    kinds = (nn.Linear, Conv1D)
    targets = [name for name, layer in model.named_modules() if isinstance(layer, kinds) and layer is not skip]
    if not targets:
        raise ValueError(f"{type(model).__name__} has no linear layers that gated adapters could be added to")
    config: LoraConfig = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0)
    config._register_custom_module(dict.fromkeys(kinds, GatedLinear))
    inject_adapter_in_model(config, model, ADAPTER)
    gate = Gate()
    for layer in model.modules():
        if isinstance(layer, GatedLinear):
            layer.gate = gate
    return gate


def with_adapter(layer: Any, gate: Gate, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`result` = W x with s B (A x) added on auxiliary rows; the others are passed on as they are."""
    down, up, scale = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], layer.scaling[ADAPTER]
    base, rows = gate.rows(result), gate.rows(x)[:, gate.start :]
    is_decoding = len(base) == 1 and result.dtype == up.weight.dtype and not torch.is_grad_enabled()
    if is_decoding and not up.weight.is_meta:  # fewest kernels, which offloaded weights cannot have
        base[0, gate.start :].addmm_(rows[0] @ down.weight.t(), up.weight.t(), alpha=scale)
        return result
    added = up(down(rows.to(down.weight.dtype))).to(result.dtype)
    total = torch.cat([base[:, : gate.start], torch.add(base[:, gate.start :], added, alpha=scale)], dim=1)
    return total.view(result.shape)
