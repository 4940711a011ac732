"""The distributions of circuits, by the path that users and checks import; they live in `heads/circuits.py`."""

from .heads.circuit_head import circuit_from_logits as circuit_from_logits
from .heads.circuits import *  # noqa: F403
from .heads.tree_circuit import *  # noqa: F403
