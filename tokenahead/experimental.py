"""Names that may change or go in any version; what is stable is `tokenahead.__all__` and `tokenahead.extending`.

`OPTIONS` lists options of stable functions and classes that are experimental, too.
"""

from typing import TYPE_CHECKING, Any

from .modeling.common.online import OnlineLearner
from .modeling.ptp.session import BestOfSession, CentralVerifier

if TYPE_CHECKING:
    from .training.online import OnlineDrafterTraining
    from .training.ptp.mutor import MuToROptions, MuToRTrainer

OPTIONS: dict[str, dict[str, tuple[object, ...]]] = {
    "generate": {"best_of": ()},
    "tokenahead.DrafterCascade": {"joins": (True,)},
    "tokenahead.MTPHeadConfig": {"mix": ("weighted",)},
    "tokenahead.configuration.loss_options.HeadLossOptions": {
        "divergence": ("block",),
        "position_weighting": ("expected_calls",),
        "balance": ("rms",),
    },
    "tokenahead.training.PTPOptions": {"method": ("inverse",), "sequences": ("student",)},
}
"""By function or class: options, and the experimental values of each (none: all)."""
__all__ = [
    "OPTIONS",
    "BestOfSession",
    "CentralVerifier",
    "MuToROptions",
    "MuToRTrainer",
    "OnlineDrafterTraining",
    "OnlineLearner",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import training  # imports trainers on demand

    return getattr(training, name)
