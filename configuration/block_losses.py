"""Options of the losses of block drafters: whose recipe, which terms, how places are weighted. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import exp

from .loss_options import DIVERGENCES, LOSSES, LossOptions

TERMS = (*LOSSES, "labels", "argmax", "l1", "confidence", "selector")
"""Of every place: a divergence, what block verification accepts, -log q of the text's token, -log q of the backbone's
likeliest one, the sum of |p - q|; and of heads: the confidence's, and the selector's choice among its candidates."""


@dataclass(frozen=True, kw_only=True)
class BlockRecipe:
    """How a library trains block drafters."""

    terms: dict[str, dict[str, float]] = field(default_factory=dict)  # their weights by method
    names: dict[str, str] = field(default_factory=dict)  # its names of terms
    anchors: str = "next"
    """Where blocks begin: it and the next token are targets; `"inside"`: it is one, but for the last S."""
    places: str = "own"
    """Places that count: whose token is a target; of these those before any other (`"whole"`); or by `"rows"`."""
    is_restricted: bool = False  # the backbone's distribution is that of drafted tokens alone
    normaliser: str = "weights"  # terms are divided by the weights of places that count, or by their number
    dpace: str = "places"  # the same of weights by D-PACE, or by the number of sequences (`"batch"`)
    within: bool = True  # blocks end with their document


_LABELS = {"labels": 1.0}
_DSPARK = {"labels": 0.1, "l1": 0.9}
RECIPES = {
    "tokenahead": BlockRecipe(),
    "z-lab": BlockRecipe(terms={"dflash": _LABELS, "dflash2": _LABELS}, names={"ce": "labels"}, dpace="batch"),
    "deepspec": BlockRecipe(
        terms={"dflash": _LABELS, "dspark": _DSPARK, "dflash2": _LABELS}, names={"ce": "labels"}, places="whole"
    ),
    "speculators": BlockRecipe(
        terms={"dflash": {"kl": 1.0}, "dspark": {"argmax": 0.1, "tv": 0.9}, "dflash2": {"kl": 1.0}},
        names={"ce": "argmax", "kl_div": "kl"},
        anchors="inside",
        places="rows",
        is_restricted=True,
        normaliser="places",
        within=False,
    ),
}
METHODS = ("dflash", "dspark", "dflash2")


@dataclass(kw_only=True)
class BlockLossOptions(LossOptions):
    """How the loss of a block drafter is computed.

    Attributes:
        divergence: Of the layout `"tokenahead"`, which has no other terms with these weights.
        decay: Place k of a block weighs decay^k, k from 0 on; None: exp(-1 / gamma).
        gamma: See `decay`.
        weights: `"decay"`, or `"dpace"`: by the probability that the places before are accepted (D-PACE).
        layout: Whose recipe: `"tokenahead"`, `"z-lab"` (SpecForge), `"deepspec"` or `"speculators"`.
        method: `"dflash"`, `"dspark"` or `"dflash2"`; None: by the drafter's law.
        terms: Weights of terms in the words of the layout, the name of one, or JSON; None: the recipe's. Those of the
            heads that a drafter has are 1 where they are left out.
        anchors: Blocks of every sequence; fewer where it has fewer places to begin.

    Raises:
        ValueError: A value out of range, or an unknown term.
    """

    divergence: str = "lk"
    decay: float | None = None
    gamma: float = 4.0
    weights: str = "decay"
    layout: str = "tokenahead"
    method: str | None = None
    terms: dict[str, float] | str | None = None
    anchors: int = 512

    _choices = LossOptions._choices | {
        "weights": ("decay", "dpace"),
        "layout": tuple(RECIPES),
        "method": (None, *METHODS),
        "position_weighting": ("uniform",),
    }
    _ranges = LossOptions._ranges | {"gamma": "(0, inf)", "anchors": "[1, inf)"}

    def check(self) -> None:
        """Refuse values out of range, and unknown terms."""
        super().check()
        self.weighted_terms("dspark")

    def recipe(self, method: str) -> BlockRecipe:
        """Return the layout's recipe of a method; SpecForge trains DSpark as DeepSpec does."""
        is_dspark = self.layout == "z-lab" and (self.method or method) == "dspark"
        return RECIPES["deepspec" if is_dspark else self.layout]

    def weighted_terms(self, method: str) -> dict[str, float]:
        """Return the weights of the terms of a method, by their names in `TERMS`."""
        recipe, terms = self.recipe(method), self.terms
        if isinstance(terms, str):
            terms = json.loads(terms) if terms.startswith("{") else {terms: 1.0}
        if terms is None and not recipe.terms:
            share = self.label_weight if self.target == "teacher" else 1.0
            found = {self.divergence: 1 - share, "labels": share}
            return {name: weight for name, weight in found.items() if weight}
        if terms is None:
            return dict(recipe.terms[self.method or method])
        found = {recipe.names.get(name, name): weight for name, weight in terms.items() if name != "gamma"}
        if unknown := [name for name in found if name not in TERMS]:
            known = ", ".join([*recipe.names, *TERMS])
            raise ValueError(f"terms={self.terms!r} has {unknown[0]!r}, which is none; choose of {known}")
        return found

    def rate(self) -> float:
        """Return by how much less every place counts than the one before it."""
        return exp(-1 / self.gamma) if self.decay is None else self.decay


READS_TEACHER = (*DIVERGENCES, "argmax", "l1", "confidence")
"""Terms that read the backbone's distribution."""
