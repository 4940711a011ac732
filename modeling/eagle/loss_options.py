"""Options of the losses that an EAGLE head learns by. Knows no head."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ..heads.teacher import DIVERGENCES

OBJECTIVES = {1: ("eagle1", "hass"), 3: ("ttt",)}
"""Objectives of each version, the default first."""
_STEPS = {"eagle1": 1, "hass": 3, "ttt": 7}


@dataclass
class EagleLossOptions:
    """How the loss of a head is made.

    Attributes:
        objective: Version 3: `"ttt"`, training-time test. Version 1: `"eagle1"`, or `"hass"`. None: the first of these.
        steps: Steps of drafting that are trained; None: 7 for `"ttt"`, 3 for `"hass"`, 1 for `"eagle1"`.
        decay: `"ttt"`: step i weighs decay^i. `"hass"` adds its steps up.
        topk: `"hass"`: so many of the backbone's likeliest tokens are counted once more ...
        topk_weight: ... with this weight.
        noise: Version 1, while training: features get uniform noise of this width, times 512 / the length of their text
            (official: 0.2).
        divergence: How far the head's distribution is from the backbone's: `"cross_entropy"` (the papers'), `"kl"`,
            `"reverse_kl"`, `"tv"`, or the acceptance itself, `"lk"` and `"lk_kl"` (see `heads.teacher`).
        label_weight: Share of the labels' negative log-likelihood that is mixed into that distance, 0 to 1.
    """

    objective: str | None = None
    steps: int | None = None
    decay: float = 0.8
    topk: int = 10
    topk_weight: float = 1.0
    noise: float = 0.0
    divergence: str = "cross_entropy"
    label_weight: float = 0.0

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> EagleLossOptions:
        """Options from a config.json; fields that are not known are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in (values or {}).items() if name in known})

    def changed(self) -> dict[str, Any] | None:
        """The options that differ from the defaults; None if none does."""
        defaults = asdict(EagleLossOptions())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]} or None

    def resolved(self, version: int) -> EagleLossOptions:
        """The same with nothing left open.

        Raises:
            ValueError: A value out of range, or an objective of the other version.
        """
        objective = self.objective or OBJECTIVES[version][0]
        if objective not in OBJECTIVES[version]:
            allowed = " or ".join(map(repr, OBJECTIVES[version]))
            raise ValueError(f"objective={objective!r}: a head of version {version} is trained with {allowed}")
        steps = _STEPS[objective] if self.steps is None else self.steps
        if steps < 1 or (objective == "eagle1" and steps > 1):
            allowed = "1" if objective == "eagle1" else "at least 1"
            raise ValueError(f"steps={steps} must be {allowed} for {objective!r}")
        for name in ("decay", "topk_weight", "noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence={self.divergence!r} is unknown; choose one of {', '.join(DIVERGENCES)}")
        if not 0 <= self.label_weight <= 1:
            raise ValueError(f"label_weight={self.label_weight} must lie between 0 and 1")
        if self.topk < 1:
            raise ValueError(f"topk={self.topk} must be at least 1")
        return EagleLossOptions(**(asdict(self) | {"objective": objective, "steps": steps}))
