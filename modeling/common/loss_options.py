"""What a trainer reads of a drafter: its loss per depth, and the options of that loss. Imports no network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import logging

from ...configuration.heads import MTPHeadConfig
from .teacher import LOSSES, WEIGHTINGS

logger = logging.get_logger(__name__)
OBJECTIVES = {1: ("eagle1", "hass"), 3: ("ttt",)}
"""Objectives of each version of EAGLE, the default first."""
Options = TypeVar("Options", bound="LossOptions")
_STEPS = {"eagle1": 1, "hass": 3, "ttt": 7}


def check_values(options: object, choices: Mapping[str, Collection[object]], ranges: Mapping[str, str]) -> None:
    """Refuse fields of a dataclass outside their `choices` or intervals (`"[0, 1)"`); a default of None passes."""
    defaults = vars(type(options))
    values = {name: value for name, value in vars(options).items() if (value, defaults.get(name, 0)) != (None, None)}
    for name in filter(values.__contains__, choices):
        if values[name] not in choices[name]:
            raise ValueError(f"{name}={values[name]!r} is unknown; choose one of {', '.join(map(repr, choices[name]))}")
    for name in filter(values.__contains__, ranges):
        value, interval = values[name], ranges[name]
        low, high = map(float, interval[1:-1].split(","))
        is_border = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
        if not (is_border or (value is not None and low < value < high)):
            raise ValueError(f"{name}={value!r} must lie in {interval}")


@dataclass(kw_only=True)
class LossOptions:
    """Options that all drafters share, and how they are saved in config.json.

    Attributes:
        divergence: Distance of the drafter's distribution from the target model's: `"cross_entropy"` (the papers'),
            `"kl"`, `"reverse_kl"`, `"tv"`; or the acceptance itself, `"lk"`, `"lk_kl"` and `"block"` (`heads.teacher`).
        places: How `"block"` weighs positions: `"all"` alike, or by the `"calls"` that a rejection costs.
        label_weight: Share of the labels' negative log-likelihood that is mixed into that distance, 0 to 1.
    """

    divergence: str = "cross_entropy"
    places: str = "all"
    label_weight: float = 0.0

    @classmethod
    def from_dict(cls: type[Options], values: dict[str, Any] | None) -> Options:
        """Return options from the fields of a config.json; unknown fields are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in (values or {}).items() if name in known})

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from the defaults."""
        defaults = asdict(type(self)())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    def check(self) -> None:
        """Validate the shared options."""
        check_values(self, {"divergence": LOSSES, "places": WEIGHTINGS}, {"label_weight": "[0, 1]"})
        if self.places != "all" and self.divergence != "block":
            raise ValueError(f"places={self.places!r} is an option of divergence='block'")


@dataclass(kw_only=True)
class ModuleLossOptions(LossOptions):
    """How the losses of sequential modules are computed and weighted.

    Attributes:
        weight: lambda; the loss is main + lambda / D * the sum over depths.
        normalization: `"mean"`: every depth is divided by its own number of targets; `"paper"`: every depth is divided
            by the main model's number of targets (DeepSeek-V3's report divides all by T).
        unroll_steps: Depths to train; beyond D the last module continues from its own output, as in longer drafts.
            None: D.
        decay: Depth k has the weight decay^(k-1), scaled so that all depths together have the weight lambda. Below 1,
            near tokens count more, because a draft ends with its first wrong token (FastMTP).
        detach_trunk: The modules' losses do not train the main model's layers.
        detach_head: They do not train the head.
        detach_embedding: They do not train the embeddings.
        target: What modules learn: `"labels"`, or the distribution of the `"teacher"`, the main model on the true
            tokens.

    Raises:
        ValueError: A value out of range.
    """

    weight: float = 0.3
    normalization: str = "mean"
    unroll_steps: int | None = None
    decay: float = 1.0
    detach_trunk: bool = False
    detach_head: bool = False
    detach_embedding: bool = False
    target: str = "labels"

    def __post_init__(self) -> None:
        self.check()
        choices = {"target": ("labels", "teacher"), "normalization": ("mean", "paper")}
        ranges = {"weight": "[0, inf)", "unroll_steps": "[1, inf)", "decay": "(0, 1]"}
        check_values(self, choices, ranges)


@dataclass(kw_only=True)
class EagleLossOptions(LossOptions):
    """How the loss of an EAGLE head is computed.

    Attributes:
        objective: Version 3: `"ttt"`, training-time test. Version 1: `"eagle1"`, or `"hass"`. None: the first of these.
        steps: Drafting steps that are trained; None: 7 for `"ttt"`, 3 for `"hass"`, 1 for `"eagle1"`.
        decay: `"ttt"`: step i has the weight decay^i. `"hass"` sums its steps.
        topk: `"hass"`: this number of the backbone's likeliest tokens counts a second time ...
        topk_weight: ... with this weight.
        noise: Version 1, in training: features get uniform noise of this width, times 512 / the length of their
            document (official: 0.2).
    """

    objective: str | None = None
    steps: int | None = None
    decay: float = 0.8
    topk: int = 10
    topk_weight: float = 1.0
    noise: float = 0.0

    def resolved(self, version: int) -> ResolvedEagleOptions:
        """Return the same options with the defaults of a version filled in."""
        objective = self.objective or OBJECTIVES[version][0]
        if objective not in OBJECTIVES[version]:
            allowed = " or ".join(map(repr, OBJECTIVES[version]))
            raise ValueError(f"objective={objective!r}: a head of version {version} is trained with {allowed}")
        steps = _STEPS[objective] if self.steps is None else self.steps
        if steps < 1 or (objective == "eagle1" and steps > 1):
            allowed = "1" if objective == "eagle1" else "at least 1"
            raise ValueError(f"steps={steps} must be {allowed} for {objective!r}")
        self.check()
        check_values(self, {}, dict.fromkeys(("decay", "topk_weight", "noise"), "[0, inf)") | {"topk": "[1, inf)"})
        return ResolvedEagleOptions(**(asdict(self) | {"objective": objective, "steps": steps}))


@dataclass(kw_only=True)
class ResolvedEagleOptions(EagleLossOptions):
    """`EagleLossOptions` without open fields."""

    objective: str = "ttt"
    steps: int = 7


@runtime_checkable
class TrainableDrafter(Protocol):
    """A drafter that computes its own loss from labels; `MTPTrainer` trains it.

    Its `forward` takes `labels` and `num_items_in_batch` (targets per depth over the whole update, [n]) and returns an
    output with `loss` and `head_losses` [n].

    Attributes:
        config: Its configuration.
        loss_unit: Name of an entry of `head_losses` in the log: `loss_head_1`, or `loss_step_1`.
        num_losses: n, the number of entries.
        head_config: Options of its heads; None: it has none.
    """

    config: PreTrainedConfig
    loss_unit: str
    head_config: MTPHeadConfig | None

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that draft and do nothing else, by name."""
        ...

    @property
    def num_losses(self) -> int:
        """Return n."""
        ...

    def loss_counts(
        self,
        labels: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the targets per depth of a batch with these arguments of `forward`, [n] int64."""
        ...

    def pooled_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the loss of data of which only sums of terms and targets per depth are known, [n] each."""
        ...


def refuse_loss_of_others(model: nn.Module, trainer: str = "MTPSFTTrainer") -> NoReturn:
    """Refuse to be called with `fused_lm_head=True`: nothing in the model learns from a trainer's own loss."""
    raise RuntimeError(f"{type(model).__name__} learns from its own loss alone: train it with {trainer}")


class OwnLossMixin(nn.Module):
    """A drafter that learns from its own loss alone, which trainers of TRL do not ask for.

    They pass `fused_lm_head=True`, and compute the loss of the next token from the backbone's states.

    Attributes:
        own_trainer: The trainer that trains it.
        silent_part: Name of the part that such a loss does not change; None: nothing learns from it.
        learns_besides: Whether the caller adds the drafter's own loss to that one.
    """

    own_trainer = "MTPSFTTrainer"
    silent_part: str | None = None
    learns_besides = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`; warn, or refuse where nothing learns, that a trainer computes a loss of its own.

        Raises:
            RuntimeError: `fused_lm_head=True`, and nothing learns from that loss.
        """
        if kwargs.get("fused_lm_head") and not self.learns_besides:
            self._check_own_loss()
        return super().__call__(*args, **kwargs)

    def _check_own_loss(self) -> None:
        name = type(self).__name__
        if self.silent_part is None:
            refuse_loss_of_others(self, self.own_trainer)
        drafter: nn.Module = getattr(self, self.silent_part)
        if self.training and torch.is_grad_enabled() and any(p.requires_grad for p in drafter.parameters()):
            logger.warning_once(
                f"the drafter of {name} does not learn from the loss of the next token: train the model with "
                f"{self.own_trainer}, or freeze the drafter"
            )
