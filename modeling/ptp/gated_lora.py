"""Low-rank adapters that act on auxiliary positions only: W x everywhere, and B (A x) added there.

Ordinary tokens are computed by the unchanged base layers alone, so one checkpoint is exactly the base model and the
student at once. peft makes, initialises and names the adapters, which are float32 at least: in bfloat16 rounding would
lose the steps of an optimizer. Adapters that read the same input (q, k and v; gate and up) share one product. A gate
marks the auxiliary positions, per call and thread."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...generation.backbone.wrapped_models import Kwargs, LayerDivision

Products = list[tuple[Tensor, Tensor]]
"""A x and s B of each of some adapters."""


@dataclass
class Gate:
    """Which positions of one forward are auxiliary: those from `start` on.

    Attributes:
        start: Number of ordinary tokens before them.
        length: Number of all positions, to find them where a layer has all sequences on one axis.
        model: The model that opened it; adapters that are hooks of another model's layers obey theirs alone.
        shared: Last products of adapters that read the same input: that input, their owner, the products.
    """

    start: int
    length: int
    model: object = None
    shared: tuple[Tensor, SharedInputAdapters, Products] | None = None

    def products(self, x: Tensor, owner: SharedInputAdapters) -> Products | None:
        """Return the products that `owner` computed of x, if they were the last; None otherwise."""
        shared = self.shared
        return shared[2] if shared is not None and shared[0] is x and shared[1] is owner else None

    def unflattened(self, x: Tensor) -> Tensor:
        """Return a view [B, Q, d] of x, [B, Q, d] or [B Q, d]."""
        if x.dim() == 3 and x.shape[1] == self.length:
            return x
        if x.dim() != 2 or x.shape[0] % self.length:
            reads = f"a layer reads {tuple(x.shape)}, not all {self.length} positions of every sequence"
            raise ValueError(f"{reads}: gated adapters need all positions, and do not fit this backbone")
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


class GatePreserver:
    """A checkpointing function whose recomputed layers find the gate of their forward, also in another thread."""

    def __init__(self, checkpoint: Callable[..., object]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., object], *args: object) -> object:
        """Call `function` under the gate that is open now, and again under it."""
        gate = current_gate()

        def gated(*inputs: object) -> object:
            with opened(None if gate is None else replace(gate, shared=None)):
                return function(*inputs)

        return self.checkpoint(gated, *args)


def preserve_gates(model: nn.Module) -> None:
    """Let all checkpointing layers of a model find their gates in backward; idempotent."""
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is not None and not isinstance(function, GatePreserver):
            vars(module)["_gradient_checkpointing_func"] = GatePreserver(function)


ADAPTER = "default"
"""Name of the adapter, as in peft's parameter names."""
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of the layers of one module that read the same input."""


class SharedInputAdapters:
    """Adapters that read the same input, in the order of their calls: decoding multiplies all their A's at once."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self._packed: tuple[tuple, list[Tensor], Tensor, list[Tensor]] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave packed weights out of copies and pickles."""
        return {"layers": self.layers, "_packed": None}

    def add(self, layer: Any, gate: Gate, x: Tensor, result: Tensor) -> bool:
        """Add s B A x to auxiliary positions of `result` in place, in few kernels; False without packed weights."""
        parts, base = gate.products(x, self), gate.unflattened(result)
        if parts is None:
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

        Cached until a weight changes; call `forget` where the version does not change (weights set through `.data`).
        None where weights are offloaded, or have no version.
        """
        halves = self.halves
        if any(half.is_meta or half.is_inference() for half in halves):
            return None
        key = (dtype, halves[0].dtype, halves[0].device, *(half._version for half in halves))
        known = self._packed
        if known is not None and known[0] == key and all(map(operator.is_, known[1], halves)):
            return known[2], known[3]
        down = torch.cat([_share(layer, half, True) for layer, half in zip(self.layers, halves[::2])]).to(dtype)
        ups = [_share(layer, half, False) * layer.scaling[ADAPTER] for layer, half in zip(self.layers, halves[1::2])]
        ups = [up.to(dtype).t().contiguous() for up in ups]  # n of [r, out]
        self._packed = key, halves, down, ups  # with the weights, so that no other can be taken for one of them
        return down, ups

    def forget(self) -> None:
        """Pack again in the next call."""
        self._packed = None

    @property
    def halves(self) -> list[Tensor]:
        """All A's and B's."""
        kinds = [kind for layer in self.layers for kind in (layer.lora_A, layer.lora_B)]
        return [kind[ADAPTER].weight for kind in kinds]


def _share(layer: Any, weight: Tensor, of_inputs: bool) -> Tensor:
    """Return what this process needs of an A [r, in] or a B [out, r]."""
    division: LayerDivision | None = layer.division
    return weight if division is None or division.of_inputs != of_inputs else division.share(weight)


class PackedMixin(nn.Module):
    """A layer's adapter, whose packed weights are made again where it is moved, cast or set to another mode.

    Attributes:
        siblings: The adapters that read the same input, this one among them.
        division: Of the layer, among processes; None: each has the whole layer.
    """

    siblings: SharedInputAdapters | None = None
    division: LayerDivision | None = None

    def train(self, mode: bool = True) -> Any:
        """Set the mode, as of any module."""
        self._forget()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._forget()
        return super()._apply(*args, **kwargs)

    def _forget(self) -> None:
        if self.siblings is not None:
            self.siblings.forget()


def join_siblings(model: nn.Module) -> None:
    """Give all adapters inside a model their `SharedInputAdapters`."""
    for module in list(model.modules()):
        _join(module)


def _join(parent: nn.Module) -> None:
    """Give the adapters of one module their `SharedInputAdapters`."""
    layers: Kwargs = {name: layer for name, layer in parent.named_children() if isinstance(layer, PackedMixin)}
    groups: list[list[Any]] = []
    for names in _TOGETHER:
        group = [layers[name] for name in names if name in layers]
        if len(group) == len(names) and len({layer.in_features for layer in group}) == 1:
            groups.append(group)
            layers = {name: layer for name, layer in layers.items() if name not in names}
    for group in [*groups, *([layer] for layer in layers.values())]:
        siblings = SharedInputAdapters(group)
        for layer in group:
            layer.siblings = siblings


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
