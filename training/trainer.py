"""A Trainer for models and heads that predict several tokens: exact gradient accumulation, and losses head by head.

Knows the contract of a model (`window`, `labels`, `num_items_in_batch`, `head_losses`, `pooled_loss`), not what kind of
model it is.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from ..modeling.heads.losses import IGNORE, depth_targets
from .balance import LossBalance
from .beginning import check_checkpoint, check_data, check_depths, check_ids, check_lengths
from .preparation import callbacks_of, drafter_of, head_config, prepare
from .running_means import RunningMeansMixin
from .sharding import WholeModelMixin, check_shards
from .strategy import TrainingStrategy

Inputs = dict[str, Any]
_ABSENT = object()


class MTPTrainer(WholeModelMixin, RunningMeansMixin, Trainer):
    """transformers' Trainer for a model with multi-token heads, or for heads apart from their backbone.

    What differs from `Trainer`:

    - gradients are exact under accumulation: the targets of a whole update are counted per depth, with the model's own
      rules for padding and packed documents, and the loss of depth j is divided by count j;
    - the log carries `loss_head_1` to `loss_head_n` (evaluation: `eval_loss_head_1`, ...): the plain mean in nats per
      target of each depth since the last log, whatever the discount and the number of micro-batches; and
      `loss_backbone`, where the backbone's own head learns beside a head that has another distribution of the next
      token;
    - `eval_loss` is that of all data, made from sums and counts per depth, whatever the size of the batches;
    - where the backbone's distribution is what the drafter learns, the log carries `acceptance_head_2`, ...: the
      probability that a drafted token is kept, given the true tokens before it; of EAGLE heads `loss_step_1`,
      `acceptance_step_1`, ..., of each step of drafting;
    - `strategy` says which parts learn, when, how fast and from what;
    - where the next-token head is frozen (`model.train_only("drafter")`), its rows stay bit-equal: they share a tensor
      with the heads that learn, so that tensor gets no weight decay.

    The model's config keeps its `use_cache` (`Trainer` would leave it off in everything that is saved). A plain
    `Trainer` works, too, and takes the same steps where an update is one batch; under accumulation it counts the
    targets of the first depth alone, so that deeper ones are weighed by their share in each micro-batch; and its
    `eval_loss` is a mean over batches.

    Args:
        model: The model; attached `MTPHeads` or `EagleHead`, `EvaByteForMTPC`, `DeepSeekMTP`, or one of these in peft.
        args: As for `Trainer`.
        strategy: Applied to the model (`training.preparation.prepare`); None: what `requires_grad` says learns.
        kwargs: As for `Trainer`.

    Raises:
        TypeError: A model without heads that train here, or a path instead of a model.
        ValueError: A strategy that the model cannot follow, an empty dataset, one without a single target (at the first
            step), label smoothing, noise on embeddings (NEFTune) of a drafter that has none, or context or sequence
            parallelism, where windows would end at a shard's border.

    Example:
        >>> model.train_only("drafter")
        >>> MTPTrainer(model, TrainingArguments("out", max_steps=1000), train_dataset=data).train()
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *args: Any,
        strategy: TrainingStrategy | None = None,
        **kwargs: Any,
    ) -> None:
        config = getattr(model, "config", None)
        use_cache = vars(config).get("use_cache", _ABSENT) if config is not None else _ABSENT
        if model is not None:
            _check_model(model)
        check_data(kwargs)
        if strategy is not None:
            if model is None:
                raise ValueError("strategy is applied to a model: pass model=, not model_init=")
            model = prepare(model, strategy)
        self.strategy, self.balance = strategy, None
        self._unwrapped: tuple[nn.Module, nn.Module] | None = None
        super().__init__(model, *args, **kwargs)
        for callback in [] if strategy is None else callbacks_of(self.model, strategy):
            self.add_callback(callback)
        heads = head_config(self._owner)
        if heads is not None and heads.loss_balance == "rms":
            self.balance = LossBalance()
            self.add_callback(self.balance)
        if strategy is not None and strategy.head_warmup and self.args.ddp_find_unused_parameters is None:
            self.args.ddp_find_unused_parameters = True  # what waits gets no gradient
        _put_back(config, "use_cache", use_cache)
        _check_model(self.model)  # `model_init` may have made it
        check_data(vars(self))
        if self.get_cp_size() > 1 or self.get_sp_size() > 1:
            raise ValueError(
                "context and sequence parallelism cut sequences, and a window cannot reach into the next piece; "
                "set cp_size and sp_size to 1"
            )
        check_shards(self)
        if self.label_smoother is not None:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} would replace the model's own loss, "
                "and no head but the first would learn; set it to 0"
            )
        if self.args.neftune_noise_alpha is not None and self._owner.get_input_embeddings() is None:
            raise ValueError(
                f"neftune_noise_alpha={self.args.neftune_noise_alpha} is noise on embeddings, and a "
                f"{type(self._owner).__name__} reads those of its backbone, which stays as it is; leave it out"
            )

    @property
    def _owner(self) -> nn.Module:
        """The model itself, without what distribution wraps around it; looked for once, which takes a millisecond."""
        if self._unwrapped is None or self._unwrapped[0] is not self.model:
            self._unwrapped = self.model, self.accelerator.unwrap_model(self.model)
        return self._unwrapped[1]

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters that decay; a tensor with frozen rows is none of them."""
        warms_up = self.strategy is not None and bool(self.strategy.head_warmup)
        shared = {
            id(parameter)
            for module in model.modules()
            if getattr(module, "target_frozen", False) or (warms_up and hasattr(module, "target_frozen"))
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
        if model.training and self.balance is not None:
            defaults["balance"] = self.balance.for_update(self._num_depths)
        loss, outputs = Trainer.compute_loss(  # not super(): TRL's would leave the model's own loss, and the heads, out
            self, model, defaults | inputs, return_outputs=True, num_items_in_batch=num_items_in_batch
        )
        self._note(outputs, self._depth_counts(inputs), model.training)
        return (loss, outputs) if return_outputs else loss

    def _note(self, outputs: Any, counts: torch.Tensor, training: bool) -> None:
        """Adds the sums of one micro-batch to the running means, in the order of `_mean_names`."""
        depths = len(counts)
        rows = [
            (getattr(outputs, name, None), counts if size == depths else counts[:1])
            for name, size in self._noted(depths)
        ]
        means = [
            torch.full_like(count, torch.nan, dtype=torch.float32)
            if mean is None
            else mean.reshape(-1, len(count)).nanmean(0).float().to(count.device)  # DataParallel: a row per replica
            for mean, count in rows
        ]
        means, counts = torch.cat(means), torch.cat([count for _, count in rows])
        counts = torch.where(means.isnan(), 0, counts)
        self._means[training].add(torch.where(counts > 0, means * counts, 0.0), counts)
        if training and self.balance is not None and outputs.head_squares is not None:
            self.balance.add(outputs.head_squares.reshape(-1, depths).nanmean(0), counts[:depths])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As in `Trainer`; heads and their backbone are read from their two directories, and balanced depths go on."""
        check_checkpoint(resume_from_checkpoint, self._owner)
        if self.balance is not None:
            self.balance.load(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    @staticmethod
    def _noted(depths: int) -> list[tuple[str, int]]:
        """What of an output is logged, and how many numbers it has."""
        return [("head_losses", depths), ("backbone_loss", 1), ("acceptances", depths), ("missing_mass", 1)]

    def _pooled_loss(self, sums: torch.Tensor, counts: torch.Tensor) -> float:
        depths = self._num_depths
        loss = self._owner.pooled_loss(sums[:depths], counts[:depths])
        if counts[depths]:
            loss = loss + sums[depths] / counts[depths]
        return float(loss) if counts[:depths].any() else float("nan")

    @property
    def _num_depths(self) -> int:
        """Entries of the model's `head_losses`."""
        if not hasattr(self._owner, "loss_counts"):
            return self._owner.window
        return len(self._owner.loss_counts(torch.zeros(1, 1, dtype=torch.long, device=self.args.device)))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As in `Trainer`, with a rate of its own for the drafter, if the strategy says so."""
        made = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        factor = 1.0 if self.strategy is None else self.strategy.drafter_lr_multiplier
        if made and factor != 1.0:
            owner = self._owner  # whose draft layers may lie beside its head
            parts = [drafter_of(owner), *filter(None, [getattr(owner, "draft_layers", None)])]
            drafter = {id(parameter) for part in parts for parameter in part.parameters()}
            _split_groups(optimizer, drafter, factor)
        return optimizer

    def prediction_step(
        self, model: nn.Module, inputs: Inputs, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """As in `Trainer`; where the loss alone is asked for, next to no logits are made."""
        if prediction_loss_only:
            inputs = {"logits_to_keep": 1} | inputs
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _depth_counts(self, inputs: Inputs) -> torch.Tensor:
        """Targets per depth in one micro-batch, [n] int64."""
        names = ("labels", "attention_mask", "position_ids", "shift_labels")
        labels, *rest = (inputs.get(name) for name in names)
        if hasattr(self._owner, "loss_counts"):
            return self._owner.loss_counts(labels, *rest)
        return (depth_targets(labels, self._owner.window, *rest) != IGNORE).sum((0, 1))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Inputs], torch.Tensor | None]:
        """The micro-batches of an update and their targets per depth.

        Warns, before the first step, of depths that no row reaches.

        Raises:
            ValueError: Before the first step, where no row of the training data has a target, or ids are none.
        """
        batches, counts = super().get_batch_samples(*args, **kwargs)
        if self.balance is not None:
            self.balance.close(self.accelerator)
        if self.state.global_step == self._initial_global_step:
            check_ids(batches, self._owner.config.get_text_config().vocab_size)
            if counts is not None:
                check_depths(counts.view(-1, self._num_depths)[0], self._depth_counts, self.get_train_dataloader)
        return batches, counts

    def _get_num_items_in_batch(self, batch_samples: list[Inputs], device: torch.device) -> torch.Tensor | None:
        """Targets per depth in all micro-batches of an update and, where ranks share it, on all of them."""
        has_labels = batch_samples and {"labels", "shift_labels"} & batch_samples[0].keys()
        if not has_labels or not self.model_accepts_loss_kwargs:
            return None
        for batch in batch_samples:
            check_lengths(batch)
        counts = sum(self._depth_counts(batch) for batch in batch_samples).to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            counts = self.accelerator.gather(counts[None]).sum(0)
        elif not self.args.average_tokens_across_devices and self.args.n_gpu > 1:
            counts = counts / self.args.n_gpu
        if self.args.n_gpu > 1:  # DataParallel cuts tensors along their first axis: a copy for each replica
            counts = counts[None].expand(self.args.n_gpu, -1)
        return counts / self.get_tp_size()

    def _mean_names(self) -> list[str]:
        unit, depths = getattr(self._owner, "loss_unit", "head"), range(1, self._num_depths + 1)
        losses, kept = ([f"{name}_{unit}_{depth}" for depth in depths] for name in ("loss", "acceptance"))
        return [*losses, "loss_backbone", *kept, "missing_mass"]


def _split_groups(optimizer: torch.optim.Optimizer, chosen: set[int], factor: float) -> None:
    """Gives some parameters `factor` times the rate of their group."""
    for group in list(optimizer.param_groups):
        others = [p for p in group["params"] if id(p) not in chosen]
        faster = [p for p in group["params"] if id(p) in chosen]
        if not faster:
            continue
        rest = {name: value for name, value in group.items() if name != "params"}
        if others:
            group["params"] = others
            optimizer.add_param_group(rest | {"params": faster, "lr": group["lr"] * factor})
        else:
            group["lr"] *= factor


def _check_model(model: Any) -> None:
    """Refuses what cannot be trained here; the message says what would do."""
    if isinstance(model, (str, PathLike)):
        raise TypeError(f"MTPTrainer needs a model, not the path {str(model)!r}: load it with from_pretrained first")
    if hasattr(model, "uniform_embedding"):
        raise TypeError(f"MTPTrainer does not train a {type(model).__name__}: use PTPTrainer")
    if not hasattr(model, "pooled_loss"):
        raise TypeError(
            f"MTPTrainer needs a model that predicts several tokens, not a {type(model).__name__}: give it heads with "
            "MTPHeads.from_backbone(model), or modules with DeepSeekMTP.from_backbone(model)"
        )


def _put_back(owner: Any, name: str, value: Any) -> None:
    """Undoes an assignment to an attribute that had `value`, or that did not exist."""
    if value is not _ABSENT:
        setattr(owner, name, value)
    elif owner is not None:
        vars(owner).pop(name, None)
