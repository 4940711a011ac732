"""Applies a `TrainingStrategy` to a model: which parameters learn, what the loss is, what changes as steps go by."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..configuration import MTPHeadConfig
from ..modeling.heads.joint import JointMTPModel
from ..modeling.loss_options import SUPPORTED
from .adapters import check_no_adapters, learn_by_adapters, lora_config
from .loss_weight import MTPLossWeightSchedule
from .strategy import TrainingStrategy

_LOSS_OPTIONS = {
    "loss_target": "target",
    "loss_divergence": "divergence",
    "loss_label_weight": "label_weight",
    "loss_top_k": "top_k",
    "loss_balance": "balance",
    "gamma": "decay",
}
"""The option of a loss (`LossOptions`) that each field of a strategy sets; heads have the fields in their config."""


def prepare(model: nn.Module, strategy: TrainingStrategy) -> nn.Module:
    """Chooses what learns, and from what.

    Args:
        model: Attached `MTPHeads` or `EagleHead`, or a model that owns its drafter; changed in place.
        strategy: The recipe.

    Returns:
        What a trainer trains: the model; attached heads and their backbone as one (`JointMTPModel`); or, with adapters,
        the model within peft's.

    Raises:
        ValueError: A part of the recipe that this model cannot follow; the message names the field.
    """
    _set_losses(model, strategy)
    _set_draft_layers(model, strategy)
    _check_warmup(model, strategy)
    if hasattr(model, "on_attach"):
        return model if strategy.train == "drafter" else _joined(model, strategy)
    if strategy.train != "drafter":
        check_no_adapters(model, type(model).__name__, strategy)
    if strategy.train != "lora":
        model.train_only(strategy.train)
        return model
    return _adapted(model, strategy)


def callbacks_of(model: nn.Module, strategy: TrainingStrategy) -> list[TrainerCallback]:
    """What has to happen while a prepared model is trained."""
    found: list[TrainerCallback] = []
    if strategy.head_warmup:
        found.append(HeadWarmup(strategy))
    if strategy.loss_weight is not None:
        last = strategy.loss_weight if strategy.loss_weight_last is None else strategy.loss_weight_last
        shape = strategy.loss_weight_shape
        found.append(MTPLossWeightSchedule(strategy.loss_weight, last, strategy.loss_weight_until, shape))
    return found


def drafter_of(model: nn.Module) -> nn.Module:
    """The module that drafts, within a model that a trainer trains."""
    owner = model.get_base_model() if hasattr(model, "peft_config") else model
    for name in ("heads", "mtp"):
        if hasattr(owner, name):
            return getattr(owner, name)
    return owner if hasattr(owner, "on_attach") else owner.head


def head_of(model: nn.Module) -> nn.Module:
    """The part of the drafter that learns during a warm-up: all of it but draft layers."""
    drafter = drafter_of(model)
    return drafter.head if getattr(drafter, "draft_layers", None) is not None else drafter


class HeadWarmup(TrainerCallback):
    """Lets the drafter's head learn alone at first. It follows from the step alone, so a resumed training is the same.

    Args:
        strategy: Its `head_warmup` is read.
    """

    def __init__(self, strategy: TrainingStrategy) -> None:
        self.strategy = strategy
        self.waiting: list[nn.Parameter] | None = None

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Says for the step that begins whether everything learns."""
        model = getattr(model, "module", model)
        if self.waiting is None:
            head = {id(p) for p in head_of(model).parameters()}
            self.waiting = [p for p in model.parameters() if p.requires_grad and id(p) not in head]
        is_over = state.global_step >= self.strategy.warmup_steps(state.max_steps)
        for parameter in self.waiting:
            parameter.requires_grad_(is_over)
        for module in model.modules():
            if self.strategy.train == "all" and hasattr(module, "target_frozen"):
                module.target_frozen = not is_over  # the next-token head, which shares a tensor with FF heads


def _set_losses(model: nn.Module, strategy: TrainingStrategy) -> None:
    """Set the strategy's options of the loss in the config of heads, or in the `loss_options` of other drafters."""
    given = {name: getattr(strategy, name) for name in _LOSS_OPTIONS if getattr(strategy, name) is not None}
    config, options = head_config(model), getattr(model, "loss_options", None)
    for name, value in given.items():
        if config is not None:
            setattr(config, name, value)
        elif options is not None and _LOSS_OPTIONS[name] in SUPPORTED[options.kind]:
            setattr(options, _LOSS_OPTIONS[name], value)
        elif options is None or value != getattr(options, _LOSS_OPTIONS[name], None):
            raise ValueError(f"{name}={value!r} is not supported by a {type(model).__name__}; leave it out")
    _check_teacher(model, given, config.loss_target if config is not None else options and options.target)
    if config is not None:
        if "gamma" in given:
            config.loss_weights = _discounted(config, given["gamma"])
        config.validate()
    if strategy.loss_weight is not None and not hasattr(model, "mtp_loss_weight"):
        raise ValueError(
            f"loss_weight={strategy.loss_weight}: a {type(model).__name__} learns on a frozen backbone, and its loss "
            "stands alone; leave loss_weight out"
        )


def head_config(model: nn.Module) -> MTPHeadConfig | None:
    """Return the config of a model's heads; None for models without heads."""
    config = getattr(model.config, "mtp_head", model.config)
    return config if isinstance(config, MTPHeadConfig) else None


def _check_teacher(model: nn.Module, given: dict[str, Any], target: str | None) -> None:
    """Refuse options that compare distributions where labels are learned."""
    for name in ("loss_divergence", "loss_label_weight", "loss_top_k"):
        if name in given and target == "labels":
            raise ValueError(
                f"{name}={given[name]!r} is an option of loss_target='teacher', and this {type(model).__name__} learns "
                f"the labels: set loss_target='teacher', or leave {name} out"
            )


def _discounted(config: Any, gamma: float) -> list[float] | None:
    """Weights of a family that has a recipe of its own, with another discount; depth 1 weighs what it says."""
    recipe = config.family.loss_weights
    return None if recipe is None else [recipe(config.window)[0], *(gamma**k for k in range(1, config.window))]


def _set_draft_layers(model: nn.Module, strategy: TrainingStrategy) -> None:
    if strategy.draft_layers is None:
        if strategy.train == "lora" and getattr(model, "draft_layers", None) is not None:
            raise ValueError("train='lora' changes the backbone, and draft layers take it as it is; choose 'drafter'")
        return
    if not hasattr(model, "add_draft_layers"):
        raise ValueError(f"draft_layers={strategy.draft_layers}: heads have them, a {type(model).__name__} has not")
    if strategy.draft_layers and strategy.train != "drafter":
        raise ValueError(
            f"draft_layers={strategy.draft_layers} leaves the backbone as it is, train={strategy.train!r} does not; "
            "choose train='drafter'"
        )
    config = getattr(model.config, "mtp_head", model.config)
    rank = strategy.draft_lora_rank
    if strategy.draft_layers != config.draft_layers:
        model.add_draft_layers(strategy.draft_layers, rank or 8)
    elif strategy.draft_layers and rank not in (None, config.draft_lora_rank):
        raise ValueError(
            f"draft_lora_rank={rank}: the draft layers that are there have rank {config.draft_lora_rank}; leave it out"
        )


def _check_warmup(model: nn.Module, strategy: TrainingStrategy) -> None:
    """Refuses a warm-up of the head where nothing else learns afterwards."""
    if strategy.head_warmup and strategy.train == "drafter" and getattr(model, "draft_layers", None) is None:
        raise ValueError(
            f"head_warmup={strategy.head_warmup} lets the head learn alone at first, and nothing waits for its end "
            "with train='drafter' and no draft layers; leave it out, or set train='all', train='lora' or draft_layers"
        )


def _joined(model: nn.Module, strategy: TrainingStrategy) -> nn.Module:
    if not hasattr(model, "learn"):
        raise ValueError(
            f"train={strategy.train!r}: a {type(model).__name__} is trained on a frozen backbone; choose "
            "train='drafter'"
        )
    if strategy.train == "all":
        check_no_adapters(model.backbone, "backbone", strategy)
        model.backbone.requires_grad_(True)
    else:
        learn_by_adapters(model.backbone, strategy)
    return JointMTPModel(model)


def _adapted(model: nn.Module, strategy: TrainingStrategy) -> nn.Module:
    from peft import get_peft_model

    drafter = drafter_of(model)
    name = next(name for name, module in model.named_modules() if module is drafter)
    return get_peft_model(model, lora_config(model, strategy, name))
