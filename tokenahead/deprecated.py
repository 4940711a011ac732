"""Old public names: they work until version 0.3, with a FutureWarning that names what replaces them.

`install` is called once, when the package is imported. `Drafter`, whose meaning changed, has no alias.
"""

import importlib
import warnings
from types import ModuleType
from typing import Any

_GONE = "0.3"
"""The version in which these names go."""
_DRAFTERS = ("make_drafter", "start"), ("make_rule", "make_verifier")
_ATTACHED = (*_DRAFTERS, ("stands_for", "matches"))
_WINDOWS = (
    ("law", "distribution"),
    ("law_behind", "distribution_after"),
    ("law_of_features", "distribution_of_features"),
    ("window_law", "window_distribution"),
)
_SLOTS = (("slot_law", "slot_distribution"),)
_ATTRIBUTES: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("configuration.ptp", "PTPConfig"): (("learns_warped_law", "learns_warped_distribution"),),
    ("configuration.ptp", "PTPStudentConfig"): (("learns_warped_law", "learns_warped_distribution"),),
    ("generation.attach", "AttachableDrafter"): _ATTACHED,
    ("generation.attach", "MTPGenerationMixin"): _DRAFTERS,
    ("generation.trees", "DraftTree"): (("laws", "probs"), ("counts", "num_nodes"), ("riders", "auxiliary")),
    ("generation.trees", "VerificationResult"): (
        ("accepted", "num_accepted"), ("columns", "path"), ("places", "tree_path"), ("faults", "invalid"),
    ),
    ("modeling", "EvaByteForMTPC"): _WINDOWS,
    ("modeling", "MTPHeads"): _WINDOWS,
    ("modeling", "PTPForCausalLM"): _SLOTS,
    ("modeling", "PTPStudent"): _SLOTS,
    ("modeling.heads.window_distribution", "WindowDistribution"): (("sample_with_laws", "sample_with_probs"),),
    ("modeling.heads.window_distribution", "FactorisedDistribution"): (("sample_with_laws", "sample_with_probs"),),
}  # fmt: skip
"""By module and class: old names of attributes, and what they are called now."""
_MODULE_NAMES = {"generation.trees": {"Verdict": "VerificationResult"}}
"""By module: old names that it had, and what they are called now."""


class _Alias:
    """An old name of an attribute."""

    def __init__(self, kind: str, old: str, new: str) -> None:
        self.told, self.new = _told(f"{kind}.{old}", f"{kind}.{new}"), new

    def __get__(self, instance: Any, kind: type) -> Any:
        warnings.warn(self.told, FutureWarning, stacklevel=2)
        return getattr(kind if instance is None else instance, self.new)

    def __set__(self, instance: Any, value: Any) -> None:
        warnings.warn(self.told, FutureWarning, stacklevel=2)
        setattr(instance, self.new, value)


def install(package: str) -> None:
    """Add the old names to the classes and modules of the package."""
    for (module, name), pairs in _ATTRIBUTES.items():
        kind = getattr(importlib.import_module(f"{package}.{module}"), name)
        for old, new in pairs:
            setattr(kind, old, _Alias(name, old, new))
    for module, names in _MODULE_NAMES.items():
        _alias_names(importlib.import_module(f"{package}.{module}"), names)


def _alias_names(module: ModuleType, names: dict[str, str]) -> None:
    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        warnings.warn(_told(name, names[name]), FutureWarning, stacklevel=2)
        return getattr(module, names[name])

    vars(module)["__getattr__"] = find


def _told(old: str, new: str) -> str:
    return f"{old} is now called {new}; the old name goes in tokenahead {_GONE}"
