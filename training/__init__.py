"""Trainers, losses, data, evaluation, the demo and the command line. What is named here is loaded when it is used."""

from importlib import import_module
from typing import Any

_HOMES = {
    "AcceptanceCallback": "acceptance_callback",
    "MTPDPOTrainer": "dpo",
    "MTPLossWeightSchedule": "loss_weight",
    "MTPSFTTrainer": "sft",
    "MTPTrainer": "trainer",
    "PTPOptions": "ptp.options",
    "PTPSFTTrainer": "sft",
    "PTPTrainer": "ptp.trainer",
    "TrainingStrategy": "strategy",
    "cache_features": "features",
    "regenerate": "regeneration",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports a trainer's module only when the trainer is asked for: TRL's needs an extra.

    Raises:
        AttributeError: Nothing of this name is offered here.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
