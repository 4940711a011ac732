"""The number of threads is chosen by measuring; the clock is a fake one that knows how long each number takes."""

from types import SimpleNamespace

import pytest
import torch

from tests.internals import threads_as_before, use_fastest_threads
from tests.internals import threads_module as threads


@pytest.mark.parametrize(
    ("seconds", "most", "chosen"),
    [
        ({1: 4.0, 2: 2.0, 4: 1.0, 8: 0.9}, 8, 8),
        ({1: 4.0, 2: 2.0, 4: 1.0}, 4, 4),
        ({1: 4.0, 2: 2.0, 3: 1.5}, 3, 3),
        ({1: 1.0, 2: 10.0}, 8, 1),
        ({1: 1.0, 2: 0.99, 4: 0.1}, 4, 1),
        ({1: 1.0}, 1, 1),
        ({1: 9.0, 2: 8.0, 4: 7.0, 8: 6.0, 16: 1.0}, 16, 8),
    ],
    ids=["more is faster", "all", "not a power of two", "busy machine", "no gain", "only one", "never more than 8"],
)
def test_more_threads_are_used_while_they_help(monkeypatch, seconds, most, chosen):
    state = SimpleNamespace(count=1, now=0.0)

    def work():
        state.now += seconds[state.count]

    fake_torch = SimpleNamespace(set_num_threads=lambda count: setattr(state, "count", count))
    monkeypatch.setattr(threads, "torch", fake_torch)
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: state.now))
    assert use_fastest_threads(work, most) == chosen == state.count


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads_as_before():
        torch.set_num_threads(before + 1)
        raise KeyError
    assert torch.get_num_threads() == before
