"""What changes while a model trains: the weight of the drafter's loss, which parts learn, and the balance of depths."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..modeling.heads.ff import FFHead
from ..modeling.heads.losses import balance_factors
from .files import replace_text
from .strategy import TrainingStrategy
from .trainer_base import RunningMeans, head_of

_BALANCE_FILE = "loss_balance.json"
_SHAPES: dict[str, Callable[[float], float]] = {
    "switch": lambda share: float(share >= 1),
    "linear": lambda share: share,
    "sine": lambda share: math.sin(math.pi / 2 * share),
}


class MTPLossWeightSchedule(TrainerCallback):
    """Changes lambda, the weight of the drafter's loss, while a model trains (DeepSeek-V3: 0.3, later 0.1).

    The weight is a function of the step alone, so a resumed training continues with the right one.

    Args:
        first: lambda at the start.
        last: lambda from `switch_at` on.
        switch_at: Share of all steps after which `last` holds (DeepSeek-V3: 10 of 14.8 trillion tokens).
        shape: How it changes: `"switch"` at once, `"linear"`, or `"sine"`: first + (last - first) *
            sin(pi / 2 * share), Medusa-2's ramp.

    Raises:
        ValueError: A negative weight, a share outside 0 to 1, or an unknown shape.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[MTPLossWeightSchedule(0.3, 0.1)]).train()
    """

    def __init__(
        self, first: float = 0.3, last: float = 0.1, switch_at: float = 10 / 14.8, shape: str = "switch"
    ) -> None:
        if first < 0 or last < 0:
            raise ValueError(f"first={first} and last={last} must both be at least 0")
        if not 0 <= switch_at <= 1:
            raise ValueError(f"switch_at={switch_at} must lie between 0 and 1")
        if shape not in _SHAPES:
            raise ValueError(f"shape={shape!r} is unknown; choose one of {', '.join(_SHAPES)}")
        self.first, self.last, self.switch_at, self.shape = first, last, switch_at, shape

    def weight(self, step: int, max_steps: int) -> float:
        """Return lambda for a step (from 0 on) of `max_steps`."""
        until = self.switch_at * max_steps
        share = min(1.0, step / until) if until else 1.0
        return self.first + (self.last - self.first) * _SHAPES[self.shape](share)

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Set the weight of the step that begins.

        Raises:
            TypeError: A model without modules.
        """
        owner = _owner(model)
        if owner is None:
            raise TypeError(f"MTPLossWeightSchedule needs a model with mtp_loss_weight, not a {type(model).__name__}")
        owner.mtp_loss_weight = self.weight(state.global_step, state.max_steps)


def _owner(model: nn.Module | None) -> Any:
    """Return the model with the weight, within what peft or distribution wraps around it."""
    modules = [] if model is None else model.modules()
    return next((module for module in modules if hasattr(type(module), "mtp_loss_weight")), None)


class HeadWarmup(TrainerCallback):
    """Trains the drafter's head alone at first, as a function of the step, so that a resumed training is the same.

    Args:
        strategy: Its `head_warmup` is read.
    """

    def __init__(self, strategy: TrainingStrategy) -> None:
        self.strategy = strategy
        self.waiting: list[nn.Parameter] | None = None

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Set for the step that begins whether everything learns."""
        model = getattr(model, "module", model)
        assert isinstance(model, nn.Module)
        if self.waiting is None:
            head = {id(p) for p in head_of(model).parameters()}
            self.waiting = [p for p in model.parameters() if p.requires_grad and id(p) not in head]
        is_over = state.global_step >= self.strategy.warmup_steps(state.max_steps)
        for parameter in self.waiting:
            parameter.requires_grad_(is_over)
        for module in model.modules():
            if self.strategy.train == "all" and isinstance(module, FFHead):
                module.target_frozen = not is_over  # the next-token head, which shares a tensor with FF heads


class LossBalance(TrainerCallback):
    """RMS balancing of depths over whole updates (Mehra et al. 2025), whatever the micro-batches.

    The paper scales depth j by RMS(l_1) / RMS(l_j) over the batch. Over a batch in pieces this needs all pieces before
    the first backward. Here the factors of an update are those of the update before it, which costs nothing and makes
    two divisions of a batch take the same step; in the first update all are 1. They are saved with checkpoints.

    Attributes:
        factors: [n] float32; None before the first update has ended.
    """

    def __init__(self) -> None:
        self.factors: torch.Tensor | None = None
        self._squares = RunningMeans()
        self._accelerator: Accelerator | None = None

    def add(self, squares: torch.Tensor, counts: torch.Tensor) -> None:
        """Add a micro-batch: mean squared terms and targets per depth, [n] each."""
        counts = counts.to(squares.device)
        self._squares.add(torch.where(counts > 0, squares * counts, 0.0), counts)

    def close(self, accelerator: Accelerator) -> None:
        """End an update."""
        self._accelerator = accelerator
        totals = self._squares.take(accelerator)
        if totals is not None:
            self.factors = balance_factors(totals[0] / totals[1].clamp(min=1)).float()

    def for_update(self, depths: int) -> torch.Tensor:
        """Return the factors of the current update, [n]."""
        return torch.ones(depths) if self.factors is None else self.factors

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the factors next to the checkpoint's weights."""
        if self._accelerator is not None:
            self.close(self._accelerator)
        if state.is_world_process_zero and self.factors is not None:
            folder = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
            replace_text(folder / _BALANCE_FILE, json.dumps(self.factors.tolist()))

    def load(self, folder: str) -> None:
        """Load what `on_save` wrote."""
        path = Path(folder) / _BALANCE_FILE
        if path.exists():
            self.factors = torch.tensor(json.loads(path.read_text(encoding="utf-8")))
