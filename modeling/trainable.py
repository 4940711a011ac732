"""What a trainer needs of a drafter."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from .heads.losses import IGNORE, depth_targets


@runtime_checkable
class TrainableDrafter(Protocol):
    """A drafter that computes its own loss from labels; `MTPTrainer` trains it.

    Its `forward` takes `labels` and `num_items_in_batch` (targets per depth over the whole update, [n]) and returns an
    output with `loss` and `head_losses` [n].

    Attributes:
        config: Its configuration.
        loss_unit: Name of an entry of `head_losses` in the log: `loss_head_1`, or `loss_step_1`.
        num_losses: n, the number of entries.
    """

    config: Any
    loss_unit: str

    @property
    def num_losses(self) -> int:
        """Return n."""
        ...

    def loss_counts(
        self,
        labels: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the targets per depth of a batch with these arguments of `forward`, [n] int64."""
        ...

    def pooled_loss(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return the loss of data of which only sums of terms and targets per depth are known, [n] each."""
        ...


class DepthCountsMixin:
    """Loss terms per depth of a window, as `TrainableDrafter` asks for them."""

    loss_unit = "head"
    window: int

    @property
    def num_losses(self) -> int:
        """Depths of the window."""
        return self.window

    def loss_counts(
        self,
        labels: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the targets per depth of a batch, [n] int64."""
        targets = depth_targets(labels, self.window, attention_mask, position_ids, shift_labels)
        return (targets != IGNORE).sum((0, 1))
