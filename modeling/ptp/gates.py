"""Which rows of a call are auxiliary: known to the call alone, so that calls in several threads do not meet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_ROUTED = "auxiliary rows cannot be told apart there, and gated adapters do not fit this backbone"


@dataclass
class Gate:
    """Which rows of one forward are auxiliary: those from `start` on.

    Attributes:
        start: Number of ordinary tokens before them.
        length: Rows in all, to find them where a layer sees the rows of all sequences in one axis.
        shared: What adapters that read the same input computed of it last: that input, whose it is, their products.
    """

    start: int
    length: int
    shared: tuple[torch.Tensor, Any, Any] | None = None

    def found(self, x: torch.Tensor, owner: Any) -> Any:
        """What `owner` computed of x, if that was the last; None otherwise."""
        shared = self.shared
        return shared[2] if shared is not None and shared[0] is x and shared[1] is owner else None

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


_OF_THREAD = threading.local()  # no ContextVar: torch.compile cannot read one


def current_gate() -> Gate | None:
    """The gate of the forward that is running in this thread; None where it is closed."""
    return getattr(_OF_THREAD, "gate", None)


@contextmanager
def opened(gate: Gate | None) -> Iterator[None]:
    """Opens a gate, or closes it (None), for the layers that are called inside."""
    before = current_gate()
    _OF_THREAD.gate = gate
    try:
        yield
    finally:
        _OF_THREAD.gate = before


class KeepsGate:
    """A checkpointing function whose layers find the gate of their forward again in the backward pass.

    That pass runs layers anew after the forward is over, and on an accelerator in another thread.

    Args:
        checkpoint: The function that transformers was given.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls `function` under the gate that is open now, and again under it."""
        gate = current_gate()

        def gated(*inputs: Any) -> Any:
            with opened(None if gate is None else Gate(gate.start, gate.length)):
                return function(*inputs)

        return self.checkpoint(gated, *args)


def keep_gates(model: nn.Module) -> None:
    """Lets all checkpointing layers of a model find their gates again; done once."""
    for module in model.modules():
        function = vars(module).get("_gradient_checkpointing_func")
        if function is not None and not isinstance(function, KeepsGate):
            module._gradient_checkpointing_func = KeepsGate(function)
