"""Training against the clock: a budget of seconds that ends a Trainer, and a learning rate that follows it."""

from __future__ import annotations

import time
from collections.abc import Callable

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_WARMUP = 0.04  # share of a budget in which the learning rate rises


class TimeBudget:
    """Seconds for training, and the learning rate that is due as they pass.

    Args:
        seconds: The budget.
        first: Share of the peak learning rate at the start, after a short rise from a tenth of it.
        last: Share of the peak learning rate at the end; between the two it falls in a straight line.
        clock: What tells the time; `time.process_time` leaves out what other programs take.
    """

    def __init__(
        self, seconds: float, first: float = 1.0, last: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds, self.first, self.last, self.clock = seconds, first, last, clock
        self._started: float | None = None

    def start(self) -> None:
        """Start the clock."""
        self._started = self.clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start; 0 before it."""
        return 0.0 if self._started is None else self.clock() - self._started

    @property
    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self.elapsed >= self.seconds

    def rate(self) -> float:
        """Return the share of the peak learning rate that is due now."""
        passed = min(1.0, self.elapsed / self.seconds)
        rise = min(1.0, 0.1 + 0.9 * passed / _WARMUP)
        return rise * (self.first + (self.last - self.first) * passed)


class TimeBudgetCallback(TrainerCallback):
    """Starts a budget's clock with the training and ends the training with the budget."""

    def __init__(self, budget: TimeBudget) -> None:
        self.budget = budget

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Start the clock."""
        self.budget.start()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Stop at the end of the first step after the budget."""
        if self.budget.is_over:
            control.should_training_stop = True
