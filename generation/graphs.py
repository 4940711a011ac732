"""Regions of a cycle that are recorded once and replayed, as CUDA graphs are.

    "cycle"      a whole cycle: draft, forward, scores, verification, ends, rollback; the host reads it afterwards
    "forward"    draft and forward: a processor or a criterion of the user sees on the host what follows
    neither      the drafter or the call needs the host in between

Of new sizes the first cycle is launched, the second one runs beside the main stream, as recording demands, where torch
tells of waits, and the third is recorded. What was recorded stays with the buffers that it reads and writes
(`Buffers.graphs`), by all that shapes it (`fingerprint`): a later call alike replays all of its cycles, the first one
among them where the prompt is in these buffers before it (`begins`). On processors nothing is launched, and nothing
recorded; tests put `FakeGraph` in the place of `CudaGraph`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import RLock
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria
from transformers.utils import logging

from .backbone.static import Buffers
from .backbone.wrapped_models import has_foreign_hooks, peft_arguments
from .call.constraints import ON_DEVICE
from .call.options import DraftOptions
from .call.sequences import Graphs
from .contract import DraftSession, DraftTree
from .tensors.masks import constants
from .verification.verifiers import Verifier

logger = logging.get_logger(__name__)
R = TypeVar("R")
_TRIES = 3  # the cycle of a call in which the host must wait for nothing; in earlier ones, something may be compiled
_MOST = 8  # graphs that are kept for the buffers of a model; each holds memory
_PLAIN = (bool, int, float, str, type(None))
_MARKED = (*_PLAIN, Tensor, nn.Module)


class CudaGraph(Generic[R]):
    """A region in a CUDA graph with a private pool; torch registers the state of its default generator."""

    constants: list[object]  # what it reads beside the buffers (`masks.constants`)

    def __init__(self, function: Callable[[], R], device: torch.device, buffers: Buffers) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            main = torch.cuda.current_stream()
            try:
                with torch.cuda.graph(self.graph, stream=_side(device), capture_error_mode="thread_local"):
                    self.result = function()
            finally:
                torch.cuda.set_stream(main)  # a capture that failed leaves its own

    def replay(self, function: Callable[[], R]) -> R:
        """Run what was recorded, and return the result of the recording, whose tensors hold new values."""
        with _LOCK:  # random numbers begin at a place that the replays of all threads share
            self.graph.replay()
        return self.result


GRAPHS: dict[str, type[CudaGraph[Any]]] = {"cuda": CudaGraph}  # by type of device
_LOCK = RLock()
_running = 0


@contextmanager
def running() -> Iterator[None]:
    """Count a call while it decodes: nobody records while others run, and none begins while somebody records.

    Random numbers that another thread drew meanwhile would spoil the recording, and theirs.
    """
    global _running
    with _LOCK:
        _running += 1
    try:
        yield
    finally:
        with _LOCK:
            _running -= 1


class Recorder:
    """Records and replays the regions of one call, whose `shape` is a `fingerprint`; `told` what is said of it."""

    begins = False  # the first cycle of the call is like all others
    is_steady = False  # the last region took as long as the next one will: it was replayed, and not recorded first

    def __init__(self, buffers: Buffers, shape: Hashable, device: torch.device, told: Graphs) -> None:
        self.buffers, self.shape, self.device, self.told = buffers, shape, device, told
        self.made, self.met, self.ready = GRAPHS[device.type], Counter[Hashable](), set[Hashable]()

    def __call__(self, name: str, function: Callable[..., R], /, *args: Any) -> R:
        """Return what a region returns: replayed, recorded, or run."""
        numbers = (*(arg for arg in args if isinstance(arg, int)), self.shape)
        key, graphs = (name, numbers), self.buffers.graphs
        run = partial(function, *args)
        self.met[key] += 1
        self.is_steady = False
        if name in self.told.reasons or (self.met[key] == 1 and not (self.begins and key in graphs)):
            return run()
        if (known := graphs.pop(key, None)) is None:
            if key not in self.ready:
                return self._rehearsed(name, key, run)
            if (known := self._recorded(name, run)) is None:
                return run()
        else:
            self.is_steady = True
        graphs[key] = known  # the newest is the last
        for old in list(graphs)[:-_MOST]:
            del graphs[old]
        self.told.replayed[name] = self.told.replayed.get(name, 0) + 1
        return known.replay(run)

    def _rehearsed(self, name: str, key: Hashable, run: Callable[[], R]) -> R:
        """Run a region as recording demands it before: a capture that fails would leave torch's generator useless."""
        result, wait = _beside(run, self.device)
        if wait is None:
            self.ready.add(key)
        elif self.met[key] >= _TRIES:
            self._give_up(name, wait)
        return result

    def _recorded(self, name: str, run: Callable[[], R]) -> CudaGraph[R] | None:
        """Return a recording of a region, which does not run it; None where there can be none, or not now."""
        with _LOCK:
            if _running > 1:
                return None
            try:
                with constants() as read:
                    made = self.made(run, self.device, self.buffers)
            except Exception as error:
                self._give_up(name, str(error).partition("\n")[0] or type(error).__name__)
                return None
        made.constants = read
        self.told.recorded += 1
        return made

    def _give_up(self, name: str, reason: str) -> None:
        self.told.reasons[name] = reason
        logger.warning_once(f"Cycles are launched one by one, and no CUDA graph replays them: {reason}")


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all recordings, whose workspaces what runs there first allocates outside of them."""
    return torch.cuda.Stream(device)


def _beside(run: Callable[[], R], device: torch.device) -> tuple[R, str | None]:
    """Run on the side stream; return also where the host waited for the device, None: nowhere."""
    if device.type != "cuda":
        return run(), None
    main, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        result, wait = _noting_waits(run)
    main.wait_stream(side)
    return result, wait


def _noting_waits(run: Callable[[], R]) -> tuple[R, str | None]:
    """Run, and return also the line that waits for the device, in the user's words; None: torch knows of none."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = run()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    wait = None
    for each in caught:
        if "synchronizing" in str(each.message):
            wait = wait or f"{Path(each.filename).name}:{each.lineno}, where the host waits for the device"
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return result, wait


def held_draft(tree: DraftTree, hold: Callable[[str, Tensor], Tensor]) -> DraftTree:
    """Return a draft that was made on the host at constant addresses (`CacheView.held`); its tokens were not drawn."""
    parts = {"tokens": tree.tokens, "num_nodes": tree.num_nodes} | ({} if tree.is_chain else {"parents": tree.parents})
    width = tree.tokens.shape[1]  # a shorter one at the end leaves the others alone
    return replace(
        tree, **{name: hold(f"draft.{width}.{name}", part) for name, part in parts.items() if part is not None}
    )


def obstacle_to_fixed(
    options: DraftOptions, session: DraftSession, verifier: Verifier, has_keywords: bool
) -> str | None:
    """Return why the cycles of a call have no fixed shapes, in the user's words; None: they have."""
    if not options.speculates:
        return "a call without drafts"
    if not session.takes_fixed:
        return f"drafts of {type(session).__name__}, whose shapes change"
    if has_keywords:
        return "keyword arguments that every forward gets"
    if options.threshold and session.supports_confidence_threshold and options.draft_tree is None:
        return f"assistant_confidence_threshold={options.threshold}, for which the host waits"
    if not verifier.takes_fixed:
        return "seed= with drafts that are verified by fresh uniforms"
    if options.processors and (constraints := options.processing.constraints.all):
        return f"{type(constraints[0]).__name__}, which is asked for every draft"
    return None


def obstacle_to_whole(options: DraftOptions, criteria: list[StoppingCriteria]) -> str | None:
    """Return who must see scores or tokens on the host in the middle of a cycle, in the user's words; None: nobody."""
    waiting = [processor for processor in options.processors if type(processor) not in ON_DEVICE] + criteria
    return f"{getattr(waiting[0], '__name__', type(waiting[0]).__name__)}, which the host calls" if waiting else None


def obstacle_to_graphs(*models: nn.Module) -> str | None:
    """Return why nothing is recorded where these models run, in the user's words; None: something may be."""
    devices = {tensor.device for model in models for tensor in model.parameters()}
    kinds = {device.type for device in devices}
    maps = [set(map(str, (getattr(model, "hf_device_map", None) or {}).values())) for model in models]
    places = set[str]().union(*(each for each in maps if len(each) > 1))  # where accelerate put parts
    if places & {"cpu", "disk"} or "meta" in kinds:
        return "offloading: parts of the model come and go"
    if places or len(devices) > 1:
        return f"several devices: {', '.join(sorted(places or map(str, devices)))}"
    if not kinds <= GRAPHS.keys():
        return f"device {next(iter(kinds))}, which has no CUDA graphs"
    if any(map(torch.is_autocast_enabled, kinds)):
        return "autocast, whose copies of weights go with it"
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms"
    if has_foreign_hooks(nn.ModuleList(models)) or any(map(peft_arguments, models)):
        return "hooks at the model or its layers, which a graph would not call"
    if "cuda" in kinds and torch.cuda.is_current_stream_capturing():
        return "a capture that is going on"
    return None


def fingerprint(*parts: object) -> Hashable:
    """Return what shapes the recording of regions in which these objects take part, as something to compare."""
    modes = torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()
    return modes, tuple(map(_mark, parts))


def _mark(part: object) -> Hashable:
    if isinstance(part, _PLAIN):
        return part
    if isinstance(part, Tensor):
        return part.data_ptr(), part.shape, part.dtype
    if isinstance(part, nn.Module):
        addresses = hash(tuple(tensor.data_ptr() for tensor in (*part.parameters(), *part.buffers())))
        return id(part), addresses, hash(tuple(_flags(module) for module in part.modules()))
    if isinstance(part, (list, tuple, set, frozenset)):
        return type(part).__name__, tuple(map(_mark, part))
    if isinstance(part, dict):
        return tuple((name, _mark(value)) for name, value in part.items())
    return type(part).__qualname__, _flags(part)


def _flags(found: object) -> Hashable:
    """Return the plain attributes of an object, and marks of its tensors and models."""
    values = vars(found).items() if hasattr(found, "__dict__") else ()
    return type(found), tuple((name, _mark(value)) for name, value in values if isinstance(value, _MARKED))
