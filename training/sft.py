"""TRL's supervised fine-tuning for models with multi-token heads. Needs the extra `train`.

`SFTTrainer` alone computes a next-token loss of its own and never calls the model's: the heads would get no gradient,
without a warning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .extras import needs_extra
from .trainer import Inputs, MTPTrainer

with needs_extra("train", "MTPSFTTrainer"):
    from trl import SFTTrainer


class MTPSFTTrainer(MTPTrainer, SFTTrainer):
    """`trl.SFTTrainer` that trains with the model's own loss, so that the heads learn.

    Everything else is TRL's: chat templates, `assistant_only_loss`, packing, LoRA through `peft_config`. From
    `MTPTrainer` come exact gradient accumulation per depth, `loss_head_1`, ... in the log, and packed borders that no
    window crosses. Pass a model, not a path.

    Example:
        >>> model.train_only("drafter")
        >>> MTPSFTTrainer(model, SFTConfig("out"), train_dataset=data, processing_class=tokenizer).train()
    """

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The model's own loss, and TRL's count of tokens seen."""
        if self.model.training:
            self._total_train_tokens += self._tokens_in(inputs)
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [self._total_train_tokens]
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _tokens_in(self, inputs: Inputs) -> int:
        real = inputs.get("attention_mask")
        count = torch.tensor(inputs["input_ids"].numel()) if real is None else real.sum()
        return int(self.accelerator.gather_for_metrics(count.to(self.accelerator.device)).sum())
