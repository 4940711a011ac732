"""Trainers, losses, data, evaluation, the demo and what the commands do. Names are loaded when they are used."""

from .utils import lazy_names

_HOMES = {
    "AcceptanceCallback": "acceptance_callback",
    "Endpoint": "endpoint",
    "MTPDPOTrainer": "trl_trainers",
    "MTPLossWeightSchedule": "strategy",
    "MTPSFTTrainer": "trl_trainers",
    "MTPTrainer": "trainer",
    "OnlineDrafterTraining": "online",
    "PTPOptions": "ptp.losses",
    "PTPSFTTrainer": "trl_trainers",
    "PTPTrainer": "ptp.trainer",
    "TrainingStrategy": "strategy",
    "cache_features": "features",
    "log_drafts": "rollouts",
    "regenerate": "regeneration",
}
__all__ = list(_HOMES)
# trainers are imported on demand: TRL's need an extra
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
