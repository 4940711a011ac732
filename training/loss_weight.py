"""A schedule for the weight of the modules' losses. Knows the Trainer's callbacks and the model's `mtp_loss_weight`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class MTPLossWeightSchedule(TrainerCallback):
    """Lowers lambda, the weight of the modules' losses, in the course of a training (DeepSeek-V3: 0.3, later 0.1).

    The weight follows from the step alone, so a training that is resumed goes on with the right one.

    Args:
        first: lambda at the start.
        last: lambda from `switch_at` on.
        switch_at: Share of all steps after which `last` holds (DeepSeek-V3: 10 of 14.8 trillion tokens).

    Raises:
        ValueError: A negative weight, or a share outside 0 to 1.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[MTPLossWeightSchedule(0.3, 0.1)]).train()
    """

    def __init__(self, first: float = 0.3, last: float = 0.1, switch_at: float = 10 / 14.8) -> None:
        if first < 0 or last < 0:
            raise ValueError(f"first={first} and last={last} must be at least 0")
        if not 0 <= switch_at <= 1:
            raise ValueError(f"switch_at={switch_at} must lie between 0 and 1")
        self.first, self.last, self.switch_at = first, last, switch_at

    def weight(self, step: int, max_steps: int) -> float:
        """lambda of a step (from 0 on) of `max_steps`."""
        return self.first if step < self.switch_at * max_steps else self.last

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
