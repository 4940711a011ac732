"""Low-rank adapters that act on auxiliary positions only: W x everywhere, and B (A x) added there.

Ordinary tokens are computed by the unchanged base layers alone, so one checkpoint is exactly the base model and the
student at once. peft makes, initialises and names the adapters, which are float32 at least: in bfloat16 rounding would
lose the steps of an optimizer; decoding multiplies copies in the dtype of the layer. A gate marks the auxiliary
positions, per call and thread."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...generation.tensors.shared_models import LayerDivision

ADAPTER = "default"
"""Name of the adapter, as in peft's parameter names."""


@dataclass(frozen=True)
class Gate:
    """Which positions of one forward are auxiliary: those from `start` on, of `length` in all.

    Where `model` opened it, adapters that are hooks of another model's layers obey theirs alone.
    """

    start: int
    length: int
    model: object = None

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
        gate = current_gate()

        def gated(*inputs: object) -> object:
            with opened(gate):
                return function(*inputs)

        return self.checkpoint(gated, *args)


def preserve_gates(model: nn.Module) -> None:
    """Let all checkpointing layers of a model find their gates in backward; idempotent."""
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is not None and not isinstance(function, GatePreserver):
            vars(module)["_gradient_checkpointing_func"] = GatePreserver(function)


class PackedMixin(nn.Module):
    """A layer's adapter; for decoding its halves are packed again where it is moved, cast or set to another mode."""

    division: LayerDivision | None = None
    _packed: tuple[tuple, list[Tensor], Tensor, Tensor] | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_packed": None}

    def train(self, mode: bool = True) -> Any:
        self._packed = None
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._packed = None
        return super()._apply(*args, **kwargs)

    def packed(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return the factors of decoding, A [r, in] and s B, transposed: [r, out].

        Cached until the version of a weight changes (not by `.data`). None where weights are offloaded, or have none.
        """
        layer: Any = self
        halves = [kind[ADAPTER].weight for kind in (layer.lora_A, layer.lora_B)]
        if any(half.is_meta or half.is_inference() for half in halves):
            return None
        key = (dtype, halves[0].dtype, halves[0].device, *(half._version for half in halves))
        known = self._packed
        if known is None or known[0] != key or not all(map(operator.is_, known[1], halves)):
            down, up = halves
            if self.division is not None:  # this process has a part of the layer
                split = self.division.share
                down, up = (split(down), up) if self.division.of_inputs else (down, split(up))
            up = (up * layer.scaling[ADAPTER]).to(dtype).t().contiguous()
            # with the weights, so that no other can be taken for one of them
            self._packed = known = key, halves, down.to(dtype), up
        return known[2], known[3]


def with_adapter(layer: Any, gate: Gate, x: Tensor, result: Tensor) -> Tensor:
    """Return `result` = W x with s B (A x) added at auxiliary positions; the others are unchanged."""
    base, start = gate.unflattened(result), gate.start
    x = gate.unflattened(x)[:, start:]  # [B, A, in]
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        # on processors, narrow products of this size take longer than wide ones
        is_slow = result.device.type == "cpu" and result.dtype in (torch.bfloat16, torch.float16)
        if (packed := layer.packed(torch.float32 if is_slow else result.dtype)) is not None:
            _add(layer, *packed, x, base[:, start:])
            return result
    # the halves are called, not read: weights that are offloaded arrive with the call of their own layer
    down, up = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    added = up(down(x)) if layer.division is None else layer.division.product(x, down.weight, up.weight)
    added = base[:, start:].add(added.to(result.dtype), alpha=layer.scaling[ADAPTER])  # [B, A, out]
    return (added if start == 0 else torch.cat([base[:, :start], added], dim=1)).view(result.shape)


def _add(layer: Any, down: Tensor, up: Tensor, x: Tensor, rows: Tensor) -> None:
    """Add s B A x, of x [B, A, in], to rows [B, A, out] in place, in few kernels."""
    low = nn.functional.linear(x.to(down.dtype), down)  # [B, A, r]
    if layer.division is not None and layer.division.of_inputs:
        low = layer.division.summed(low)
    if up.dtype != rows.dtype:  # autocast may have cast `low` alone
        rows.add_(low @ up)
    elif len(rows) == 1:
        rows[0].addmm_(low[0], up)
    else:
        rows.baddbmm_(low, up.expand(len(rows), -1, -1))
