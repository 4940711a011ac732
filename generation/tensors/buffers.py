"""Tensors that keep their addresses from call to call: a CUDA graph reads and writes at addresses."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn


class Buffers:
    """The buffers of one call, by name; those of the last call of a model serve its next one of equal sizes."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.made = 0
        self.graphs: dict[Hashable, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def hold(self, name: str, value: Tensor) -> Tensor:
        """Copy a value to the buffer of a name, and return that; the buffer itself is left as it is."""
        kept = self.tensors.get(name)
        if kept is value:
            return value
        if kept is None or not _fits(kept, value):
            with torch.inference_mode(False):  # later calls may be in another mode
                kept = self._replaced(name, torch.empty(value.shape, dtype=value.dtype, device=value.device))
        return kept.copy_(value)

    def adopt(self, name: str, value: Tensor) -> Tensor:
        """Return `hold` of a value, which itself becomes the buffer where none of its size is there yet."""
        kept = self.tensors.get(name)
        fits = kept is not None and _fits(kept, value) and kept.is_inference() == value.is_inference()
        return self.hold(name, value) if fits else self._replaced(name, value)

    def _replaced(self, name: str, value: Tensor) -> Tensor:
        if name in self.tensors:
            self.graphs.clear()
        self.tensors[name], self.made = value, self.made + 1
        return value


def _fits(kept: Tensor, value: Tensor) -> bool:
    """Return whether a buffer may hold the content of a value."""
    return kept.shape == value.shape and kept.dtype == value.dtype and kept.device == value.device


_KEPT: weakref.WeakKeyDictionary[nn.Module, Buffers] = weakref.WeakKeyDictionary()
"""Of the last call of a model that is over."""


def lend(model: nn.Module, borrower: object) -> Buffers:
    """Return the buffers of a model's last call until the borrower goes; a call of another thread finds none."""
    buffers = _KEPT.pop(model, None) or Buffers()
    weakref.finalize(borrower, _keep, weakref.ref(model), buffers).atexit = False
    return buffers


def free_buffers(model: nn.Module) -> int:
    """Free what calls with `cache_implementation="static"` keep for the next ones: caches, states, graphs.

    Returns:
        The bytes of the buffers; 0 where there were none, or a call is using them.
    """
    buffers = _KEPT.pop(model, None)
    return 0 if buffers is None else buffers.nbytes


def _keep(model: weakref.ref[nn.Module], buffers: Buffers) -> None:
    """Keep the buffers of a call that is over, if its model is still there."""
    if (alive := model()) is not None:
        _KEPT[alive] = buffers
