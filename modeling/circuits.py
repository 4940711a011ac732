"""The laws of circuits, by the path that users and checks import; they live in `heads/circuits.py`."""

from .heads.circuits import *  # noqa: F403
from .heads.circuits import circuit_from_logits as circuit_from_logits
