"""The number of threads is chosen by measuring; the clock is a fake one that knows how long each number takes."""

from types import SimpleNamespace

import pytest
import torch

from tests.internals import ThreadGovernor, threads_as_before, use_fastest_threads
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


class Machine:
    """A fake machine: how long a step takes depends on the number of threads and on what else runs."""

    def __init__(self, monkeypatch, seconds) -> None:
        self.count, self.now, self.seconds, self.used = None, 0.0, seconds, []
        fake_torch = SimpleNamespace(set_num_threads=lambda count: setattr(self, "count", count))
        monkeypatch.setattr(threads, "torch", fake_torch)
        monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def train(self, governor, steps: int) -> list[int]:
        """Threads of each step."""
        governor.on_train_begin(None, None, None)
        used = []
        for step in range(steps):
            governor.on_step_begin(None, None, None)
            used.append(self.count)
            self.now += self.seconds(step, self.count)
            governor.on_step_end(None, None, None)
        return used


def test_all_threads_are_used_while_the_machine_is_free(monkeypatch):
    machine = Machine(monkeypatch, lambda step, count: 2.0 / count)
    assert machine.train(ThreadGovernor(2), 100) == [1] * 3 + [2] * 97
    assert machine.train(ThreadGovernor(64), 5) == [1] * 3 + [8] * 2


def test_a_busy_machine_costs_few_slow_steps(monkeypatch):
    machine = Machine(monkeypatch, lambda step, count: 2.0 if count == 1 else 50.0)
    used = machine.train(ThreadGovernor(2), 1000)
    assert used[:3] == [1] * 3
    assert [step for step, count in enumerate(used) if count == 2] == [3, 24, 65, 146, 307, 628, 949]


def test_all_threads_come_back_when_the_machine_is_free_again(monkeypatch):
    machine = Machine(monkeypatch, lambda step, count: 2.0 / count if not 50 <= step < 100 else 5.0 * count)
    used = machine.train(ThreadGovernor(2), 300)
    assert used[3:51] == [2] * 48  # the step that shows it is slow
    assert used[51:71] == [1] * 20
    assert used[120:] == [2] * 180


def test_the_first_step_may_be_slow(monkeypatch):
    machine = Machine(monkeypatch, lambda step, count: 60.0 if step == 0 else [2.0, 3.0][count - 1])
    assert machine.train(ThreadGovernor(2), 30).count(2) == 2  # a comparison with 60 seconds would have kept two
