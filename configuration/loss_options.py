"""Options of losses: what a drafter learns, and how depths and positions are weighted. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from .fields import check_values

Options = TypeVar("Options", bound="LossOptions")

DIVERGENCES = ("cross_entropy", "kl", "reverse_kl", "tv", "lk", "lk_kl")
"""Cross-entropy of q under p; KL(p || q); KL(q || p); total variation; LK; LK with a KL that fades as alpha grows."""
LOSSES = (*DIVERGENCES, "block")
"""With the expected number of drafts that block verification accepts, which is no distance."""
POSITION_WEIGHTINGS = ("uniform", "expected_calls")
"""How positions are weighted: all alike, or by the calls that a rejection there costs."""
OBJECTIVES = {1: ("eagle1", "hass"), 3: ("ttt",)}
"""Objectives of each version of EAGLE, the default first."""
_STEPS = {"eagle1": 1, "hass": 3, "ttt": 7}


@dataclass(kw_only=True)
class LossOptions:
    """Options that all drafters share; those that differ from the defaults are saved in config.json.

    Attributes:
        target: What a drafter learns: `"labels"`, or the distribution of the `"teacher"`, the backbone. None: by
            `divergence` and the kind of the drafter.
        divergence: Distance of the drafter's distribution from the teacher's: `"cross_entropy"` (the papers'),
            `"kl"`, `"reverse_kl"`, `"tv"`; or the acceptance itself, `"lk"`, `"lk_kl"` and `"block"`
            (`modeling.common.teacher`).
        position_weighting: Of `"block"`: `"uniform"`, or by the `"expected_calls"` that a rejection costs.
        label_weight: Share of the labels' negative log-likelihood that is mixed into that distance, 0 to 1.
        decay: Every depth counts by this factor less than the one before it: a draft ends with its first wrong token.
    """

    target: str | None = "teacher"
    divergence: str = "cross_entropy"
    position_weighting: str = "uniform"
    label_weight: float = 0.0
    decay: float | None = 1.0

    _choices = {"target": ("labels", "teacher"), "divergence": LOSSES, "position_weighting": POSITION_WEIGHTINGS}
    _ranges = {"label_weight": "[0, 1]", "decay": "(0, 1]"}

    def __post_init__(self) -> None:
        self.check()

    @classmethod
    def of(cls: type[Options], values: Options | Mapping[str, Any] | None) -> Options:
        """Return options from the fields of a config.json, or these options themselves."""
        return values if isinstance(values, cls) else cls(**dict(values or {}))  # type: ignore[arg-type]

    def update(self, **changes: Any) -> None:
        """Set some options, or none where one is refused."""
        vars(self).update(vars(replace(self, **changes)))

    def changed(self) -> dict[str, Any]:
        """Return the options that differ from the defaults."""
        defaults = asdict(type(self)())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}

    def check(self) -> None:
        """Refuse values out of range, and options that contradict each other."""
        check_values(self, self._choices, self._ranges)
        if self.position_weighting != "uniform" and self.divergence != "block":
            raise ValueError(f"position_weighting={self.position_weighting!r} is an option of divergence='block'")


@dataclass(kw_only=True)
class HeadLossOptions(LossOptions):
    """How the loss of heads is computed, and how its depths are weighted.

    Attributes:
        target: None: `"teacher"` for Hydra++ and for `divergence="block"`, else `"labels"`.
        decay: gamma; depth j weighs gamma^(j-1). None: the recipe of the family's paper, or 0.9 where it has none.
            Where it has one, depth 1 has the weight of that recipe.
        weights: Weights [n] of the depths instead.
        normalization: `"tokens"`: every depth is divided by its number of targets, and all by the sum of the
            discounts; `"paper"`: Eq. 4 of MtPC, the mean over sequences of each sequence's own mean.
        balance: `"rms"` scales the loss of every depth to the first one's spread (Mehra et al.).
    """

    target: str | None = None
    decay: float | None = None
    weights: list[float] | None = None
    normalization: str = "tokens"
    balance: str = "none"

    _choices = LossOptions._choices | {"normalization": ("tokens", "paper"), "balance": ("none", "rms")}

    def check(self) -> None:
        super().check()
        if self.decay is not None and self.weights is not None:
            raise ValueError(f"decay={self.decay} and weights={self.weights} both weigh the depths; choose one")
        if self.normalization == "paper" and self.balance == "rms":
            raise ValueError("normalization='paper' and balance='rms' both scale the depths; choose one")
        needed = {"target": (None, "teacher"), "normalization": ("tokens",), "balance": ("none",)}
        for name, values in needed.items() if self.divergence == "block" else ():
            if getattr(self, name) not in values:
                raise ValueError(f"divergence='block' needs {name}={values[-1]!r}, not {getattr(self, name)!r}")


@dataclass(kw_only=True)
class ModuleLossOptions(LossOptions):
    """How the losses of sequential modules are computed and weighted.

    Attributes:
        weight: lambda; the loss is main + lambda / D * the sum over depths.
        normalization: `"mean"`: every depth is divided by its own number of targets; `"paper"`: every depth is divided
            by the main model's number of targets (DeepSeek-V3's report divides all by T).
        unroll_steps: Depths to train; beyond D the last module continues from its own output, as in longer drafts.
            None: D.
        decay: Depth k has the weight decay^(k-1), scaled so that all depths together have the weight lambda (FastMTP).
        detach_trunk: The modules' losses do not train the main model's layers.
        detach_head: They do not train the head.
        detach_embedding: They do not train the embeddings.
    """

    target: str = "labels"
    decay: float = 1.0
    weight: float = 0.3
    normalization: str = "mean"
    unroll_steps: int | None = None
    detach_trunk: bool = False
    detach_head: bool = False
    detach_embedding: bool = False

    _choices = LossOptions._choices | {"normalization": ("mean", "paper")}
    _ranges = LossOptions._ranges | {"weight": "[0, inf)", "unroll_steps": "[1, inf)"}


@dataclass(kw_only=True)
class EagleLossOptions(LossOptions):
    """How the loss of an EAGLE head is computed; it learns from the backbone's distribution.

    Attributes:
        decay: `"ttt"`: step i has the weight decay^i. `"hass"` sums its steps.
        objective: Version 3: `"ttt"`, training-time test. Version 1: `"eagle1"`, or `"hass"`. None: the first of these.
        steps: Drafting steps that are trained; None: 7 for `"ttt"`, 3 for `"hass"`, 1 for `"eagle1"`.
        topk: `"hass"`: this number of the backbone's most probable tokens counts a second time ...
        topk_weight: ... with this weight.
        kept: P-EAGLE, in training: step i has the share kept^i of the rows, in the loss as many as all,
        least_kept: ... but at least this share.
        noise: Version 1, in training: features get uniform noise of this width, times 512 / the length of their
            document (official: 0.2).
    """

    decay: float = 0.8
    objective: str | None = None
    steps: int | None = None
    topk: int = 10
    topk_weight: float = 1.0
    kept: float = 0.7
    least_kept: float = 0.2
    noise: float = 0.0

    _choices = LossOptions._choices | {"target": ("teacher",)}
    _ranges = LossOptions._ranges | dict.fromkeys(("decay", "topk_weight", "noise"), "[0, inf)") | {"topk": "[1, inf)"}
    _ranges |= dict.fromkeys(("kept", "least_kept"), "(0, 1]")

    def resolved(self, version: int) -> ResolvedEagleOptions:
        """Return the same options with the defaults of a version filled in."""
        objective = self.objective or OBJECTIVES[version][0]
        if objective not in OBJECTIVES[version]:
            raise ValueError(f"objective={objective!r}: a head of version {version} takes {OBJECTIVES[version]}")
        steps = _STEPS[objective] if self.steps is None else self.steps
        if steps < 1 or (objective == "eagle1" and steps > 1):
            raise ValueError(f"steps={steps} must be at least 1, and 1 for 'eagle1'")
        return ResolvedEagleOptions(**(asdict(self) | {"objective": objective, "steps": steps}))


@dataclass(kw_only=True)
class ResolvedEagleOptions(EagleLossOptions):
    """`EagleLossOptions` without open fields."""

    objective: str = "ttt"
    steps: int = 7
