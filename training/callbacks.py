"""Training against the clock: a budget of seconds, a learning rate that follows it, and a live progress bar.

Knows the Trainer's callbacks; knows neither models nor data.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .trainer import MTPTrainer

_WARMUP = 0.04  # share of a budget in which the learning rate rises
_SECONDS_BETWEEN_LINES = 20.0  # where there is no terminal to draw a bar on


class TimeBudget:
    """Seconds for training, and the learning rate that is due as they pass.

    Args:
        seconds: The budget.
        first: Share of the peak learning rate at the start, after a short rise from a tenth of it.
        last: Share of the peak learning rate at the end; between the two it falls in a straight line.
        clock: What tells the time, by default `time.perf_counter`; `time.process_time` leaves out what other programs
            take.

    Raises:
        ValueError: A budget that is not positive.
    """

    def __init__(
        self,
        seconds: float,
        first: float = 1.0,
        last: float = 0.0,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds={seconds} must be above 0")
        self.seconds, self.first, self.last = seconds, first, last
        self.clock = time.perf_counter if clock is None else clock
        self._started: float | None = None

    def start(self) -> None:
        """Starts the clock."""
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
        """Share of the peak learning rate that is due now."""
        passed = min(1.0, self.elapsed / self.seconds)
        rise = min(1.0, 0.1 + 0.9 * passed / _WARMUP)
        return rise * (self.first + (self.last - self.first) * passed)


class TimedTrainer(MTPTrainer):
    """A trainer whose learning rate falls to 0 when a budget of time ends, however many steps that takes.

    Args:
        budget: The budget; its clock starts with the training, and training stops when it is over.
        args: As for `MTPTrainer`.
        kwargs: As for `MTPTrainer`.
    """

    def __init__(self, budget: TimeBudget, *args: Any, **kwargs: Any) -> None:
        self.budget = budget
        super().__init__(*args, **kwargs)
        self.add_callback(TimeBudgetCallback(budget))

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """A schedule that reads the clock and not the number of steps."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer, lambda step: self.budget.rate()
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler


class TimeBudgetCallback(TrainerCallback):
    """Starts a budget's clock with the training and ends the training with the budget."""

    def __init__(self, budget: TimeBudget) -> None:
        self.budget = budget

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock."""
        self.budget.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stops at the end of the first step after the budget."""
        if self.budget.is_over:
            control.should_training_stop = True


class StepCounter(TrainerCallback):
    """Counts the steps of all trainers that it is given to.

    Attributes:
        count: Steps so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Counts one."""
        self.count += 1


class ProgressCallback(TrainerCallback):
    """A live bar: step, loss, bits per byte of head 1, bytes per second, time left.

    Args:
        title: What is trained.
        budget: The time that the bar shows.
        bytes_per_step: Bytes that a step learns from.
        console: Where the bar is drawn; without a terminal a line is printed now and then.
    """

    def __init__(self, title: str, budget: TimeBudget, bytes_per_step: int, console: Console) -> None:
        self.budget, self.bytes_per_step, self.console = budget, bytes_per_step, console
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[figures]}"),
            _TimeLeft(budget),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
            expand=True,
        )
        self.title = title
        self.task = self.progress.add_task(title, total=budget.seconds, figures="")
        self.logs: dict[str, float] = {}
        self._last_line = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Shows the bar."""
        self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Moves the bar."""
        figures = self.figures(state.global_step)
        self.progress.update(self.task, completed=min(self.budget.elapsed, self.budget.seconds), figures=figures)
        is_due = self.budget.elapsed - self._last_line > _SECONDS_BETWEEN_LINES or self.budget.is_over
        if is_due and not self.console.is_terminal:
            self._last_line = self.budget.elapsed
            self.console.print(
                f"{self.title}: {self.budget.elapsed:.0f}/{self.budget.seconds:.0f} s  {figures}", soft_wrap=True
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Notes the losses."""
        self.logs |= logs or {}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves the bar as it is."""
        self.close()

    def close(self) -> None:
        """Leaves the bar as it is; to be called where training was interrupted."""
        self.progress.stop()

    def figures(self, step: int) -> str:
        """What the bar says after `step` steps."""
        speed = step * self.bytes_per_step / max(self.budget.elapsed, 1e-9)
        parts = [f"step {step}"]
        if "loss" in self.logs:
            parts.append(f"loss {self.logs['loss']:.3f}")
        if "loss_head_1" in self.logs:
            parts.append(f"{self.logs['loss_head_1'] / math.log(2):.3f} bits/byte")
        return "  ".join([*parts, f"{speed:,.0f} bytes/s"])


class _TimeLeft(ProgressColumn):
    """Time until a budget ends, as minutes and seconds."""

    def __init__(self, budget: TimeBudget) -> None:
        super().__init__()
        self.budget = budget

    def render(self, task: Task) -> Text:
        left = max(0, round(self.budget.seconds - self.budget.elapsed))
        return Text(f"{left // 60}:{left % 60:02d} left", style="progress.remaining")
