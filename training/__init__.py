"""Trainers, losses, data, evaluation, the demo and the command line. What is named here is loaded when it is used."""

from .extras import lazy_names

_HOMES = {
    "AcceptanceCallback": "acceptance_callback",
    "MTPDPOTrainer": "dpo",
    "MTPLossWeightSchedule": "loss_weight",
    "MTPSFTTrainer": "sft",
    "MTPTrainer": "trainer",
    "MuToROptions": "ptp.mutor",
    "MuToRTrainer": "ptp.mutor",
    "PTPOptions": "ptp.options",
    "PTPSFTTrainer": "sft",
    "PTPTrainer": "ptp.trainer",
    "TrainingStrategy": "strategy",
    "cache_features": "features",
    "regenerate": "regeneration",
}
__all__ = list(_HOMES)
# trainers are imported only when they are asked for: TRL's needs an extra
__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
