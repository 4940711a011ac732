"""How the parts of a model learn: a `TrainingStrategy`, which a YAML file can fill, what applies it, and callbacks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..configuration.fields import check_values
from ..configuration.transformers_names import obstacle_of_peft
from ..generation.backbone.wrapped_models import WrapperMixin, carries_adapters
from ..generation.drafter import BaseDrafter
from ..modeling.common.outputs import TrainableDrafter
from ..modeling.heads.joint import JointMTPModel
from ..modeling.heads.losses import balance_factors
from .checkpoints import checkpoint_of
from .trainer_base import RunningMeans, without_peft
from .utils import replace_file

SHAPES: dict[str, Callable[[float], float]] = {
    "switch": lambda share: float(share >= 1),
    "linear": lambda share: share,
    "sine": lambda share: math.sin(math.pi / 2 * share),
}
_CHOICES = {"train": ("drafter", "all", "lora"), "loss_weight_shape": SHAPES}
_RANGES = {
    **dict.fromkeys(("head_warmup", "loss_weight", "loss_weight_last", "draft_layers"), "[0, inf)"),
    **dict.fromkeys(("lora_rank", "draft_lora_rank"), "[1, inf)"),
    **dict.fromkeys(("loss_weight_until", "lora_dropout"), "[0, 1]"),
    "drafter_lr_multiplier": "(0, inf)",
}
_QUERIES = ("q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn")
_RANK = 8
_BALANCE_FILE = "loss_balance.json"


@dataclass
class TrainingStrategy:
    """A recipe of training, by default a drafter on a frozen backbone; None does not change the model's own value.

    Attributes:
        train: `"drafter"`: the backbone is frozen. `"all"`: everything learns jointly, the backbone from its own
            next-token loss and the drafter's. `"lora"`: the same, with adapters on a frozen backbone.
        head_warmup: Steps, or below 1 a share of all steps, in which the drafter's head learns alone, without backbone,
            adapters and draft layers.
        drafter_lr_multiplier: The drafter's learning rate, as a multiple of `learning_rate`, which is the backbone's.
        lora_rank: Rank of the backbone's adapters (`train="lora"`); None: 8. If the backbone already carries adapters,
            these are trained where they are, and other values than theirs are refused; `lora_targets` is not read.
        lora_alpha: Scale of the adapters times their rank; None: twice the rank.
        lora_dropout: Dropout of the adapters; None: 0.
        lora_targets: Names of modules, or `"all-linear"`; None: queries, keys and values, or all linear modules.
        draft_layers: MtPC's draft LoRA: the drafter runs the backbone's last k layers with adapters of its own
            (`MTPHeads`, EvaByte); None: as the heads have it.
        draft_lora_rank: Of these adapters; None: as they are, and 8 where they are new.
        shard_backbone: Divide the layers of a frozen backbone, which drafters do not adapt, among processes (FSDP2):
            for one that no device holds whole.
        loss: Options of the drafter's loss that change (`drafter.loss_options`: `target`, `divergence`, `decay`, ...).
        loss_weight: lambda, the weight of the drafter's loss relative to the backbone's.
        loss_weight_last: Its value at the end of a schedule.
        loss_weight_until: Share of all steps over which it changes.
        loss_weight_shape: `"switch"` at once, `"linear"`, or `"sine"`, Medusa's ramp.

    Example:
        >>> strategy = TrainingStrategy(train="lora", head_warmup=0.1, drafter_lr_multiplier=4.0, loss_weight=0.2)
        >>> MTPTrainer(heads, args, train_dataset=data, strategy=strategy).train()
    """

    train: str = "drafter"
    head_warmup: float = 0.0
    drafter_lr_multiplier: float = 1.0
    lora_rank: int | None = None
    lora_alpha: int | None = None
    lora_dropout: float | None = None
    lora_targets: list[str] | str | None = None
    draft_layers: int | None = None
    draft_lora_rank: int | None = None
    shard_backbone: bool = False
    loss: dict[str, Any] = field(default_factory=dict)
    loss_weight: float | None = None
    loss_weight_last: float | None = None
    loss_weight_until: float = 1.0
    loss_weight_shape: str = "switch"

    def __post_init__(self) -> None:
        check_values(self, _CHOICES, _RANGES)
        unread = ["lora_"] * (self.train != "lora") + ["draft_lora_rank"] * (not self.draft_layers)
        unread += ["loss_weight_"] * (self.loss_weight is None or self.loss_weight_last is None)
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name.startswith(tuple(unread)) and value != entry.default:
                raise ValueError(f"{entry.name}={value!r} has no effect: see TrainingStrategy")


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
            own = {"lora_rank": config.r, "lora_alpha": config.lora_alpha, "lora_dropout": config.lora_dropout}
            for name, theirs in own.items():
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


class MTPLossWeightSchedule(TrainerCallback):
    """Changes lambda, the weight of the drafter's loss, by the step (DeepSeek-V3: 0.3, later 0.1).

    Args:
        first: lambda at the start.
        last: lambda from `switch_at` on.
        switch_at: Share of all steps after which `last` holds (DeepSeek-V3: 10 of 14.8 trillion tokens).
        shape: How it changes: `"switch"` at once, `"linear"`, or `"sine"`, Medusa-2's ramp.

    Example:
        >>> Trainer(model, args, train_dataset=data, callbacks=[MTPLossWeightSchedule(0.3, 0.1)]).train()
    """

    def __init__(
        self, first: float = 0.3, last: float = 0.1, switch_at: float = 10 / 14.8, shape: str = "switch"
    ) -> None:
        self.first, self.last, self.switch_at, self.shape = first, last, switch_at, shape
        check_values(self, {"shape": SHAPES}, {"first": "[0, inf)", "last": "[0, inf)", "switch_at": "[0, 1]"})

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        parts = without_peft(kwargs["model"]).modules()
        owner = next((part for part in parts if getattr(part, "mtp_loss_weight", None) is not None), None)
        if owner is None:
            raise TypeError("MTPLossWeightSchedule needs a model with mtp_loss_weight")
        until = self.switch_at * state.max_steps
        share = min(1.0, state.global_step / until) if until else 1.0
        owner.mtp_loss_weight = self.first + (self.last - self.first) * SHAPES[self.shape](share)


class HeadWarmup(TrainerCallback):
    """Trains the drafter's head alone at first, as a function of the step, so that a resumed training is the same."""

    def __init__(self, strategy: TrainingStrategy) -> None:
        self.strategy = strategy
        self.waiting: list[nn.Parameter] | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model = getattr(kwargs["model"], "module", kwargs["model"])
        if self.waiting is None:
            parts = without_peft(model).parts()
            head = {id(p) for name in parts.keys() - {"draft_layers"} for p in parts[name].parameters()}
            self.waiting = [p for p in model.parameters() if p.requires_grad and id(p) not in head]
        steps = self.strategy.head_warmup
        is_over = state.global_step >= (round(steps * state.max_steps) if steps < 1 else int(steps))
        for parameter in self.waiting:
            parameter.requires_grad_(is_over)


class LossBalance(TrainerCallback):
    """RMS balancing of depths (Mehra et al. 2025): depth j is scaled by RMS(l_1) / RMS(l_j) of the update before.

    So two divisions of a batch take the same step, where the paper's own factors would need all pieces before the first
    backward. They are saved with checkpoints.
    """

    def __init__(self) -> None:
        self.factors: torch.Tensor | None = None  # [n] float32, from the end of the first update on
        self._squares = RunningMeans()
        self._accelerator: Accelerator | None = None

    def add(self, squares: torch.Tensor, counts: torch.Tensor) -> None:
        """Add a micro-batch: mean squared terms and targets per depth, [n] each."""
        counts = counts.to(squares.device)
        self._squares.add(torch.where(counts > 0, squares * counts, 0.0), counts)

    def close(self, accelerator: Accelerator) -> None:
        """End an update."""
        self._accelerator = accelerator
        totals = self._squares.take(accelerator)
        if totals is not None:
            self.factors = balance_factors(totals[0] / totals[1].clamp(min=1)).float()

    def for_update(self, depths: int) -> torch.Tensor:
        """Return the factors of the current update, [n]."""
        return torch.ones(depths) if self.factors is None else self.factors

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._accelerator is not None:
            self.close(self._accelerator)
        if state.is_world_process_zero and self.factors is not None:
            replace_file(checkpoint_of(args, state) / _BALANCE_FILE, json.dumps(self.factors.tolist()))

    def load(self, checkpoint: str) -> None:
        path = Path(checkpoint) / _BALANCE_FILE
        if path.exists():
            self.factors = torch.tensor(json.loads(path.read_text(encoding="utf-8")))
