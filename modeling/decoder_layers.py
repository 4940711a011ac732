"""Decoder layers of a known architecture, built from its config and called outside the model that they belong to.

No layer is written anew: layers are of the backbone's own class, with its rotary positions, and see the mask that the
model would give them. Their cache belongs to the caller.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, Cache, PreTrainedConfig
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, create_causal_mask

from ..configuration.mtp_families import REFUSED

_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f")


class LayerSource:
    """The decoder layers of an architecture, read from a model without weights.

    Args:
        config: The config of a model.

    Attributes:
        config: The same, as its layers hold it.
        layers: All layers, on the meta device.
        cache_name: The argument by which a layer takes its cache.

    Raises:
        ValueError: An architecture whose layers cannot stand alone.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            self._body = AutoModel.from_config(deepcopy(config))
        check_layers(config, self._body)
        self.config: PreTrainedConfig = self._body.config
        self.layers: nn.ModuleList = self._body.layers
        wanted = inspect.signature(type(self.layers[-1]).forward).parameters
        self.cache_name = "layer_past" if "layer_past" in wanted else "past_key_values"

    def new_layers(self, count: int) -> list[nn.Module]:
        """Return `count` new layers like the last one, whose slots in a cache are 0, 1, ...

        Raises:
            ValueError: Layers that need more than their config.
        """
        last = len(self.layers) - 1
        try:
            layers = [type(self.layers[-1])(self.config, last) for _ in range(count)]
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise _refusal(self.config, f"its layers cannot be built alone ({error!r})") from error
        set_cache_slots(layers)
        return layers

    def last_layers(self, count: int) -> list[nn.Module]:
        """Return the last `count` layers on the meta device, whose slots in a cache are 0, 1, ..."""
        layers = list(self.layers[-count:])
        set_cache_slots(layers)
        return layers

    def rotary(self) -> nn.Module:
        """Return a new module of rotary positions; it has no parameters."""
        return type(self._body.rotary_emb)(self.config)

    def norm(self) -> nn.Module:
        """Return a new norm like the model's final one."""
        eps = config_field(self.config, "rms_norm_eps", "layer_norm_eps", default=1e-6)
        return type(final_norm(self._body))(self.config.hidden_size, eps=eps)


def layer_options(
    config: PreTrainedConfig,
    rotary: nn.Module | None,
    states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor,
    past_key_values: Cache | None = None,
    kind: str = "full_attention",
    slot: int = 0,
    cache_name: str = "past_key_values",
) -> dict[str, Any]:
    """Return what a layer takes besides its states.

    Args:
        config: Of the model.
        rotary: Its rotary positions, if it has any.
        states: [B, T, d]; their shape, dtype and device are read.
        attention_mask: [B, past + T], 0 for padding.
        position_ids: [B or 1, T].
        past_key_values: The caller's cache of earlier positions.
        kind: How the layer attends, as `layer_types` calls it.
        slot: Of the layer in that cache.
        cache_name: See `LayerSource`.
    """
    mask = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get(kind, create_causal_mask)(
        config=config,
        inputs_embeds=states,
        attention_mask=attention_mask,
        past_key_values=past_key_values,
        position_ids=position_ids,
        layer_idx=slot,
    )
    kinds = [kind] if rotary is not None and knows_layer_types(type(rotary)) else []
    return {
        "attention_mask": mask,
        "position_ids": position_ids,
        "position_embeddings": None if rotary is None else rotary(states, position_ids, *kinds),
        cache_name: past_key_values,
    }


def layer_kind(config: PreTrainedConfig, index: int) -> str:
    """Return how a layer attends, as `layer_types` calls it."""
    if layer_types := config_field(config, "layer_types"):
        return layer_types[index]
    return "full_attention" if config_field(config, "sliding_window") is None else "sliding_attention"


@cache
def knows_layer_types(rotary: type[nn.Module]) -> bool:
    """Return whether positions are rotated differently in layers of different kinds."""
    return "layer_type" in inspect.signature(rotary.forward).parameters


def set_cache_slots(layers: Iterable[nn.Module]) -> None:
    """Number the layers for a cache of their own: 0, 1, ..."""
    for slot, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = slot


def config_field(config: PreTrainedConfig, *names: str, default: Any = None) -> Any:
    """Return the first of some fields that a config has and that is not None."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value is not None), default)


def read_config(values: dict[str, Any] | None) -> PreTrainedConfig:
    """Return the config of a model from the fields of its `config.json`.

    Raises:
        ValueError: There are none.
    """
    if values is None:
        raise ValueError("backbone_config is missing: MTPHeads.from_backbone fills it")
    values = dict(values)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def check_layers(config: PreTrainedConfig, body: nn.Module) -> None:
    """Refuse a model whose layers cannot stand alone.

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


def final_norm(body: nn.Module) -> nn.Module:
    """Return the norm after the last layer.

    Raises:
        ValueError: An architecture that calls it by another name.
    """
    for name, module in body.named_children():
        if name in _NORMS:
            return module
    raise ValueError(f"{type(body).__name__} has no final norm that heads could share")


def finished_logits(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Return logits [..., V] with what a family does after its unembedding: cap tanh(factor W h / divisor / cap).

    These changes keep the order of logits, but not losses, confidences and draft distributions.
    """
    divisor, factor, cap = (
        config_field(config, name) for name in ("logits_scaling", "logit_scale", "final_logit_softcapping")
    )
    if divisor is not None:
        logits = logits / float(divisor)
    if factor is not None:
        logits = logits * float(factor)
    return logits if cap is None else torch.tanh(logits / float(cap)) * float(cap)


def _refusal(config: PreTrainedConfig, reason: str) -> ValueError:
    return ValueError(f"backbone_config: a head cannot have a layer of model_type={config.model_type!r}: {reason}")
