"""Options of the losses that drafters learn by. Knows no drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..configuration import MTPHeadConfig

DIVERGENCES = ("cross_entropy", "kl", "reverse_kl", "tv", "lk", "lk_kl")
"""Cross-entropy of q under p; KL(p || q); KL(q || p); total variation; LK; LK with a KL that fades as alpha grows."""
TARGETS = ("labels", "teacher")
NORMALIZATIONS = ("mean", "paper")
OBJECTIVES = {1: ("eagle1", "hass"), 3: ("ttt",)}
"""Objectives of each version of EAGLE, the default first."""
_STEPS = {"eagle1": 1, "hass": 3, "ttt": 7}
_TEACHER = ("target", "divergence", "label_weight", "top_k")
_MODULES = ("weight", "normalization", "unroll_steps", "decay", "detach_trunk", "detach_head", "detach_embedding")
SUPPORTED = {
    "heads": _TEACHER,
    "modules": (*_MODULES, *_TEACHER),
    "eagle": ("objective", "steps", "decay", "topk", "topk_weight", "noise", "divergence", "label_weight"),
}
"""The options of each kind of drafter; the remaining options of heads are fields of `MTPHeadConfig`."""
_DEFAULTS: dict[str, dict[str, Any]] = {"heads": {}, "modules": {}, "eagle": {"target": "teacher", "decay": 0.8}}


@dataclass
class LossOptions:
    """How the loss of a drafter is computed; `LossOptions.of` applies the defaults of its kind.

    Attributes:
        kind: One of `SUPPORTED`, which lists the options that this kind of drafter reads.
        target: What is learned: `"labels"`, or the whole next-token distribution of the `"teacher"`, the backbone on
            the true tokens. EAGLE heads always learn the latter.
        divergence: The distance from the teacher's distribution: `"cross_entropy"`, `"kl"`, `"reverse_kl"`, `"tv"`, or
            the acceptance itself, `"lk"` and `"lk_kl"` (see `heads.teacher`).
        label_weight: Share of the labels' negative log-likelihood that is mixed into that distance, 0 to 1.
        top_k: Number of the teacher's likeliest tokens that are compared, the rest as one; None: all.
        weight: lambda; the loss is main + lambda / D * the sum over depths.
        normalization: `"mean"`: every depth is divided by its own number of targets; `"paper"`: every depth is divided
            by the main model's number of targets (DeepSeek-V3's report divides all by T).
        unroll_steps: Depths to train; beyond D the last module continues from its own output, as in longer drafts.
            None: D.
        decay: Depth k weighs decay^(k-1). Modules: scaled so that all depths together still weigh lambda (FastMTP).
            EAGLE: for `"ttt"` only; `"hass"` adds its steps up.
        detach_trunk: The modules' losses do not train the main model's layers.
        detach_head: They do not train the output embeddings.
        detach_embedding: They do not train the input embeddings.
        objective: EAGLE, version 3: `"ttt"`, training-time test. Version 1: `"eagle1"`, or `"hass"`. None: the first of
            these.
        steps: Steps of drafting that are trained; None: 7 for `"ttt"`, 3 for `"hass"`, 1 for `"eagle1"`.
        topk: `"hass"`: number of the backbone's likeliest tokens that are counted once more ...
        topk_weight: ... with this weight.
        noise: EAGLE, version 1, in training: width of the uniform noise on features, times 512 / the length of their
            sequence (official: 0.2).

    Raises:
        ValueError: A value out of range.
    """

    kind: str = "modules"
    target: str = "labels"
    divergence: str = "cross_entropy"
    label_weight: float = 0.0
    top_k: int | None = None
    weight: float = 0.3
    normalization: str = "mean"
    unroll_steps: int | None = None
    decay: float = 1.0
    detach_trunk: bool = False
    detach_head: bool = False
    detach_embedding: bool = False
    objective: str | None = None
    steps: int | None = None
    topk: int = 10
    topk_weight: float = 1.0
    noise: float = 0.0

    @classmethod
    def of(cls, kind: str, values: Mapping[str, Any] | None = None) -> LossOptions:
        """Return the options of a kind of drafter, as a config.json holds them; unknown names are left out."""
        known = {name: value for name, value in (values or {}).items() if name in SUPPORTED[kind]}
        return cls(kind, **_DEFAULTS[kind] | known)

    @classmethod
    def of_heads(cls, config: MTPHeadConfig) -> LossOptions:
        """Return the options that the config of a head holds, as `loss_target`, `loss_divergence`, ..."""
        return cls.of("heads", {name: getattr(config, f"loss_{name}") for name in SUPPORTED["heads"]})

    def __post_init__(self) -> None:
        choices = {"target": TARGETS, "divergence": DIVERGENCES, "normalization": NORMALIZATIONS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(allowed)}")
        for name in ("weight", "topk_weight", "noise"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        for name in ("top_k", "unroll_steps", "steps", "topk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if not 0 <= self.label_weight <= 1:
            raise ValueError(f"label_weight={self.label_weight} must lie between 0 and 1")
        if self.kind == "eagle" and not self.decay >= 0:
            raise ValueError(f"decay={self.decay} must be at least 0")
        if self.kind != "eagle" and not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} must lie in (0, 1]")

    def changed(self) -> dict[str, Any] | None:
        """Return the options that differ from the defaults of this kind; None if none does."""
        defaults = vars(LossOptions.of(self.kind))
        return {name: value for name, value in vars(self).items() if value != defaults[name]} or None

    def resolved(self, version: int) -> LossOptions:
        """Return the options of an EAGLE head of this version with objective and steps filled in, validated again.

        Raises:
            ValueError: A value out of range, or an objective of the other version.
        """
        objective = self.objective or OBJECTIVES[version][0]
        if objective not in OBJECTIVES[version]:
            allowed = " or ".join(map(repr, OBJECTIVES[version]))
            raise ValueError(f"objective={objective!r}: a head of version {version} is trained with {allowed}")
        steps = _STEPS[objective] if self.steps is None else self.steps
        if objective == "eagle1" and steps != 1:
            raise ValueError(f"steps={steps} must be 1 for 'eagle1'")
        return replace(self, objective=objective, steps=steps)
