"""Uniforms and tokens, by the path that users and checks import; they live in `sampling.py` and `ptp/features.py`."""

from .ptp.features import FEATURES, best_of, beta_shares, place, place_beta, place_between, uniform_features
from .sampling import interval, pick

__all__ = [
    "FEATURES",
    "best_of",
    "beta_shares",
    "interval",
    "pick",
    "place",
    "place_beta",
    "place_between",
    "uniform_features",
]
