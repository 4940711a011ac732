"""Applies a `TrainingStrategy` to a model: which parameters learn, by which adapters, and from what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import TrainerCallback

from ..configuration.transformers_names import obstacle_of_peft
from ..generation.backbone.wrapped_models import WrapperMixin, carries_adapters
from ..generation.drafter import BaseDrafter
from ..modeling.common.outputs import TrainableDrafter
from ..modeling.heads.joint import JointMTPModel
from .strategy import HeadWarmup, MTPLossWeightSchedule, TrainingStrategy
from .trainer_base import without_peft

_QUERIES = ("q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn")
_RANK = 8


def prepare(model: nn.Module, strategy: TrainingStrategy) -> nn.Module:
    """Choose what learns of attached heads, or of a model that owns its drafter, and from what; changed in place.

    Return the model to train: this one; attached heads and their backbone as one (`JointMTPModel`); or, with adapters,
    the model within peft's.
    """
    owner = without_peft(model)
    if not (isinstance(owner, BaseDrafter) and isinstance(owner, TrainableDrafter)):
        raise TypeError(f"strategy= is for heads, modules and EvaByteForMTPC, not for a {type(owner).__name__}")
    set_loss_options(owner, strategy.loss)
    if strategy.loss_weight is not None and owner.mtp_loss_weight is None:
        raise ValueError(f"loss_weight={strategy.loss_weight}: a {type(owner).__name__} has one loss; leave it out")
    _set_draft_layers(owner, strategy)
    takes_shares = owner.is_apart or (isinstance(owner, WrapperMixin) and owner.takes_shares)
    if strategy.shard_backbone and (not takes_shares or strategy.train != "drafter" or "draft_layers" in owner.parts()):
        raise ValueError("shard_backbone=True is for a frozen backbone that no drafter adapts: launch with FSDP2")
    if owner.is_apart:
        return model if strategy.train == "drafter" else _joined(model, strategy)
    if strategy.train != "drafter":
        check_no_adapters(model, type(owner).__name__, strategy)
    if strategy.train != "lora":
        cast(Any, owner).train_only(strategy.train)
        return model
    [drafter] = owner.parts().values()
    name = next(name for name, module in model.named_modules() if module is drafter)
    return get_peft_model(model, lora_config(model, strategy, name))


def callbacks_of(strategy: TrainingStrategy) -> list[TrainerCallback]:
    """Return the callbacks that apply a strategy while its prepared model is trained."""
    callbacks: list[TrainerCallback] = [HeadWarmup(strategy)] if strategy.head_warmup else []
    if strategy.loss_weight is not None:
        last = strategy.loss_weight if strategy.loss_weight_last is None else strategy.loss_weight_last
        shape = strategy.loss_weight_shape
        callbacks.append(MTPLossWeightSchedule(strategy.loss_weight, last, strategy.loss_weight_until, shape))
    return callbacks


def set_loss_options(model: Any, changes: Mapping[str, Any]) -> None:
    """Set options of a drafter's loss, in its `loss_options`; those that it does not have, or not read, are refused."""
    if not changes:
        return
    options, config, kind = model.loss_options, model.head_config, type(model).__name__
    known = list(getattr(options, "__dict__", ()))
    if odd := [name for name in changes if name not in known]:
        raise ValueError(f"loss option {odd[0]!r}: the loss of a {kind} has {', '.join(known) or 'no options'}")
    options.update(**changes)
    if config is not None:
        config.validate_architecture()
    int(model.num_losses)  # validates those of EAGLE
    target = options.target if config is None else config.loss_target
    unread = changes.keys() & {"divergence", "position_weighting", "label_weight"}
    if unread and target == "labels":
        raise ValueError(f"loss option {min(unread)!r} is for target='teacher', and this {kind} learns the labels")


def _set_draft_layers(model: Any, strategy: TrainingStrategy) -> None:
    count, rank, config = strategy.draft_layers, strategy.draft_lora_rank, model.head_config
    if strategy.train != "drafter" and (count or (count is None and "draft_layers" in model.parts())):
        raise ValueError(f"draft_layers are adapted to a frozen backbone, and train={strategy.train!r} trains it")
    if count is None:
        return
    if config is None:
        raise ValueError(f"draft_layers={count} is for heads, not for a {type(model).__name__}; leave it out")
    if count != config.draft_layers:
        model.add_draft_layers(count, rank or _RANK)
    elif count and rank not in (None, config.draft_lora_rank):
        raise ValueError(f"draft_lora_rank={rank}: the model has draft layers of rank {config.draft_lora_rank}")


def _joined(model: Any, strategy: TrainingStrategy) -> JointMTPModel:
    """Return heads and their backbone, which learns as a whole, by new adapters, or by those that it carries."""
    if model.head_config is None:
        raise ValueError(f"train={strategy.train!r}: {type(model).__name__} is trained on a frozen backbone")
    backbone = model.backbone
    if strategy.train == "all":
        check_no_adapters(backbone, "backbone", strategy)
        backbone.requires_grad_(True)
    elif not carries_adapters(backbone):
        inject_adapter_in_model(lora_config(backbone, strategy), backbone)  # as `add_adapter`, of any version of peft
        backbone._hf_peft_config_loaded = True
    elif reason := obstacle_of_peft():
        raise ImportError(f"train='lora': the backbone carries adapters; {reason}: pip install 'transformers<5.24'")
    elif not backbone._hf_peft_config_loaded:
        raise ValueError("train='lora': the backbone carries adapters in a wrapper of peft: merge_and_unload() them")
    else:
        names = backbone.active_adapters()
        for config in (backbone.peft_config[name] for name in names):
            for name, theirs in (("lora_rank", config.r), ("lora_alpha", config.lora_alpha)):
                if getattr(strategy, name) not in (None, theirs):  # it would be passed over
                    raise ValueError(f"{name}={getattr(strategy, name)}: the adapters of the backbone have {theirs}")
        backbone.set_adapter(names)  # which unfreezes those that were loaded for inference
    return JointMTPModel(model)


def check_no_adapters(model: nn.Module, what: str, strategy: TrainingStrategy) -> None:
    """Refuse a model with adapters where all weights learn, or where it gets adapters."""
    if carries_adapters(model):
        raise ValueError(f"train={strategy.train!r}: the {what} carries adapters of peft: merge_and_unload() them")


def lora_config(model: nn.Module, strategy: TrainingStrategy, drafter: str | None = None) -> LoraConfig:
    """Return the config of a backbone's adapters; a `drafter` of this name in the model has none, and learns whole."""
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets = strategy.lora_targets or [name for name in _QUERIES if name in names] or "all-linear"
    rank = strategy.lora_rank or _RANK
    return LoraConfig(
        base_model_name_or_path=getattr(model, "name_or_path", None) or None,  # as peft has it
        r=rank,
        lora_alpha=2 * rank if strategy.lora_alpha is None else strategy.lora_alpha,
        lora_dropout=strategy.lora_dropout or 0.0,
        target_modules=targets,
        exclude_modules=None if drafter is None else rf"(.*\.)?{drafter}(\..*)?",
        modules_to_save=None if drafter is None else [drafter],
    )
