"""What stands in for a CUDA graph where there is none: a region is run again, and must do the same again.

A graph repeats the calls of its recording, with the same numbers of the host, at the same addresses, and waits for
nothing. `FakeGraph` runs a region instead, compares all that with the recording, and returns the recorded result with
the new values in it, as a replay does. `BlindGraph` makes the recorded calls again, on the recorded tensors, and runs
nothing of the region, as a graph does: what a region leaves in Python's objects is that of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tokenahead.generation.backbone.static import Buffers

R = TypeVar("R")
_WAITS = (
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select", "multinomial", "bincount",
    "lift_fresh",
)  # fmt: skip
_READS = (Tensor.tolist, Tensor.cpu, Tensor.numpy)


class CannotReplay(RuntimeError):
    """A region that no graph could repeat."""


class _Reads(TorchFunctionMode):
    """Refuses reads of the host that are no operators on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise CannotReplay(f"it reads from the device: {func.__name__}")
        return func(*args, **(kwargs or {}))


class _Calls(TorchDispatchMode):
    """Records operators: their names, numbers, and where their tensors come from.

    Tensors from outside are described by their address, those from inside by the call that made them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []
        self.made: dict[int, int] = {}
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []  # they live, so that no address is used again
        self.outside: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name.removeprefix("aten::"), kwargs or {}
        described = name, *map(self._described, args), *((key, self._described(kwargs[key])) for key in sorted(kwargs))
        is_mask = name.startswith("index") and any(map(_is_mask, args[1] if isinstance(args[1], (list, tuple)) else ()))
        if name in _WAITS or name.startswith("unique") or is_mask:
            raise CannotReplay(f"it waits for the device: {name}")
        result = func(*args, **kwargs)
        outside = {part[1] for part in _flat(described) if part[0] == "outside"}
        results = list(_tensors(result))
        for tensor in results:
            if (address := tensor.untyped_storage().data_ptr()) not in outside:
                self.made.setdefault(address, len(self.calls))
        self.steps.append((func, args, kwargs, results))
        self.calls.append(described)
        return result

    def _described(self, value: object) -> tuple[object, ...]:
        if isinstance(value, Tensor):
            address = value.untyped_storage().data_ptr()
            place = ("inside", self.made[address]) if address in self.made else ("outside", address)
            if address not in self.made:
                self.outside.setdefault(address, StorageWeakRef(value.untyped_storage()))
            return *place, tuple(value.shape), value.stride(), value.storage_offset()
        if isinstance(value, (list, tuple)):
            return "several", *map(self._described, value)
        return "value", str(value)


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _flat(described: tuple[object, ...]) -> Iterator[tuple[object, ...]]:
    for part in described:
        if isinstance(part, tuple) and part:
            yield part
            yield from _flat(part)


def _tensors(found: object) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (list, tuple)):
        for part in found:
            yield from _tensors(part)


def _refill(old: object, new: object) -> None:
    """Write the values of a result's tensors to those of an earlier one."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.untyped_storage().copy_(new.untyped_storage())
    elif isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        for one, other in zip(old, new, strict=True):
            _refill(one, other)
    elif is_dataclass(old) and is_dataclass(new):
        for name in vars(old).keys() & vars(new).keys():  # what is made of a result outside the region is left alone
            _refill(vars(old)[name], vars(new)[name])


class FakeGraph(Generic[R]):
    """A region that is run again; see the file. As recording, making one leaves buffers and random numbers alone.

    What a recording makes has no values before the first replay; here it has those that nobody can use.

    Raises:
        CannotReplay: The region waits for the device.
    """

    constants: list[object]

    def __init__(self, function: Callable[[], R], device: torch.device, buffers: Buffers) -> None:
        state, before = torch.get_rng_state(), [tensor.clone() for tensor in buffers.tensors.values()]
        try:
            self.recorded, self.result = _recorded(function)
        finally:
            torch.set_rng_state(state)
            for tensor, values in zip(buffers.tensors.values(), before, strict=True):
                tensor.copy_(values)
        kept = {tensor.untyped_storage().data_ptr() for tensor in buffers.tensors.values()}
        for tensor in (tensor for *_, results in self.recorded.steps for tensor in results):
            if (address := tensor.untyped_storage().data_ptr()) in self.recorded.made and address not in kept:
                tensor.untyped_storage().fill_(255)  # NaN, and -1

    def _check_alive(self) -> None:
        for address, storage in self.recorded.outside.items():
            if storage.expired():
                raise CannotReplay(f"what it reads at {address} is gone")

    def replay(self, function: Callable[[], R]) -> R:
        """See `graphs.CudaGraph`.

        Raises:
            CannotReplay: The region does something else than it did when it was recorded.
        """
        self._check_alive()
        recorded, result = _recorded(function)
        old_calls, calls = self.recorded.calls, recorded.calls
        for number, (old, new) in enumerate(zip(old_calls, calls)):
            if old != new:
                raise CannotReplay(f"call {number} was {old}, and is {new}")
        if len(calls) != len(old_calls):
            raise CannotReplay(f"{len(old_calls)} calls were recorded, and there are {len(calls)}")
        _refill(self.result, result)
        return self.result


class BlindGraph(FakeGraph[R]):
    """The calls of a region, made again; see the file."""

    def replay(self, function: Callable[[], R]) -> R:
        """See `graphs.CudaGraph`."""
        self._check_alive()
        for call, args, kwargs, results in self.recorded.steps:
            for old, new in zip(results, _tensors(call(*args, **kwargs)), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)
        return self.result


def _recorded(function: Callable[[], R]) -> tuple[_Calls, R]:
    with _Calls() as recorded, _Reads():
        result = function()
    return recorded, result
