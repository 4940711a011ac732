"""Names that may change or go in any version; what is stable is `tokenahead.__all__` and `tokenahead.extending`.

`OPTIONS` lists options of stable functions and classes that are experimental, too.
"""

from ..training.utils import lazy_names

OPTIONS: dict[str, dict[str, tuple[object, ...]]] = {
    "tokenahead.DrafterCascade": {"joins": (True,)},
    "tokenahead.MTPHeadConfig": {"mix": ("weighted",)},
    "tokenahead.configuration.loss_options.HeadLossOptions": {
        "divergence": ("block",),
        "position_weighting": ("expected_calls",),
        "balance": ("rms",),
    },
    "tokenahead.training.PTPOptions": {"sequences": ("student",)},
}
"""By class: options, and the experimental values of each."""
_HOMES = {
    "BestOfForCausalLM": "best_of_m",
    "BestOfSession": "best_of_m",
    "CentralVerifier": "best_of_m",
    "InverseTrainer": "inverse",
    "MuToROptions": "mutor",
    "MuToRTrainer": "mutor",
    "OnlineDrafterTraining": ".training.online",
    "OnlineLearner": ".modeling.common.online",
    "best_of": "best_of_m",
}
__all__ = ["OPTIONS", *_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
