"""The processes of a run that share work on files, without waiting for each other in a collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list
from torch import distributed
from transformers import PreTrainedModel
from transformers.utils import logging

from ..generation.tensors.shared_models import check_whole, is_sharded
from .utils import one_line

logger = logging.get_logger(__name__)
_PAUSE, _TELL = 1.0, 30.0  # seconds between two looks at the others, at most, and between two lines about them
_STAGES, _DONE = count(), "done"
T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Attributes:
        rank: Its number, over all machines.
        world: How many there are.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def of(cls, backbone: PreTrainedModel | None) -> Processes:
        """Return the processes that each hold a whole backbone, or none.

        Raises:
            ValueError: The backbone is divided among them, so that they cannot read different rows.
        """
        if backbone is not None:
            check_whole(backbone, "rows divided among processes")
        if backbone is not None and is_sharded(backbone):
            raise ValueError(
                f"FSDP2 shards {type(backbone).__name__}, and rows are divided among whole ones: load it so"
            )
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        return cls(distributed.get_rank(), distributed.get_world_size())

    @contextmanager
    def stage(self, what: str, progress: Callable[[], str] = str) -> Iterator[None]:
        """Run this process's share of a piece of work, then wait until all others have finished theirs.

        Every process leaves a mark in the store of the process group, and looks for those of the others: there is no
        limit of time, as a collective has.

        Args:
            what: The work, in lines about those that are waited for.
            progress: Returns how far all are.

        Raises:
            RuntimeError: Another process has ended with an error.
        """
        if self.world == 1:
            yield
            return
        store, name = distributed.distributed_c10d._get_default_store(), f"tokenahead/{next(_STAGES)}"
        mark = "it was stopped"
        try:
            yield
            mark = _DONE
        except BaseException as error:
            mark = one_line(error)
            raise
        finally:
            store.set(f"{name}/{self.rank}", mark)
        begun = told = time.monotonic()
        waiting = [rank for rank in range(self.world) if rank != self.rank]
        while waiting:
            for rank in [rank for rank in waiting if store.check([f"{name}/{rank}"])]:
                waiting.remove(rank)
                if (mark := store.get(f"{name}/{rank}").decode()) != _DONE:
                    raise RuntimeError(f"{what}: process {rank} of {self.world} ended with: {mark}")
            now = time.monotonic()
            if waiting and now - told > _TELL:
                logger.warning(f"{what}: {progress()}; waiting for {_listed(waiting)} of {self.world} processes")
                told = now
            time.sleep(min(_PAUSE, 0.02 + (now - begun) / 10) if waiting else 0)
        distributed.barrier()  # all are here; the one that holds the store leaves last


def of_first(read: Callable[[], T]) -> T:
    """Return in every process what the first one reads; its error is raised in all."""
    state, found = PartialState(), list[Any]([None, None])
    if state.is_main_process:
        try:
            found[0] = read()
        except Exception as error:
            found[1] = error
    if state.num_processes > 1:
        broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} others"
