"""TRL's supervised fine-tuning for models with multi-token heads and for PTP. Needs the extra `train`.

`SFTTrainer` alone computes a next-token loss of its own and never calls the model's: the heads would get no gradient,
without a warning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .extras import needs_extra
from .features import STATES
from .next_token import NAMES, next_token_sums
from .ptp.trainer import PTPTrainer
from .running_means import RunningMeans
from .trainer import Inputs, MTPTrainer

with needs_extra("train", "MTPSFTTrainer"):
    from trl import SFTConfig, SFTTrainer


class _SFTHabits:
    """What TRL's trainer does beside its loss: settings that it must not take here, and its count of tokens.

    Not derived from `SFTTrainer`, which would then come before our trainers' own habits, the card among them.
    """

    def __init__(self, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        _check_settings(args)
        super().__init__(model, args, *rest, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        """The loss of the trainer behind this one, and TRL's count of tokens seen."""
        if self.model.training:
            self._total_train_tokens += self._tokens_in(inputs)
        self._metrics["train" if self.model.training else "eval"]["num_tokens"] = [self._total_train_tokens]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _tokens_in(self, inputs: Inputs) -> int:
        real = inputs.get("attention_mask")
        count = torch.tensor(inputs["input_ids"].numel()) if real is None else real.sum()
        return int(self.accelerator.gather_for_metrics(count.to(self.accelerator.device)).sum())


class MTPSFTTrainer(_SFTHabits, MTPTrainer, SFTTrainer):
    """`trl.SFTTrainer` that trains with the model's own loss, so that the heads learn.

    Everything else is TRL's: chat templates, `assistant_only_loss`, packing, LoRA through `peft_config`. From
    `MTPTrainer` come exact gradient accumulation per depth, `loss_head_1`, ... in the log, and packed borders that no
    window crosses. Pass a model, not a path.

    `mean_token_accuracy` and `entropy` are those of the backbone's own next-token distribution, over all targets: in
    evaluation of all data; in training of the last update before a log entry, because its logits are made for them
    alone. They are left out under FSDP and DeepSpeed, whose shards are gathered inside the model's forward only, and in
    training on kept features, which has no forward of the backbone.

    Raises:
        ValueError: Settings of TRL that would have no effect or a wrong one: `loss_type="dft"`, which is a loss of
            TRL's own, and `packing_strategy="wrapped"`, which joins documents without a trace of where they end.

    Example:
        >>> model.train_only("drafter")
        >>> MTPSFTTrainer(model, SFTConfig("out"), train_dataset=data, processing_class=tokenizer).train()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._next_token = {True: RunningMeans(), False: RunningMeans()}
        super().__init__(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The model's own loss; TRL's figures of the next-token distribution are noted beside it."""
        is_measured = self._measures_next_token(model.training) and STATES not in inputs
        given = {"output_hidden_states": [-1]} | inputs if is_measured else inputs
        loss, outputs = super().compute_loss(model, given, True, num_items_in_batch)
        states = getattr(outputs, "hidden_states", None) if is_measured else None
        if states is not None:
            self._next_token[model.training].add(*next_token_sums(self._owner, states[-1].detach(), inputs))
        return (loss, outputs) if return_outputs else loss

    def _measures_next_token(self, is_training: bool) -> bool:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            return False
        every = int(self.state.logging_steps or 1)
        return not is_training or (self.state.global_step + 1) % every == 0 or self.state.global_step == 0

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As in `MTPTrainer`, with TRL's figures among the metrics."""
        self._next_token[False] = RunningMeans()
        output = super().evaluation_loop(*args, **kwargs)
        output.metrics.update(self._next_token_means(False, f"{kwargs.get('metric_key_prefix', 'eval')}_"))
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs what `MTPTrainer` and TRL log, and the figures of training beside its `loss`."""
        if "loss" in logs:
            logs |= self._next_token_means(True)
        super().log(logs, start_time)

    def _next_token_means(self, is_training: bool, prefix: str = "") -> dict[str, float]:
        totals = self._next_token[is_training].take(self.accelerator)
        pairs = () if totals is None else zip(NAMES, *totals.tolist())
        return {prefix + name: total / count for name, total, count in pairs if count}


class PTPSFTTrainer(_SFTHabits, PTPTrainer, SFTTrainer):
    """`PTPTrainer` with TRL's preparation of data: chat templates, `assistant_only_loss`, packing.

    Raises:
        ValueError: As `MTPSFTTrainer`.

    Example:
        >>> PTPSFTTrainer(student, SFTConfig("out"), train_dataset=chats, processing_class=tokenizer).train()
    """

    def _own_collator(self, tokenizer: Any) -> None:
        """TRL's."""


def _check_settings(args: Any) -> None:
    """Refuses what TRL would take and nobody here would follow."""
    if not isinstance(args, SFTConfig):
        return
    if args.loss_type != "nll":
        raise ValueError(
            f"loss_type={args.loss_type!r} is a loss of TRL's own, which would leave the heads out; the model's own "
            "loss is trained: leave it at 'nll'"
        )
    packs = args.packing or args.eval_packing
    if packs and args.packing_strategy == "wrapped":
        raise ValueError(
            "packing_strategy='wrapped' joins documents without a trace of where one ends: windows would reach into "
            "the next one; choose 'bfd' or 'bfd_split'"
        )
