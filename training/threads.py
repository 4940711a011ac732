"""The number of threads for a piece of work: measured, because on a busy machine more can be ten times slower.

Threads meet at the end of every small matrix product; where another program holds one of the processors, all wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_MOST = 8  # on matrices as small as the demo's, further threads would only wait for one another
_WORTHWHILE = 0.95  # more threads must take less than this share of the time that fewer took


@contextmanager
def threads_as_before() -> Iterator[None]:
    """Restore the number of threads at the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_fastest_threads(work: Callable[[], object], most: int) -> int:
    """Set the number of threads with which `work` is fastest, trying 1, 2, 4, ... while each is faster.

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


def _seconds(work: Callable[[], object]) -> float:
    """Return the shorter time of two calls."""
    times = []
    for _ in range(2):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def describe_threads() -> str:
    """Return the number of threads in use, in words."""
    count = torch.get_num_threads()
    return f"{count} thread{'s' * (count > 1)}"
