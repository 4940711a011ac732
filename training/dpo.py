"""TRL's preference optimisation (DPO) of a model that drafts for itself, and of its drafter. Needs the extra `train`.

DPO changes the backbone, and heads that are not trained with it would draft for the model as it was. So the model's own
loss on the chosen completions, drafter included, is an auxiliary term.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from ..modeling import DeepSeekMTP, EvaByteForMTPC
from .batches import Inputs
from .extras import needs_extra
from .trainer_base import without_peft

with needs_extra("train", "MTPDPOTrainer"):
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer


class MTPDPOTrainer(DPOTrainer):
    """`trl.DPOTrainer` for `EvaByteForMTPC` and `DeepSeekMTP`.

    The loss is TRL's, of the backbone's own next-token distribution, plus `drafter_weight` times the model's own loss
    (that of all its heads or modules, the next token included) on the chosen completions. The log carries
    `drafter_loss`.

    Args:
        model: The model.
        ref_model: As for `DPOTrainer`: a copy of the model, or None with a `peft_config`, whose adapters are switched
            off for reference.
        args: As for `DPOTrainer`.
        drafter_weight: Weight of the auxiliary term; 0: the drafter is not trained.
        kwargs: As for `DPOTrainer`.

    Raises:
        TypeError: Attached heads, or a model that does not draft for itself.
        ValueError: A weight below 0 or not finite, or `precompute_ref_log_probs`.

    Example:
        >>> MTPDPOTrainer(model, reference, DPOConfig("out"), train_dataset=pairs, processing_class=tokenizer).train()
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        ref_model: Any = None,
        args: Any = None,
        *,
        drafter_weight: float = 0.1,
        **kwargs: Any,
    ) -> None:
        if not isinstance(without_peft(model), (DeepSeekMTP, EvaByteForMTPC)):
            raise TypeError(
                f"MTPDPOTrainer trains a model that drafts for itself (EvaByteForMTPC, DeepSeekMTP), not a "
                f"{type(model).__name__}; attached heads are trained after the preferences, with MTPSFTTrainer"
            )
        if not 0 <= drafter_weight < math.inf:
            raise ValueError(f"drafter_weight={drafter_weight} must be a number of at least 0")
        if isinstance(args, DPOConfig) and args.precompute_ref_log_probs:
            raise ValueError("precompute_ref_log_probs=True takes rows of other heads for tokens; leave it at False")
        self.drafter_weight = drafter_weight
        super().__init__(model, ref_model, args, **kwargs)
        for each in (self.accelerator.unwrap_model(self.model), self.ref_model):
            if each is not None:
                _score_own_distribution(without_peft(each))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """Return TRL's loss plus the model's own on the chosen half of the batch."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self.drafter_weight:
            return found
        loss, *rest = found if return_outputs else (found,)
        chosen = len(inputs["input_ids"]) // 2
        ids, mask = inputs["input_ids"][:chosen], inputs["attention_mask"][:chosen]
        labels = ids.masked_fill(inputs["completion_mask"][:chosen] == 0, -100)
        own = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        self._metrics["train" if model.training else "eval"]["drafter_loss"].append(own.detach().item())
        loss = loss + self.drafter_weight * own
        return (loss, *rest) if return_outputs else loss


def _score_own_distribution(model: PreTrainedModel) -> None:
    """Compute the log-probabilities that TRL asks for from the model's next-token logits.

    TRL would multiply states with all rows of `lm_head.weight`, which in EvaByte are those of all heads.
    """
    asked = model.forward

    @functools.wraps(type(model).forward)
    def forward(*args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return asked(*args, labels=labels, **kwargs)
        outputs = asked(*args, **kwargs)
        targets = labels[:, 1:]
        scored = targets != -100
        distribution = outputs.logits[:, :-1].float().log_softmax(-1)
        log_probs = distribution.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        mean = (outputs.logits[:, :-1].float().mean(-1)).masked_fill(~scored, 0.0)
        return ModelOutput(
            log_probs=torch.where(scored, log_probs, 0.0),
            entropy=torch.where(scored, -(distribution.exp() * distribution).sum(-1), 0.0).detach(),
            log_sum_sq_probs=torch.where(scored, (2 * distribution).logsumexp(-1), 0.0),
            mean_logits=mean.detach(),
            is_top1=(distribution.argmax(-1) == targets) & scored,
            label_mask=scored,
            aux_loss=outputs.get("aux_loss"),
        )

    model.forward = forward
