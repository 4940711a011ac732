"""The loop that trains the model in the box: a budget of time, checkpoints that survive SIGKILL, one line of log each.

A loop of its own, because it counts time across interruptions, changes batch and length on the way, and takes a step
that is compiled as a whole and scores far depths at few positions: on one core that is worth half of the speed.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Schedule:
    """What one stage of the training does.

    Attributes:
        seconds: Time for it; what was spent before an interruption counts.
        steps: Steps to take instead, whatever time they need; then a resumed run equals an uninterrupted one.
        phases: (share of the stage, ids per window, packed rows per step) in order; the shares sum to 1.
        warmup: Share in which the rate rises from 0.
        decay: Share, at the end, in which the rate falls to 0.
        save_every: Seconds between checkpoints.
        log_every: Steps between lines of the log.
        evaluate_every: Seconds between evaluations on held-out text.
        amp: Multiply in bfloat16.
    """

    seconds: float
    steps: int | None = None
    phases: tuple[tuple[float, int, int], ...] = ((1.0, 512, 8),)
    warmup: float = 0.02
    decay: float = 0.6
    save_every: float = 120.0
    log_every: int = 20
    evaluate_every: float = 600.0
    amp: bool = True

    def rate(self, progress: float) -> float:
        """Share of the peak learning rate at a progress in [0, 1]."""
        rising = progress / self.warmup if self.warmup else 1.0
        return max(0.0, min(1.0, rising, (1.0 - progress) / self.decay))

    def phase(self, progress: float) -> tuple[int, int]:
        """Ids per window, and packed rows per step, at a progress in [0, 1]."""
        done = 0.0
        for share, length, rows in self.phases:
            done += share
            if progress < done:
                return length, rows
        return self.phases[-1][1:]


@dataclass
class Position:
    """How far a stage is; saved with its weights.

    Attributes:
        step: Steps taken.
        seconds: Time spent in steps.
        rows: Packed rows (of text, or of states) seen.
        consumed: Bytes (or states) seen.
    """

    step: int = 0
    seconds: float = 0.0
    rows: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class Batch:
    """What one step learns from.

    Attributes:
        tensors: Arguments of the loss.
        consumed: Bytes (or states) in it.
    """

    tensors: tuple[torch.Tensor, ...]
    consumed: int


class Loop:
    """Trains the parameters of one optimizer.

    Args:
        name: Of the stage, for the log and the checkpoint.
        folder: Where `<name>.pt` and `log.jsonl` are kept.
        module: Whose parameters are saved.
        optimizer: Steps them; its groups' rates are the peaks.
        loss: Loss of the tensors of a batch.
        batches: From the first row, the number of rows and the ids per window to a batch.
        schedule: What is done.
        evaluate: Figures on held-out text.
        clock: What the budget of time is counted in; the processor's time is fairer where other work runs beside.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[..., torch.Tensor],
        batches: Callable[[int, int, int], Batch],
        schedule: Schedule,
        evaluate: Callable[[], dict[str, float]] = dict,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name, self.folder, self.module, self.optimizer = name, folder, module, optimizer
        self.loss, self.batches, self.schedule, self.evaluate = loss, batches, schedule, evaluate
        self.clock, self.position = clock, Position()
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.mean_loss, self.marked = 0.0, Position()
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def checkpoint(self) -> Path:
        """File of the last saved state."""
        return self.folder / f"{self.name}.pt"

    @property
    def progress(self) -> float:
        """Share of the stage that is done."""
        done, whole = self.position.seconds, self.schedule.seconds
        if self.schedule.steps is not None:
            done, whole = self.position.step, self.schedule.steps
        return min(1.0, done / whole) if whole else 1.0

    def run(self) -> bool:
        """Trains to the end of the budget, from the checkpoint if there is one.

        Returns:
            Whether there was anything left to do.
        """
        self._resume()
        if self.progress >= 1.0:
            if not self.checkpoint.exists():  # nothing was to be done: what the stage began with is its result
                self.save()
            return False
        saved = evaluated = self.position.seconds
        while self.progress < 1.0:
            self._step()
            if self.position.step % self.schedule.log_every == 0:
                self._log()
            if self.position.seconds - evaluated > self.schedule.evaluate_every:
                evaluated = self.position.seconds
                self.write({"held_out": self.evaluate()})
            if self.position.seconds - saved > self.schedule.save_every:
                saved = self.position.seconds
                self.save()
        self.save()
        return True

    def _step(self) -> None:
        started, progress = self.clock(), self.progress
        scale = self.schedule.rate(progress)
        for group, peak in zip(self.optimizer.param_groups, self.peaks):
            group["lr"] = peak * scale
        length, count = self.schedule.phase(progress)
        batch = self.batches(self.position.rows, count, length)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.schedule.amp):
            loss = self.loss(*batch.tensors)
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], 1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.schedule.amp):  # Muon's products; sums stay float32
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise FloatingPointError(f"{self.name}: the loss of step {self.position.step} is {value}")
        self.mean_loss += value / self.schedule.log_every
        self.position = Position(
            self.position.step + 1,
            self.position.seconds + self.clock() - started,
            self.position.rows + count,
            self.position.consumed + batch.consumed,
        )

    def _log(self) -> None:
        spent = self.position.seconds - self.marked.seconds
        speed = (self.position.consumed - self.marked.consumed) / spent
        self.write({"loss": round(self.mean_loss, 4), "bytes_per_second": round(speed)})
        self.mean_loss, self.marked = 0.0, replace(self.position)

    def write(self, figures: dict[str, object]) -> None:
        """Adds a line to the log: where the stage is, and some figures."""
        left = None if self.schedule.steps is not None else round(self.schedule.seconds - self.position.seconds)
        line = {"stage": self.name, "step": self.position.step, "seconds": round(self.position.seconds)}
        line |= {"bytes": self.position.consumed, "seconds_left": left} | figures
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def save(self) -> None:
        """Writes weights, optimizer, position and random state under another name, then gives them theirs."""
        state = {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "position": asdict(self.position),
            "random": torch.get_rng_state(),
        }
        scratch = self.checkpoint.with_suffix(".part")
        with scratch.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self.checkpoint)

    def _resume(self) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.position = Position(**state["position"])
        self.marked = replace(self.position)
        torch.set_rng_state(state["random"])
