"""The distributions of circuits, by the path that users and checks import; they live in `heads/circuits.py`."""

from .heads.circuit_families import circuit_from_logits as circuit_from_logits
from .heads.circuits import *  # noqa: F403
