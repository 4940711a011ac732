"""Decoder layers of a known architecture that a head has for itself, side by side over one sequence of states.

No layer is written anew: they are of the backbone's own class, built from its config, with its rotary positions and the
mask of its last layer. Their cache is the caller's and holds verified rows only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, Cache, PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ...configuration.mtp_families import REFUSED
from ..deepseek.modules import is_sliding
from .backbone_parts import final_norm


class DecoderLayers(nn.ModuleList):
    """Copies of a model's last decoder layer, each with its own attention and weights.

    Args:
        config: The model's config.
        count: How many.

    Raises:
        ValueError: An architecture whose layers cannot stand alone.
    """

    def __init__(self, config: PreTrainedConfig, count: int) -> None:
        with torch.device("meta"):
            body = AutoModel.from_config(deepcopy(config))
        check_layers(config, body)
        self.config, last = body.config, len(body.layers) - 1
        try:
            super().__init__(type(body.layers[-1])(self.config, last) for _ in range(count))
        except (AttributeError, IndexError, KeyError, TypeError) as error:  # layers that need more than their config
            raise _refusal(config, f"its layers cannot be built alone ({error!r})") from error
        self.rotary_class, self.norm_class = type(body.rotary_emb), type(final_norm(body))
        wanted = inspect.signature(type(body.layers[-1]).forward).parameters
        self.cache_name = "layer_past" if "layer_past" in wanted else "past_key_values"
        for slot, layer in enumerate(self):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = slot  # the layer's place in the head's own cache

    def rotary(self) -> nn.Module:
        """A new module of rotary positions, for `run`; it has no parameters."""
        return self.rotary_class(self.config)

    def norm(self) -> nn.Module:
        """A new norm like the model's final one."""
        config = self.config
        eps = getattr(config, "rms_norm_eps", getattr(config, "layer_norm_eps", 1e-6))
        return self.norm_class(config.hidden_size, eps=eps)

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        rotary: nn.Module,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None = None,
    ) -> list[torch.Tensor]:
        """Every layer on its own input.

        Args:
            inputs: Per layer [B, T, d].
            rotary: Made by `rotary`.
            attention_mask: [B, past + T], 0 for padding.
            position_ids: [B or 1, T].
            cache: Keys and values of earlier rows; extended.

        Returns:
            Per layer [B, T, d].
        """
        options = self.options(inputs[0], rotary, attention_mask, position_ids, cache)
        return [layer(part, **options) for layer, part in zip(self, inputs)]

    def options(
        self,
        states: torch.Tensor,
        rotary: nn.Module,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None = None,
    ) -> dict[str, Any]:
        """What every layer takes besides its states [B, T, d]; see `run`."""
        make_mask = create_sliding_window_causal_mask if is_sliding(self.config) else create_causal_mask
        mask = make_mask(
            config=self.config,
            inputs_embeds=states,
            attention_mask=attention_mask,
            past_key_values=cache,
            position_ids=position_ids,
            layer_idx=0,
        )
        kinds = [self.config.layer_types[-1]] if knows_layer_types(rotary) else []
        return {
            "attention_mask": mask,
            "position_ids": position_ids,
            "position_embeddings": rotary(states, position_ids, *kinds),
            self.cache_name: cache,
        }


def read_config(values: dict[str, Any]) -> PreTrainedConfig:
    """The config of a model from the fields of its `config.json`."""
    values = dict(values)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def check_layers(config: PreTrainedConfig, body: nn.Module) -> None:
    """Refuses a model whose layers cannot stand alone.

    Raises:
        ValueError: The reason.
    """
    reason = REFUSED.get(config.model_type)
    if reason is None:
        layers = getattr(body, "layers", None)
        takes = layers and "position_embeddings" in inspect.signature(type(layers[-1]).forward).parameters
        reason = None if takes and hasattr(body, "rotary_emb") else "its layers do not take rotary positions and a mask"
    if reason is not None:
        raise _refusal(config, reason)


def _refusal(config: PreTrainedConfig, reason: str) -> ValueError:
    return ValueError(f"backbone_config: a head cannot have a layer of model_type={config.model_type!r}: {reason}")


def knows_layer_types(rotary: nn.Module) -> bool:
    """Whether positions are rotated differently in layers of different kinds."""
    return "layer_type" in inspect.signature(type(rotary).forward).parameters
