"""Low-rank adapters that act on auxiliary positions only: W x everywhere, and B (A x) added there.

Ordinary tokens are computed by the unchanged base layers alone, so that one checkpoint is exactly the base model and
the student at once. Adapters that read the same input (q, k and v; gate and up) share one product. A gate marks the
auxiliary positions, per call and thread."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...generation.backbone.wrapped_models import LayerDivision

ADAPTER = "default"
"""Name of the adapter, as in peft's parameter names."""
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of the layers of one module that read the same input."""
Products = list[tuple[Tensor, Tensor]]
"""A x and s B of each of some adapters."""


@dataclass
class Gate:
    """Which positions of one forward are auxiliary: those from `start` on.

    Attributes:
        length: Number of all positions, to find them where a layer has all sequences on one axis.
        model: The model that opened it, whose hooks alone obey.
        shared: The last input that adapters shared, these adapters, and their products.
    """

    start: int
    length: int
    model: object = None
    shared: tuple[Tensor, SharedInputAdapters, Products] | None = None

    def unflattened(self, x: Tensor) -> Tensor:
        """Return a view [B, Q, d] of x, [B, Q, d] or [B Q, d]."""
        if x.dim() == 3 and x.shape[1] == self.length:
            return x
        if x.dim() != 2 or x.shape[0] % self.length:
            raise ValueError(f"a layer reads {tuple(x.shape)}: its adapter needs {self.length} rows of every sequence")
        return x.unflatten(0, (-1, self.length))


_OF_THREAD = threading.local()  # no ContextVar: torch.compile cannot read one


def current_gate() -> Gate | None:
    """Return the gate of the forward that is running in this thread; None where it is closed."""
    return getattr(_OF_THREAD, "gate", None)


@contextmanager
def opened(gate: Gate | None) -> Iterator[None]:
    """Open a gate, or close it (None), for the layers that are called inside."""
    before = current_gate()
    _OF_THREAD.gate = gate
    try:
        yield
    finally:
        _OF_THREAD.gate = before


def _checkpoint_with_gate(checkpoint: Callable[..., object], function: Callable[..., object], *args: object) -> object:
    gate = current_gate()

    def gated(*inputs: object) -> object:
        with opened(None if gate is None else replace(gate, shared=None)):
            return function(*inputs)

    return checkpoint(gated, *args)


def preserve_gates(model: nn.Module) -> None:
    """Let checkpointing layers of a model find the gate of their forward in backward, in any thread; idempotent."""
    for module in model.modules():
        known = vars(module).get("_gradient_checkpointing_func")
        if known is not None and getattr(known, "func", None) is not _checkpoint_with_gate:
            vars(module)["_gradient_checkpointing_func"] = partial(_checkpoint_with_gate, known)


class SharedInputAdapters:
    """Adapters that read the same input, in the order of their calls: decoding multiplies all their A's at once."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.known: tuple[tuple, list[Tensor], Tensor, list[Tensor]] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"layers": self.layers, "known": None}

    def add(self, layer: Any, gate: Gate, x: Tensor, result: Tensor) -> bool:
        """Add s B A x to auxiliary positions of `result` in place, in few kernels; False without packed weights."""
        base, shared = gate.unflattened(result), gate.shared
        if shared is not None and shared[0] is x and shared[1] is self:
            parts = shared[2]
        else:
            # on processors, narrow products of this size take longer than wide ones
            is_slow = result.device.type == "cpu" and result.dtype in (torch.bfloat16, torch.float16)
            packed = self.packed(torch.float32 if is_slow else result.dtype)
            if packed is None:
                return False
            down, ups = packed
            low = nn.functional.linear(gate.unflattened(x)[:, gate.start :].to(down.dtype), down)  # [B, A, n r]
            if layer.division is not None and layer.division.of_inputs:
                low = layer.division.summed(low)
            parts = list(zip(low.split(len(down) // len(ups), dim=-1), ups))  # n of [B, A, r] and [r, out]
            gate.shared = x, self, parts
        low, up = parts[self.layers.index(layer)]
        if up.dtype != base.dtype:  # autocast may have cast `low` alone
            base[:, gate.start :].add_(low @ up)  # [B, A, out]
        elif len(base) == 1:
            base[0, gate.start :].addmm_(low[0], up)  # [A, out]
        else:
            base[:, gate.start :].baddbmm_(low, up.expand(len(base), -1, -1))
        return True

    def packed(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]] | None:
        """Return the factors of decoding: the A's of all [n r, in], and each s B, transposed: [r, out].

        Cached until the version of a weight changes. None where weights are offloaded, or have no version.
        """
        kinds = [kind for layer in self.layers for kind in (layer.lora_A, layer.lora_B)]
        halves: list[Tensor] = [kind[ADAPTER].weight for kind in kinds]
        if any(half.is_meta or half.is_inference() for half in halves):
            return None
        key = (dtype, halves[0].dtype, halves[0].device, *(half._version for half in halves))
        known = self.known
        if known is not None and known[0] == key and all(map(operator.is_, known[1], halves)):
            return known[2], known[3]
        down = torch.cat([_share(layer, half, True) for layer, half in zip(self.layers, halves[::2])]).to(dtype)
        ups = [_share(layer, half, False) * layer.scaling[ADAPTER] for layer, half in zip(self.layers, halves[1::2])]
        ups = [up.to(dtype).t().contiguous() for up in ups]  # n of [r, out]
        self.known = key, halves, down, ups  # with the weights, so that no other can be taken for one of them
        return down, ups


def _share(layer: Any, weight: Tensor, of_inputs: bool) -> Tensor:
    """Return what this process needs of an A [r, in] or a B [out, r]."""
    division: LayerDivision | None = layer.division
    return weight if division is None or division.of_inputs != of_inputs else division.share(weight)


class PackedMixin(nn.Module):
    """A layer's adapter, whose packed weights are made again where it is moved, cast or set to another mode.

    `siblings` are the adapters that read the same input, this one among them.
    """

    siblings: SharedInputAdapters | None = None
    division: LayerDivision | None = None

    def train(self, mode: bool = True) -> Any:
        self.forget()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.forget()
        return super()._apply(*args, **kwargs)

    def forget(self) -> None:
        if self.siblings is not None:
            self.siblings.known = None


def join_siblings(model: nn.Module) -> None:
    """Give all adapters inside a model their `siblings`."""
    for parent in list(model.modules()):
        layers: dict[str, Any] = {name: each for name, each in parent.named_children() if isinstance(each, PackedMixin)}
        for names in [*_TOGETHER, *([name] for name in layers)]:
            group = [layers[name] for name in names if name in layers and layers[name].siblings is None]
            if len(group) == len(names) and len({layer.in_features for layer in group}) == 1:
                siblings = SharedInputAdapters(group)
                for layer in group:
                    layer.siblings = siblings


@torch.no_grad()
def zero_ups(model: nn.Module) -> None:
    """Set every B to zeros, so that the slots of a new student begin with what the backbone computes."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.zero_()


def with_adapter(layer: Any, gate: Gate, x: Tensor, result: Tensor) -> Tensor:
    """Return `result` = W x with s B (A x) added at auxiliary positions; the others are unchanged."""
    is_learning = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if not is_learning and layer.siblings.add(layer, gate, x, result):
        return result
    # the halves are called, not read: weights that are offloaded arrive with the call of their own layer
    base, down, up, start = gate.unflattened(result), layer.lora_A[ADAPTER], layer.lora_B[ADAPTER], gate.start
    x = gate.unflattened(x)[:, start:].to(torch.promote_types(x.dtype, torch.float32))  # [B, A, in]
    added = up(down(x)) if layer.division is None else layer.division.product(x, down.weight, up.weight)
    added = base[:, start:].add(added.to(result.dtype), alpha=layer.scaling[ADAPTER])  # [B, A, out]
    return (added if start == 0 else torch.cat([base[:, :start], added], dim=1)).view(result.shape)
