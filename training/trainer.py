"""A Trainer for models and heads that predict several tokens: exact gradient accumulation, and losses head by head.

Knows the contract of a model (`window`, `labels`, `num_items_in_batch`, `head_losses`), not what kind of model it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer

from .losses import IGNORE, window_targets
from .running_means import RunningMeansMixin

Inputs = dict[str, Any]
_ABSENT = object()


class MTPTrainer(RunningMeansMixin, Trainer):
    """transformers' Trainer for a model with multi-token heads, or for heads apart from their backbone.

    Three things differ from `Trainer`:

    - gradients are exact under accumulation: the targets of a whole update are counted per depth, with the model's own
      rules for padding and packed documents, and the loss of depth j is divided by count j;
    - the log carries `loss_head_1` to `loss_head_n` (evaluation: `eval_loss_head_1`, ...): the plain mean in nats per
      target of each depth since the last log, whatever the discount and the number of micro-batches;
    - where the next-token head is frozen (`model.train_only("drafter")`), its rows stay bit-equal: they share a tensor
      with the heads that learn, so that tensor gets no weight decay.

    The model's config keeps its `use_cache` (`Trainer` would leave it off in everything that is saved).

    Raises:
        ValueError: Label smoothing, or context or sequence parallelism, where windows would end at a shard's border.

    Example:
        >>> model.train_only("drafter")
        >>> MTPTrainer(model, TrainingArguments("out", max_steps=1000), train_dataset=data).train()
    """

    def __init__(self, model: nn.Module | None = None, *args: Any, **kwargs: Any) -> None:
        config = getattr(model, "config", None)
        use_cache = vars(config).get("use_cache", _ABSENT) if config is not None else _ABSENT
        super().__init__(model, *args, **kwargs)
        _put_back(config, "use_cache", use_cache)
        if self.get_cp_size() > 1 or self.get_sp_size() > 1:
            raise ValueError(
                "context and sequence parallelism cut sequences, and a window cannot reach into the next piece; "
                "set cp_size and sp_size to 1"
            )
        if self.label_smoother is not None:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} would replace the model's own loss, "
                "and no head but the first would learn; set it to 0"
            )

    @property
    def _owner(self) -> nn.Module:
        """The model itself, without what distribution wraps around it."""
        return self.accelerator.unwrap_model(self.model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that decay; a tensor with frozen rows is none of them."""
        shared = {
            id(parameter)
            for module in model.modules()
            if getattr(module, "target_frozen", False)
            for parameter in module.parameters()
        }
        frozen = {name for name, parameter in model.named_parameters() if id(parameter) in shared}
        return [name for name in super().get_decay_parameter_names(model) if name not in frozen]

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """The model's own loss; its parts are noted for the log.

        Args:
            model: The model, perhaps wrapped.
            inputs: Keyword arguments of its forward.
            return_outputs: Return the model's output too.
            num_items_in_batch: Targets per depth over the whole update, [n].

        Returns:
            The loss, and the output where asked for.
        """
        # nobody reads the logits of a training step, and a cache would only cost memory
        defaults = {"use_cache": False} | ({"logits_to_keep": 1} if model.training else {})
        loss, outputs = Trainer.compute_loss(  # not super(): TRL's would leave the model's own loss, and the heads, out
            self, model, defaults | inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        if getattr(outputs, "head_losses", None) is not None:
            counts = self._depth_counts(inputs)
            means = outputs.head_losses.reshape(-1, len(counts)).nanmean(0)  # DataParallel returns a row per replica
            counts = counts.to(means)
            self._means[model.training].add(torch.where(counts > 0, means * counts, 0.0), counts)
        return (loss, outputs) if return_outputs else loss

    def _depth_counts(self, inputs: Inputs) -> torch.Tensor:
        """Targets per depth in one micro-batch, [n] int64."""
        labels = inputs["labels"]
        if labels.dim() == 2:
            labels = window_targets(
                labels, self._owner.window, inputs.get("attention_mask"), inputs.get("position_ids")
            )
        return (labels != IGNORE).sum((0, 1))

    def _get_num_items_in_batch(self, batch_samples: list[Inputs], device: torch.device) -> torch.Tensor | None:
        """Targets per depth in all micro-batches of an update and, where ranks share it, on all of them."""
        if not batch_samples or "labels" not in batch_samples[0] or not self.model_accepts_loss_kwargs:
            return None
        counts = sum(self._depth_counts(batch) for batch in batch_samples).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.gather(counts[None]).sum(0)
        elif not self.args.average_tokens_across_devices and self.args.n_gpu > 1:
            counts = counts / self.args.n_gpu
        if self.args.n_gpu > 1:  # DataParallel cuts tensors along their first axis: a copy for each replica
            counts = counts[None].expand(self.args.n_gpu, -1)
        return counts / self.get_tp_size()

    def _mean_names(self) -> list[str]:
        return [f"loss_head_{depth}" for depth in range(1, self._owner.window + 1)]


def _put_back(owner: Any, name: str, value: Any) -> None:
    """Undoes an assignment to an attribute that had `value`, or that did not exist."""
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif owner is not None:
        vars(owner).pop(name, None)
