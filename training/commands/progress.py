"""A line, or a live bar, of a run in progress: loss, tokens per second, time left. Knows the Trainer's callbacks."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..extras import needs_extra

with needs_extra("demo", "the progress bar"):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

_SECONDS_BETWEEN_LINES = 20.0  # where there is no terminal to draw a bar on
_SHOWN = {
    "loss": "loss",
    "eval_loss": "held-out loss",
    "eval_expected_accepted": "accepted drafts",
    "num_correct": "slots right",
}


class RunProgress(TrainerCallback):
    """Shows how far a run is; on one process of all.

    Args:
        unit: What a token is: `"byte"` or `"token"`.
        console: Where to draw; without a terminal a line is printed now and then.
    """

    def __init__(self, unit: str = "token", console: Console | None = None) -> None:
        self.unit, self.console = unit, console or Console(stderr=True, highlight=False)
        self.figures: dict[str, float] = {}
        self.progress: Progress | None = None
        self._tokens_at_start: float | None = None
        self._speed = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock, and the bar where there is a terminal."""
        self._started, self._first_step, self._last_line = time.perf_counter(), state.global_step, 0.0
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        columns = SpinnerColumn(), TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=None)
        self.progress = Progress(*columns, TextColumn("{task.fields[figures]}"), console=self.console, expand=True)
        self.task = self.progress.add_task("", total=state.max_steps, completed=state.global_step, figures="")
        self.progress.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Note figures and speed."""
        logs = logs or {}
        self.figures |= {name: logs[name] for name in _SHOWN if name in logs}
        if "num_tokens" in logs and "loss" in logs:
            elapsed = time.perf_counter() - self._started
            if self._tokens_at_start is None:  # the steps up to the first entry set things up
                self._tokens_at_start, self._started_counting = logs["num_tokens"], elapsed
                self._speed = logs["num_tokens"] / elapsed
            else:
                passed = max(elapsed - self._started_counting, 1e-9)
                self._speed = (logs["num_tokens"] - self._tokens_at_start) / passed

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        if not state.is_world_process_zero:
            return
        if self.progress is not None:
            self.progress.update(self.task, completed=state.global_step, figures=self.line(state))
            return
        elapsed = time.perf_counter() - self._started
        if elapsed - self._last_line > _SECONDS_BETWEEN_LINES or state.global_step == state.max_steps:
            self._last_line = elapsed
            text = f"step {state.global_step}/{state.max_steps}  {self.line(state)}"
            self.console.print(text, markup=False, soft_wrap=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop the bar."""
        if self.progress is not None:
            self.progress.stop()

    def line(self, state: TrainerState) -> str:
        """Return figures, speed and time left."""
        done = state.global_step - self._first_step
        left = (time.perf_counter() - self._started) / max(done, 1) * (state.max_steps - state.global_step)
        parts = [f"{_SHOWN[name]} {value:.3f}" for name, value in self.figures.items()]
        if self._speed:
            parts.append(f"{self._speed:,.0f} {self.unit}s/s")
        return "  ".join([*parts, f"{int(left) // 60}:{int(left) % 60:02d} left"])
