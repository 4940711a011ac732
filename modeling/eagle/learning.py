"""How an EAGLE head learns on its backbone, or on states of it that were kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.utils.generic import can_return_tuple

from ..heads.learning import split_states
from ..heads.losses import IGNORE, check_targets
from ..outputs import EagleOutput
from .losses import TrainingBatch, eagle_loss, pooled_loss, rows_that_count


class EagleLearningMixin:
    """The training forward of `EagleHead`, and what `MTPTrainer` asks of it."""

    loss_unit = "step"
    """What the log calls an entry of `head_losses`: `loss_step_1`, ..."""

    @property
    def num_losses(self) -> int:
        """Steps of drafting that are trained."""
        return self.loss_options.resolved(self.config.version).steps

    @property
    def learning_layers(self) -> list[int]:
        """The states of the backbone that training reads, as `output_hidden_states` counts them."""
        wanted = self.hidden_layers
        return [-1] if wanted == -1 else [*dict.fromkeys(wanted), -1]

    def loss_counts(
        self,
        labels: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows that count per step in a batch of these arguments of `forward`, [steps] int64."""
        labels = _labels(labels, shift_labels)
        batch = TrainingBatch.of(labels, labels, attention_mask, position_ids, labels)
        return rows_that_count(batch, self.loss_options.resolved(self.config.version))

    def pooled_loss(self, sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """The loss on data of which only sums per step are known, [steps] each."""
        return pooled_loss(sums, counts, self.loss_options.resolved(self.config.version))

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        cached_states: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> EagleOutput:
        """The training loss on the frozen backbone, see `loss_options`, and the backbone's logits of the last position.

        Row t of step i counts where token t + 2 + i exists, is no padding, and its label is not -100.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, L], 0 for padding.
            position_ids: [B or 1, L]; where they restart, a packed document begins.
            labels: [B, L] int64, shifted here, -100 ignored.
            num_items_in_batch: Rows that count per step over all micro-batches, [steps] or one number (the Trainer's).
            cached_states: [B, L, S, D], the states that `learning_layers` names, from an earlier run of the backbone on
                the same tokens: it is then not run, and there are no logits.
            **kwargs: `shift_labels` [B, L], the target of every position, in place of `labels`; with
                `output_hidden_states` the backbone's states that were read are returned; the rest is not read.

        Returns:
            `EagleOutput`; `logits` is [B, 1, V].

        Raises:
            ValueError: Labels that are no token ids, or `loss_options` that contradict the head.
        """
        if cached_states is not None:
            states, logits = split_states(cached_states, self.learning_layers), None
        else:
            outputs = self._run_backbone(input_ids, attention_mask, position_ids)
            states, logits = outputs.hidden_states, outputs.logits
        labels = _labels(labels, kwargs.get("shift_labels"))
        shown = states if kwargs.get("output_hidden_states") and cached_states is None else None
        if labels is None:
            return EagleOutput(logits=logits, hidden_states=shown)
        labels = check_targets(labels, self.config.vocab_size)
        batch = TrainingBatch.of(input_ids, labels, attention_mask, position_ids, states[-1])
        found = eagle_loss(self, self.fuse(states), batch, num_items_in_batch)
        return EagleOutput(
            loss=found.loss,
            logits=logits,
            hidden_states=shown,
            step_losses=found.shown,
            head_losses=found.means,
            acceptances=found.acceptances,
        )

    def _run_backbone(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> Any:
        if position_ids is None and attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            return self.backbone(
                input_ids,
                attention_mask=attention_mask,
                **({} if position_ids is None else {"position_ids": position_ids}),
                use_cache=False,
                logits_to_keep=1,
                output_hidden_states=self.learning_layers,
                return_dict=True,
            )


def _labels(labels: torch.Tensor | None, shift_labels: torch.Tensor | None) -> torch.Tensor | None:
    return labels if shift_labels is None else nn.functional.pad(shift_labels, (1, -1), value=IGNORE)
