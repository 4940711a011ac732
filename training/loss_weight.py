"""A schedule for the weight of the modules' losses. Knows the Trainer's callbacks and the model's `mtp_loss_weight`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_SHAPES: dict[str, Callable[[float], float]] = {
    "switch": lambda share: float(share >= 1),
    "linear": lambda share: share,
    "sine": lambda share: math.sin(math.pi / 2 * share),
}


class MTPLossWeightSchedule(TrainerCallback):
    """Lowers lambda, the weight of the modules' losses, in the course of a training (DeepSeek-V3: 0.3, later 0.1).

    The weight follows from the step alone, so a training that is resumed goes on with the right one.

    Args:
        first: lambda at the start.
        last: lambda from `switch_at` on.
        switch_at: Share of all steps after which `last` holds (DeepSeek-V3: 10 of 14.8 trillion tokens).
        shape: How it gets there: `"switch"` at once, `"linear"`, or `"sine"`: first + (last - first) *
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
            raise ValueError(f"first={first} and last={last} must be at least 0")
        if not 0 <= switch_at <= 1:
            raise ValueError(f"switch_at={switch_at} must lie between 0 and 1")
        if shape not in _SHAPES:
            raise ValueError(f"shape={shape!r} is unknown; choose one of {', '.join(_SHAPES)}")
        self.first, self.last, self.switch_at, self.shape = first, last, switch_at, shape

    def weight(self, step: int, max_steps: int) -> float:
        """lambda of a step (from 0 on) of `max_steps`."""
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
        """Sets the weight of the step that begins.

        Raises:
            TypeError: A model without modules.
        """
        owner = _owner(model)
        if owner is None:
            raise TypeError(f"MTPLossWeightSchedule needs a model with mtp_loss_weight, not a {type(model).__name__}")
        owner.mtp_loss_weight = self.weight(state.global_step, state.max_steps)


def _owner(model: nn.Module | None) -> Any:
    """The model that has the weight, within what PEFT or distribution wraps around it."""
    modules = [] if model is None else model.modules()
    return next((module for module in modules if "mtp_loss_weight" in dir(type(module))), None)
