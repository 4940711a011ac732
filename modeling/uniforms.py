"""Public import path of sampling by uniforms, which `generation/tensors` and `ptp` define."""

from ..generation.tensors.sampling import interval as interval
from ..generation.tensors.sampling import pick as pick
from .ptp.inputs import uniform_features as uniform_features
