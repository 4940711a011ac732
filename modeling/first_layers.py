"""A smaller model from the first layers of a larger one, with its embeddings, final norm and head."""

from __future__ import annotations

from copy import deepcopy
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from .wrapped_models import carries_adapters, has_own_cache, unwrap


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a model of the same class whose decoder has the first layers of another one.

    Layers and norms are copies. Embeddings and head lie in the memory of the given model's, and are frozen, so that
    tuning leaves that model as it is; a saved and loaded one has its own.

    Args:
        model: A causal language model of transformers.
        layers: How many.

    Raises:
        ValueError: Not fewer layers than the model has, or a model that cannot be cut.
    """
    model = unwrap(model)
    config, kind = deepcopy(model.config), type(model).__name__
    whole = config.get_text_config().num_hidden_layers
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < whole:
        raise ValueError(f"layers={layers!r} must be a whole number from 1 to {whole - 1}: {kind} has {whole} layers")
    linear = isinstance(model.get_output_embeddings(), nn.Linear)
    if config.get_text_config() is not config or has_own_cache(model) or carries_adapters(model) or not linear:
        raise ValueError(
            f"{kind} cannot be cut to {layers} layers: that takes a plain causal language model of transformers, "
            "without adapters, other modalities or a cache of its own"
        )
    for name, value in config.to_dict().items():  # layer_types, and whatever else a family says layer by layer
        if isinstance(value, list) and len(value) == whole:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    with torch.device(model.device):
        small = type(model)(config)
    cast(nn.Module, small).to(model.dtype)
    known = small.state_dict()
    copied = {name: tensor for name, tensor in model.state_dict().items() if name in known}
    if missing := [name for name in known if name not in copied]:
        raise ValueError(f"{kind} cannot be cut to {layers} layers: it has no {missing[0]}")
    small.load_state_dict(copied)
    _share(small.get_input_embeddings(), model.get_input_embeddings())
    _share(cast(nn.Module, small.get_output_embeddings()), cast(nn.Module, model.get_output_embeddings()))
    small.tie_weights()
    small.generation_config = deepcopy(model.generation_config)
    return small.eval()


def _share(module: nn.Module, source: nn.Module) -> None:
    """Give a module the memory of another one's weights, frozen."""
    for name, parameter in source.named_parameters(recurse=False):
        setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=False))
