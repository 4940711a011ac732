"""Public import path of sampling by uniforms, which `generation/tensors` defines."""

from ..generation.tensors.sampling import interval as interval
from ..generation.tensors.sampling import pick as pick
from ..generation.tensors.uniforms import uniform_features as uniform_features
