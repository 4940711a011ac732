"""What a module is made of in families where it is no decoder layer of the model. Knows no checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...configuration.mtp_families import family_of


class StackBody(nn.Module):
    """Several layers of the model in a row (Nemotron-H: one of attention, one of experts).

    Args:
        layers: The layers.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """[B, R, H] to [B, R, H]; the options are a layer's."""
        for layer in self.parts:
            hidden_states = layer(hidden_states, **options)
        return hidden_states


class LatentBody(nn.Module):
    """One latent attention and one dense MLP with their norms, where the model's own layer holds two of each (LongCat).

    Args:
        layer: A layer of the model, from whose classes the parts are made anew.
        config: The model's configuration.
    """

    def __init__(self, layer: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__()
        norm, size = type(layer.input_layernorm[0]), config.hidden_size
        self.self_attn = type(layer.self_attn[0])(config=config, layer_idx=0)
        self.mlp = type(layer.mlps[0])(config)
        self.input_layernorm = norm(size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = norm(size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """[B, R, H] to [B, R, H]; the options are a decoder layer's."""
        attended, *_ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def new_body(layers: nn.ModuleList, config: PreTrainedConfig) -> nn.Module:
    """A body with fresh weights, of the classes that the model's own layers are of.

    Args:
        layers: The model's layers.
        config: Its configuration.
    """
    if family_of(config).body == "latent":
        return LatentBody(layers[-1], config)
    kinds = config.mtp_layers_block_type
    one = copy.deepcopy(config)
    one.layers_block_type = kinds
    parts = [type(layers[-1])(one, layer_idx=index) for index in range(len(kinds))]
    for part in parts:
        for owner in part.modules():
            if getattr(owner, "config", None) is one:
                owner.config = config  # the attention's implementation is looked up there, and may be set later
    return StackBody(parts)
