"""What an accelerator would spend on a call, counted on the processor: kernels, waits of the host, copies to it.

Times on a processor say little about an accelerator, where a small kernel costs its launch and a wait costs the queue.
These counts are what such a machine is bound by while a model is small or a batch is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "unique_consecutive", "_unique2"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Counts(TorchDispatchMode):
    """Counts operators.

    Attributes:
        kernels: Operators that are no views.
        syncs: Reads of a value by the host: `.item()`, `.tolist()`, `bool()`, boolean indices, `nonzero`.
        copies: Tensors made of Python's numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.syncs = self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one and runs it."""
        name = func._schema.name.split("::")[-1]
        masks = name in _INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        self.kernels += not func.is_view
        self.syncs += name in _WAITS or masks
        self.copies += name == "lift_fresh"
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Sees `.tolist()`, which is no operator."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts.syncs += func is torch.Tensor.tolist
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what runs inside."""
    with Counts() as counts, _Lists(counts):
        yield counts


def per_cycle(generate: Callable[[int], Any], new_tokens: int = 64) -> dict[str, float]:
    """Kernels, syncs and copies per cycle of `generate`, beyond what the prompt's own pass counts.

    Args:
        generate: Decodes so many tokens, and returns the output with its statistics, or without any where it decoded
            plainly.
        new_tokens: Of the long call.

    Returns:
        The three counts.
    """
    with counted() as short:
        generate(1)
    with counted() as whole:
        out = generate(new_tokens)
    stats = getattr(out, "speculation", None)
    cycles = max((new_tokens if stats is None else stats.backbone_calls) - 1, 1)
    return {name: (getattr(whole, name) - getattr(short, name)) / cycles for name in ("kernels", "syncs", "copies")}
