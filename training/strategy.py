"""How the parts of a model learn (a dataclass that a YAML file can fill), and the callbacks that apply it over time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..configuration.fields import check_values
from ..modeling.heads.losses import balance_factors
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
            these are trained, and other values of the `lora_` fields than theirs are refused.
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

    Raises:
        ValueError: A value out of range, or a field without what it belongs to; the message names the field.

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


_BALANCE_FILE = "loss_balance.json"


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
            checkpoint = Path(args.output_dir or "") / f"checkpoint-{state.global_step}"
            replace_file(checkpoint / _BALANCE_FILE, json.dumps(self.factors.tolist()))

    def load(self, checkpoint: str) -> None:
        path = Path(checkpoint) / _BALANCE_FILE
        if path.exists():
            self.factors = torch.tensor(json.loads(path.read_text(encoding="utf-8")))
