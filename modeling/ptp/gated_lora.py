"""Low-rank adapters that act on auxiliary rows only: W x everywhere, and B (A x) added on those rows.

The rows of ordinary tokens are computed by the untouched base layers alone, so one checkpoint is exactly the base model
and the student at once. peft makes, initialises and names the adapters, which are float32 at least: in bfloat16 the
steps of an optimizer would be lost in rounding. Adapters that read the same input (q, k and v; gate and up) share one
product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .gates import Gate

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
"""Name of the adapter, as in peft's parameter names."""
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of the layers of one module that read the same input."""


class Siblings:
    """Adapters that read the same input: the rows of all their A's are multiplied at once.

    Args:
        layers: In the order in which the backbone calls them.
    """

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self._packed: tuple[tuple, torch.Tensor, list[torch.Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles pack their own."""
        return {"layers": self.layers, "_packed": None}

    def low(self, layer: Any, gate: Gate, x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        """A x of one adapter, on auxiliary rows.

        Args:
            layer: Whose; the first computes those of all, if the others are called with the same tensor.
            gate: Of the call.
            x: [B, Q, in] or [B Q, in], as the layer got it.
            down: [n r, in], the A's of all.

        Returns:
            [B, A, r] in the dtype of `down`.
        """
        index, shared = self.layers.index(layer), gate.shared
        if shared is not None and shared[0] is x and shared[1] is self:
            return shared[2][index]
        rows = gate.rows(x)[:, gate.start :].to(down.dtype)
        rank = len(down) // len(self.layers)
        if index:
            return nn.functional.linear(rows, down[index * rank : (index + 1) * rank])
        parts = nn.functional.linear(rows, down).split(rank, dim=-1)
        gate.shared = x, self, parts
        return parts[0]

    def together(self) -> torch.Tensor:
        """The A's of all, [n r, in], with gradients."""
        downs = [layer.lora_A[ADAPTER].weight for layer in self.layers]
        return downs[0] if len(downs) == 1 else torch.cat(downs)

    def packed(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """What decoding multiplies by: the A's of all [n r, in], and each s B [out, r].

        Kept until a weight changes; `forget` where that does not show (weights that are set through `.data`).
        """
        halves = [(layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight) for layer in self.layers]
        scales = tuple(layer.scaling[ADAPTER] for layer in self.layers)
        marks = (
            dtype,
            scales,
            *((id(half), half._version, half.dtype, half.device) for pair in halves for half in pair),
        )
        if self._packed is None or self._packed[0] != marks:
            down = torch.cat([down for down, _ in halves]).to(dtype)
            ups = [(up * scale).to(dtype) for (_, up), scale in zip(halves, scales)]
            self._packed = marks, down, ups
        return self._packed[1:]

    def forget(self) -> None:
        """Packs anew in the next call."""
        self._packed = None

    @property
    def halves(self) -> list[torch.Tensor]:
        """All A's and B's."""
        kinds = [kind for layer in self.layers for kind in (layer.lora_A, layer.lora_B)]
        return [kind[ADAPTER].weight for kind in kinds]


def gate_linears(model: nn.Module, rank: int, alpha: float, skip: nn.Module | None = None) -> None:
    """Gives every linear layer of a model a gated adapter of float32 (float64 for layers of float64).

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
    for layer in model.modules():
        if isinstance(layer, GatedLinear):
            dtype = torch.promote_types(layer.base_layer.weight.dtype, torch.float32)
            layer.lora_A.to(dtype), layer.lora_B.to(dtype)
    for module in list(model.modules()):
        _join(module, GatedLinear)


def _join(parent: nn.Module, kind: type) -> None:
    """Tells the adapted layers of one module which of them read the same input."""
    layers = {name: layer for name, layer in parent.named_children() if isinstance(layer, kind)}
    for names in _TOGETHER:
        found = [layers[name] for name in names if name in layers]
        if len(found) == len(names) and len({layer.in_features for layer in found}) == 1:
            _tell(found)
            layers = {name: layer for name, layer in layers.items() if name not in names}
    for layer in layers.values():
        _tell([layer])


def _tell(layers: list[Any]) -> None:
    siblings = Siblings(layers)
    for layer in layers:
        layer.siblings = siblings


def with_adapter(layer: Any, gate: Gate, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """`result` = W x with s B (A x) added on auxiliary rows; the others are passed on as they are."""
    base, start, siblings, halves = gate.rows(result), gate.start, layer.siblings, layer.siblings.halves
    is_learning = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if not is_learning and not any(half.is_meta or half.is_inference() for half in halves):
        # fewest kernels: sums are made in place
        down, ups = siblings.packed(result.dtype)
        low = siblings.low(layer, gate, x, down)
        up = ups[siblings.layers.index(layer)].t()
        if len(base) == 1:
            base[0, start:].addmm_(low[0], up)
        else:
            base[:, start:].baddbmm_(low, up.expand(len(base), -1, -1))
        return result
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    if any(half.is_meta for half in halves):  # offloaded: weights arrive with the call of their own layer
        added = up(down(gate.rows(x)[:, start:].to(torch.promote_types(x.dtype, torch.float32))))
    else:
        added = nn.functional.linear(siblings.low(layer, gate, x, siblings.together()), up.weight)
    added = base[:, start:].add(added.to(result.dtype), alpha=layer.scaling[ADAPTER])
    return (added if start == 0 else torch.cat([base[:, :start], added], dim=1)).view(result.shape)
