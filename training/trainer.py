"""A Trainer for models and heads that predict several tokens: exact gradient accumulation, and losses per depth."""

from __future__ import annotations

from typing import Any, cast

import torch
from accelerate import PartialState
from torch import nn
from transformers import PreTrainedModel, Trainer
from transformers.utils.generic import ModelOutput

from ..generation.backbone.wrapped_models import shard
from ..modeling.common.outputs import TrainableDrafter
from .strategy import LossBalance, TrainingStrategy, callbacks_of, prepare
from .trainer_base import BaseTrainer, Inputs, check_depths, check_ids, without_peft


class MTPTrainer(BaseTrainer):
    """transformers' Trainer for a model with multi-token heads, or for heads that are attached to a backbone.

    - gradients are exact under accumulation: the targets of a whole update are counted per depth, and the loss of depth
      j is divided by count j; `eval_loss` is that of all data, whatever the size of the batches;
    - the log carries `loss_head_1` to `loss_head_n` (of EAGLE heads `loss_step_1`, ...): the plain mean in nats per
      target of each depth; `loss_backbone`, if the backbone's own head learns, too; where the drafter learns the
      backbone's distribution, `acceptance_head_2`, ...: the probability that a drafted token is accepted, given the
      true tokens before it;
    - columns of rows are read, known to change nothing, or refused by name (`training.columns`);
    - rows of a batch are joined without padding where the model reads them apart; else padded, by similar lengths;
    - where the next-token head is frozen (`model.train_only("drafter")`), its rows stay bit-equal: they share a tensor
      with the heads that learn, so that tensor gets no weight decay.

    Args:
        model: The model: any `TrainableDrafter`, attached, such as `MTPHeads`, `EagleHead` or `BlockDrafter`;
            `EvaByteForMTPC`, `DeepSeekMTP`, or one of these in peft.
        args: As for `Trainer`.
        strategy: Applied to the model (`training.strategy.prepare`); None: parameters that require gradients learn.
        tokens_per_batch: Tokens of a batch of one process, which has as many rows as fit. None: 4,096, or as many as
            the longest row has; where the arguments set another `per_device_train_batch_size` than transformers' 8,
            that many rows, as with 0.
        kwargs: As for `Trainer`.

    Raises:
        ValueError: A strategy that the model cannot follow, data without a single target, and what cannot be exact.

    Example:
        >>> model.train_only("drafter")
        >>> MTPTrainer(model, TrainingArguments("out", max_steps=1000), train_dataset=data).train()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *args: Any,
        strategy: TrainingStrategy | None = None,
        tokens_per_batch: int | None = None,
        **kwargs: Any,
    ) -> None:
        owner = without_peft(model)
        if model is not None and not isinstance(owner, TrainableDrafter):
            raise TypeError(f"MTPTrainer needs a model with drafts to train, not a {type(owner).__name__}")
        fields = {} if model is None else vars(model.config)
        before = {name: fields[name] for name in fields if name == "use_cache"}
        if strategy is not None:
            model = prepare(cast(nn.Module, model), strategy)
            if strategy.shard_backbone:
                whole = without_peft(model)
                shard(whole.policy if whole.is_apart else whole.inner, cast(torch.device, PartialState().device))
        self.strategy = strategy
        self.balance: LossBalance | None = None
        self._unwrapped: tuple[Any, Any] = None, None
        super().__init__(model, *args, tokens_per_batch=tokens_per_batch, **kwargs)
        for callback in callbacks_of(strategy) if strategy is not None else ():
            self.add_callback(callback)
        heads = self._drafter.head_config
        if heads is not None and heads.loss_options.balance == "rms":
            self.balance = LossBalance()
            self.add_callback(self.balance)
        if strategy is not None and strategy.head_warmup and self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = True  # waiting parts get no gradient
        fields.pop("use_cache", None)  # `Trainer` sets it, and it would be saved
        fields.update(before)
        if self.get_cp_size() > 1 or self.get_sp_size() > 1:
            raise ValueError("cp_size and sp_size cut sequences, and windows would end at each cut: set both to 1")

    @property
    def joins_rows(self) -> bool:
        """Whether rows are joined: not for a mean, or a number of blocks, of every sequence."""
        return not getattr(self._drafter, "counts_sequences", False)

    @property
    def _owner(self) -> Any:
        """The model without wrappers of distribution, of which unwrapping takes a millisecond."""
        if self._unwrapped[0] is not self.model:
            self._unwrapped = self.model, self.accelerator.unwrap_model(self.model)
        return self._unwrapped[1]

    @property
    def _drafter(self) -> TrainableDrafter:
        """The model without wrappers of distribution and peft."""
        return without_peft(self._owner)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the model's own loss; `num_items_in_batch` are the targets per depth over the whole update, [n]."""
        # the logits of a training step are not read, and a cache would only cost memory
        defaults: Inputs = {"use_cache": False} | ({"logits_to_keep": 1} if model.training else {})
        if model.training and self.balance is not None:
            defaults["balance"] = self.balance.for_update(self._drafter.num_losses)
        # not super(): TRL's would leave the model's own loss, and the heads, out
        result = Trainer.compute_loss(self, model, defaults | inputs, True, num_items_in_batch)
        loss, outputs = cast(tuple[torch.Tensor, Any], result)
        sums, counts = self._sums(outputs, inputs)
        self._means[model.training].add(sums, counts)
        if model.training and self.balance is not None and outputs.head_squares is not None:
            depths = self._drafter.num_losses
            self.balance.add(outputs.head_squares.reshape(-1, depths).nanmean(0), counts[:depths])
        return (loss, outputs) if return_outputs else loss

    def _sums(self, outputs: ModelOutput, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums of one micro-batch for the running means, and their counts, in the order of `_mean_names`."""
        counts = self._depth_counts(inputs)
        sizes, means = {"head_losses": len(counts), "backbone_loss": 1, "acceptances": len(counts)}, []
        for name, size in sizes.items():
            mean = outputs.get(name)
            if mean is None:
                mean = counts.new_full((size,), torch.nan, dtype=torch.float32)
            mean = mean.reshape(-1, size).nanmean(0)  # DataParallel: a row per replica
            means.append(mean.float().to(counts.device))
        counts, means = torch.cat([counts[:size] for size in sizes.values()]), torch.cat(means)
        counts = torch.where(means.isnan(), 0, counts)
        return torch.where(counts > 0, means * counts, 0.0), counts

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        if self.balance is not None:
            self.balance.load(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _pooled_loss(self, sums: torch.Tensor, counts: torch.Tensor) -> float:
        depths = self._drafter.num_losses
        loss = self._drafter.pooled_loss(sums[:depths], counts[:depths])
        if counts[depths]:
            loss = loss + sums[depths] / counts[depths]
        return float(loss) if counts[:depths].any() else float("nan")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        made = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        factor = 1.0 if self.strategy is None else self.strategy.drafter_lr_multiplier
        if made and factor != 1.0:
            drafter = {id(each) for part in self._drafter.parts().values() for each in part.parameters()}
            groups, optimizer.param_groups = optimizer.param_groups, []
            for group in groups:
                for is_drafter, rate in ((False, group["lr"]), (True, group["lr"] * factor)):
                    chosen = [each for each in group["params"] if (id(each) in drafter) == is_drafter]
                    if chosen:
                        optimizer.add_param_group({**group, "params": chosen, "lr": rate})
        return optimizer

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        if prediction_loss_only:
            inputs = {"logits_to_keep": 1} | inputs
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _depth_counts(self, inputs: Inputs) -> torch.Tensor:
        """Return the targets per depth of one micro-batch, [n] int64."""
        names = ("labels", "attention_mask", "position_ids", "shift_labels")
        return self._drafter.loss_counts(*(inputs.get(name) for name in names))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Inputs], torch.Tensor | None]:
        """Return the micro-batches of an update and their targets per depth; data without any are refused."""
        batches, counts = super().get_batch_samples(*args, **kwargs)
        if self.balance is not None:
            self.balance.close(self.accelerator)
        if counts is not None and self.state.global_step == self._initial_global_step:
            check_depths(cast(torch.Tensor, counts), self._depth_counts, self.get_train_dataloader)
        return batches, cast(torch.Tensor | None, counts)

    def _get_num_items_in_batch(self, batch_samples: list[Inputs], device: torch.device) -> torch.Tensor | None:
        if self.state.global_step == vars(self).get("_initial_global_step"):  # not in an evaluation alone
            check_ids(batch_samples, self._drafter.config.get_text_config().vocab_size)
        has_labels = batch_samples and {"labels", "shift_labels"} & batch_samples[0].keys()
        if not has_labels or not self.model_accepts_loss_kwargs:
            return None
        counts = torch.stack([self._depth_counts(batch) for batch in batch_samples]).sum(0).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = cast(torch.Tensor, self.accelerator.reduce(counts, "sum")) // self.get_tp_size()
        elif not self.args.average_tokens_across_devices and self.args.n_gpu > 1:
            counts = counts / self.args.n_gpu
        # DataParallel cuts tensors along their first axis. Whole numbers: FSDP2 would round floating ones
        return counts if self.args.n_gpu <= 1 else counts[None].expand(self.args.n_gpu, -1)

    def _mean_names(self) -> list[str]:
        unit, depths = self._drafter.loss_unit, range(1, self._drafter.num_losses + 1)
        losses, accepted = ([f"{name}_{unit}_{depth}" for depth in depths] for name in ("loss", "acceptance"))
        return [*losses, "loss_backbone", *accepted]
