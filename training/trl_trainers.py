"""TRL's supervised fine-tuning and preference optimisation of models that draft. Needs the extra `train`.

`SFTTrainer` alone computes a next-token loss of its own and never calls the model's: the heads would get no gradient,
without a warning. DPO changes the backbone, and heads that are not trained with it would draft for the model as it was:
the model's own loss on the chosen completions, drafter included, is an auxiliary term.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, Trainer

from ..generation.attach import AttachableDrafter
from ..modeling import DeepSeekMTP, EvaByteForMTPC
from ..modeling.heads.backbone_parts import backbone_parts
from ..modeling.heads.chunks import LOGITS_PER_CHUNK
from ..modeling.heads.joint import JointMTPModel
from ..modeling.heads.losses import IGNORE, depth_targets
from .features import STATES
from .ptp.trainer import PTPTrainer
from .trainer import MTPTrainer
from .trainer_base import Inputs, without_peft
from .utils import needs_extra

with needs_extra("train", "a trainer of TRL"):
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

NAMES = ("mean_token_accuracy", "entropy")
"""TRL's names of what is measured of the next-token distribution; entropy in nats."""
_MEASURED = "output_hidden_states"


class _SFTBehaviour(Trainer):
    """What TRL's trainer does besides its loss: settings that do not apply here are refused, and tokens are counted.

    Not derived from `SFTTrainer`, whose methods would then come before those of our trainers, the card among them.
    """

    _total_train_tokens: int
    _metrics: defaultdict[str, defaultdict[str, list[float]]]

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        _check_settings(args)
        super().__init__(model, args, *rest, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the next trainer among the bases, and count tokens as TRL does."""
        is_training = model.training
        if is_training:
            self._total_train_tokens += self._tokens_in(inputs)
        self._metrics["train" if is_training else "eval"]["num_tokens"] = [self._total_train_tokens]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _tokens_in(self, inputs: Inputs) -> int:
        real = inputs.get("attention_mask")
        count = torch.tensor(inputs["input_ids"].numel()) if real is None else real.sum()
        counts = self.accelerator.gather_for_metrics(count.to(self.accelerator.device))
        assert isinstance(counts, torch.Tensor)
        return int(counts.sum())


class MTPSFTTrainer(_SFTBehaviour, MTPTrainer, SFTTrainer):
    """`trl.SFTTrainer` that trains with the model's own loss, so that the heads learn.

    Everything else is TRL's: chat templates, `assistant_only_loss`, packing, LoRA through `peft_config`. `MTPTrainer`
    adds exact gradient accumulation per depth, `loss_head_1`, ... in the log, and windows that end where a packed
    document does. Pass a model, not a path.

    `mean_token_accuracy` and `entropy` are those of the backbone's own next-token distribution, over all targets: in
    evaluation of all data; in training of the last update before a log entry, because its logits are computed for them
    alone. They are left out under FSDP and DeepSpeed, which gather shards inside the model's forward only, and in
    training on cached features, which does not run the backbone.

    Raises:
        ValueError: Settings of TRL that would have no effect or a wrong one: `loss_type="dft"`, a loss of TRL's own,
            and `packing_strategy="wrapped"`, which does not say where documents end.

    Example:
        >>> model.train_only("drafter")
        >>> MTPSFTTrainer(model, SFTConfig("out"), train_dataset=data, processing_class=tokenizer).train()
    """

    def compute_loss(self, model: nn.Module, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own loss, with the states of which the next-token distribution is measured."""
        if self._measures_next_token(model.training) and STATES not in inputs:
            inputs = {_MEASURED: [-1]} | inputs
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _sums(self, outputs: Any, inputs: Inputs, is_training: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `MTPTrainer`, with TRL's figures."""
        sums, counts = super()._sums(outputs, inputs, is_training)
        if self._is_sharded:
            return sums, counts
        states = outputs.get("hidden_states") if _MEASURED in inputs else None
        found = [sums.new_zeros(2), counts.new_zeros(2)]
        if states is not None:
            found = [part.to(sums.device) for part in next_token_sums(self._drafter, states[-1].detach(), inputs)]
        return torch.cat([sums, found[0]]), torch.cat([counts, found[1]])

    def _mean_names(self) -> list[str]:
        return [*super()._mean_names(), *(() if self._is_sharded else NAMES)]

    @property
    def _is_sharded(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _measures_next_token(self, is_training: bool) -> bool:
        if self._is_sharded:
            return False
        every = int(self.state.logging_steps or 1)
        return not is_training or (self.state.global_step + 1) % every == 0 or self.state.global_step == 0


class PTPSFTTrainer(_SFTBehaviour, PTPTrainer, SFTTrainer):
    """`PTPTrainer` with TRL's preparation of data: chat templates, `assistant_only_loss`, packing.

    Raises:
        ValueError: As `MTPSFTTrainer`.

    Example:
        >>> PTPSFTTrainer(student, SFTConfig("out"), train_dataset=chats, processing_class=tokenizer).train()
    """

    def _own_collator(self, tokenizer: Any) -> None:
        """TRL's."""


def _check_settings(args: Any) -> None:
    """Refuse settings that TRL accepts and these trainers do not follow."""
    if not isinstance(args, SFTConfig):
        return
    if args.loss_type != "nll":
        raise ValueError(
            f"loss_type={args.loss_type!r} is a loss of TRL's own, from which the heads would learn nothing: leave it "
            "at 'nll', for which the model's own loss is taken"
        )
    packs = args.packing or args.eval_packing
    if packs and args.packing_strategy == "wrapped":
        raise ValueError(
            "packing_strategy='wrapped' does not say where a document ends, and windows would reach into the next one; "
            "choose 'bfd' or 'bfd_split'"
        )


@torch.no_grad()
def next_token_sums(model: Any, states: torch.Tensor, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return accuracy and entropy of the backbone's next-token distribution, summed over targets in small chunks.

    Args:
        model: A model with a next-token head, or a drafter that is attached to one.
        states: The backbone's last hidden states, [B, L, d].
        inputs: `labels` or `shift_labels`, and, if present, `attention_mask` and `position_ids`.

    Returns:
        Sums of accuracy and entropy in nats, [2], and counts [2].
    """
    names = ("labels", "attention_mask", "position_ids", "shift_labels")
    labels, mask, positions, shifted = (inputs.get(name) for name in names)
    targets = depth_targets(labels, 1, mask, positions, shifted)[..., 0]
    scored = targets != IGNORE
    sums = states.new_zeros(2, dtype=torch.float32)
    owner = model.backbone if isinstance(model, (AttachableDrafter, JointMTPModel)) else model
    unembed = owner.readout if isinstance(owner, DeepSeekMTP) else backbone_parts(owner).unembed
    size = max(1, LOGITS_PER_CHUNK // model.config.get_text_config().vocab_size)
    for part, target in zip(states[scored].split(size), targets[scored].split(size)):
        log_distribution = unembed(part).float().log_softmax(-1)
        sums[0] += (log_distribution.argmax(-1) == target).sum()
        sums[1] -= (log_distribution.exp() * log_distribution).nan_to_num(nan=0.0).sum()
    return sums, scored.sum().expand(2)


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
        ValueError: A weight below 0 or not finite.

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
        self.drafter_weight = drafter_weight
        super().__init__(model, ref_model, args, **kwargs)
        for each in (self.accelerator.unwrap_model(self.model), self.ref_model):
            if each is not None:
                without_peft(each).has_warned = True  # the auxiliary term trains the drafter

    def compute_loss(
        self, model: nn.Module, inputs: Inputs, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
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
