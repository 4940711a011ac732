"""TRL's preference optimisation (DPO) of a model that drafts for itself, whose drafter keeps up. Needs `train`.

DPO moves the backbone, and heads that stay behind would draft for a model that is no more. So the model's own loss on
the chosen completions, drafter included, is an auxiliary term.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import ModelOutput

from ..generation.attach import AttachableDrafter
from .extras import needs_extra

with needs_extra("train", "MTPDPOTrainer"):
    from trl import DPOTrainer

Inputs = dict[str, Any]


class MTPDPOTrainer(DPOTrainer):
    """`trl.DPOTrainer` for `EvaByteForMTPC` and `DeepSeekMTP`.

    The loss is TRL's, of the backbone's own next-token distribution, plus `drafter_weight` times the model's own loss
    (that of all its heads or modules, the next token included) on the chosen completions. The log carries
    `drafter_loss`.

    Args:
        model: The model.
        ref_model: As for `DPOTrainer`: a copy of the model, or None with a `peft_config`, whose adapters are left out
            for reference.
        args: As for `DPOTrainer`.
        drafter_weight: Weight of the auxiliary term; 0 leaves the drafter behind.
        kwargs: As for `DPOTrainer`.

    Raises:
        TypeError: Heads apart from their backbone, or a model that does not draft for itself.
        ValueError: A weight below 0 or that is no number, or `precompute_ref_log_probs`.

    Example:
        >>> MTPDPOTrainer(model, reference, DPOConfig("out"), train_dataset=pairs, processing_class=tokenizer).train()
    """

    def __init__(
        self, model: nn.Module, ref_model: Any = None, args: Any = None, *, drafter_weight: float = 0.1, **kwargs: Any
    ) -> None:
        if isinstance(model, AttachableDrafter) or not hasattr(model, "pooled_loss"):
            raise TypeError(
                f"MTPDPOTrainer trains a model that drafts for itself (EvaByteForMTPC, DeepSeekMTP), not a "
                f"{type(model).__name__}; attached heads are trained after the preferences, with MTPSFTTrainer"
            )
        if not 0 <= drafter_weight < math.inf:
            raise ValueError(f"drafter_weight={drafter_weight} must be a number of at least 0")
        if getattr(args, "precompute_ref_log_probs", False):
            raise ValueError("precompute_ref_log_probs=True reads rows of other heads as tokens; leave it at False")
        self.drafter_weight = drafter_weight
        super().__init__(model, ref_model, args, **kwargs)
        for each in (self.accelerator.unwrap_model(self.model), self.ref_model):
            if each is not None:
                _score_own_distribution(each.get_base_model() if hasattr(each, "peft_config") else each)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """TRL's loss, and the model's own on the chosen half of the batch."""
        found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if not self.drafter_weight:
            return found
        loss, *rest = found if return_outputs else (found,)
        chosen = len(inputs["input_ids"]) // 2
        ids, mask = inputs["input_ids"][:chosen], inputs["attention_mask"][:chosen]
        labels = ids.masked_fill(inputs["completion_mask"][:chosen] == 0, -100)
        own = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        self._metrics["train" if self.model.training else "eval"]["drafter_loss"].append(own.detach().item())
        loss = loss + self.drafter_weight * own
        return (loss, *rest) if return_outputs else loss


def _score_own_distribution(model: nn.Module) -> None:
    """Answers TRL's question for log-probabilities from the model's next-token logits.

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
            aux_loss=getattr(outputs, "aux_loss", None),
        )

    model.forward = forward
