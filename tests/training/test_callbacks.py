"""Training against the clock; the clock is a fake one that ticks whenever it is read."""

import io
import itertools
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.internals import ProgressCallback, StepCounter, TimeBudget, TimedTrainer
from tests.internals import callbacks_module as callbacks
from tests.training.conftest import ragged_rows, small_model, trainer_for


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(callbacks, "time", clock)
    return clock


def test_the_rate_rises_and_then_falls_with_the_time(clock):
    budget = TimeBudget(50.0, first=0.8, last=0.2)
    assert budget.elapsed == 0 and not budget.is_over
    budget.start()
    rates = {}
    for seconds in (0, 2, 25, 50, 60):
        clock.now = 100.0 + seconds
        rates[seconds] = budget.rate()
    assert rates[0] == pytest.approx(0.08)
    assert rates[2] == pytest.approx(0.8 - 0.6 * 0.04)
    assert rates[25] == pytest.approx(0.5)
    assert rates[50] == rates[60] == pytest.approx(0.2)
    assert budget.is_over


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_budget_must_be_positive(seconds):
    with pytest.raises(ValueError, match="above 0"):
        TimeBudget(seconds)


def test_training_stops_with_the_budget_and_the_rate_has_fallen_to_nothing(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(perf_counter=lambda: next(ticks) * 0.5))
    budget, counter = TimeBudget(10.0), StepCounter()
    options = dict(max_steps=10_000, learning_rate=1.0, optim="sgd")
    trainer = trainer_for(
        small_model(), tmp_path, ragged_rows(), lambda *a, **k: TimedTrainer(budget, *a, **k), **options
    )
    trainer.add_callback(counter)
    trainer.train()
    assert budget.is_over and 2 < counter.count < 25
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert len(rates) == counter.count
    assert max(rates) > 0.7 and rates[-1] < 0.25 and rates == sorted(rates[:1]) + sorted(rates[1:], reverse=True)


def progress(clock, terminal: bool) -> tuple[ProgressCallback, io.StringIO, TimeBudget]:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120, color_system=None)
    budget = TimeBudget(60.0)
    budget.start()
    return ProgressCallback("backbone", budget, 1000, console), output, budget


def step(callback: ProgressCallback, number: int) -> None:
    callback.on_step_end(None, SimpleNamespace(global_step=number), None)


def test_the_bar_shows_step_loss_bits_speed_and_time_left(clock):
    callback, output, _ = progress(clock, terminal=True)
    callback.on_train_begin(None, None, None)
    callback.on_log(None, None, None, logs={"loss": 1.5, "loss_head_1": 0.6931471805599453})
    clock.now += 15.0
    step(callback, 30)
    callback.on_train_end(None, None, None)
    shown = output.getvalue()
    for figure in ("backbone", "step 30", "loss 1.500", "1.000 bits/byte", "2,000 bytes/s", "0:45 left"):
        assert figure in shown


def test_without_a_terminal_there_is_a_line_now_and_then(clock):
    callback, output, _ = progress(clock, terminal=False)
    callback.on_train_begin(None, None, None)
    for number in range(1, 62):
        clock.now += 1.0
        step(callback, number)
    callback.on_train_end(None, None, None)
    lines = output.getvalue().splitlines()
    assert [line.split(" s ")[0] for line in lines] == [f"backbone: {s}/60" for s in (21, 42, 60, 61)]
    assert "step 21  1,000 bytes/s" in lines[0]
