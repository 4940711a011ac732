"""Public import path of the circuits' distributions, which `heads/circuits.py` defines."""

from .heads.circuit_head import circuit_from_logits as circuit_from_logits
from .heads.circuits import *  # noqa: F403
