"""How many threads a piece of work should use: measured, because on a busy machine more can be ten times slower.

Threads meet at the end of every small matrix product; where another program holds one of the processors, all wait.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_MOST = 8  # on matrices as small as the demo's, further threads would only wait for one another
_WORTHWHILE = 0.95  # more threads must take less than this share of the time that fewer took
_SINGLE_STEPS = 3  # to know what a step takes on one thread
_FIRST_PAUSE, _LONGEST_PAUSE = 20, 320  # steps on one thread before more are tried again


@contextmanager
def threads_as_before() -> Iterator[None]:
    """Restores the number of threads at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_fastest_threads(work: Callable[[], object], most: int) -> int:
    """Sets the number of threads with which `work` is done soonest, trying 1, 2, 4, ... while each is faster.

    Args:
        work: What to do; it is called a few times.
        most: Threads to use, at most.

    Returns:
        The number of threads.
    """
    torch.set_num_threads(1)
    work()  # the first call also sets things up, and is not measured
    count, best = 1, _seconds(work)
    while count < min(most, _MOST):
        more = min(2 * count, most, _MOST)
        torch.set_num_threads(more)
        seconds = _seconds(work)
        if seconds > _WORTHWHILE * best:
            break
        count, best = more, seconds
    torch.set_num_threads(count)
    return count


class ThreadGovernor(TrainerCallback):
    """Trains on all threads while that is faster than one thread, and on one while another program is in the way.

    Every stage of training begins with a few steps on one thread. Whenever a step on all threads takes longer than a
    step on one thread did, training goes on with one thread for a while, and for twice as long the next time.

    Args:
        most: Threads to use, at most.
    """

    def __init__(self, most: int) -> None:
        self.most = min(most, _MOST)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts on one thread."""
        self.single, self.pause = math.inf, _FIRST_PAUSE
        self._use(1, _SINGLE_STEPS)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes the time."""
        self.started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Decides how many threads the next step gets."""
        seconds = time.perf_counter() - self.started
        self.steps_left -= 1
        if self.count == 1:
            # the first step also sets things up, so its time is replaced by that of the second where that is shorter
            self.single = seconds if math.isinf(self.single) else min(seconds, (self.single + seconds) / 2)
            if self.steps_left <= 0:
                self._use(self.most, _FIRST_PAUSE)
        elif seconds > self.single:
            self._use(1, self.pause)
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
        elif self.steps_left <= 0:
            self.pause = _FIRST_PAUSE

    def _use(self, count: int, steps: int) -> None:
        self.count, self.steps_left = count, steps
        torch.set_num_threads(count)


def _seconds(work: Callable[[], object]) -> float:
    """The shorter time of two calls."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def describe_threads() -> str:
    """The number of threads in use, in words."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"
