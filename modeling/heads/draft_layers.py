"""MtPC's draft LoRA: the drafter runs the backbone's last k layers once more, with its own low-rank adapters.

The backbone's layers are shared up to the last k. The verifier runs those unchanged; the drafter runs them with
adapters, on z, the input of the first of them, and over verified tokens only: so its cache is never rolled back, the
backbone is called once per cycle, and its distribution is unchanged bit for bit. Only adapters are parameters here. The
weights are the backbone's, borrowed for a call: W + s B A is computed for every step of training and once per call of
`generate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import CacheLayerMixin

from ...configuration.heads import MTPHeadConfig
from ..common.backbone_parts import (
    BackboneParts,
    LayerSource,
    attention_kind,
    follow_experts,
    layer_options,
    read_config,
)

Weights = dict[str, Tensor]


class Adapter(nn.Module):
    """Low-rank change s B A of a weight [out, in]; B starts at 0."""

    def __init__(self, shape: Sequence[int], rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = nn.Parameter(torch.zeros(rank, shape[1]))  # [r, in]
        self.lora_B = nn.Parameter(torch.zeros(shape[0], rank))  # [out, r]

    def added_to(self, weight: Tensor) -> Tensor:
        """Return the changed weight, [out, in], in the weight's dtype; no gradient reaches the weight itself."""
        return weight.detach() + (self.scale * self.lora_B @ self.lora_A).to(weight)

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Draw A as peft does (`std` is not read); B is 0, so that the layers start as the backbone's."""
        bound = 1 / math.sqrt(self.lora_A.shape[1])
        init.uniform_(self.lora_A, -bound, bound)
        init.zeros_(self.lora_B)


class LayerAdapters(nn.Module):
    """Low-rank adapters for every linear map of some layers whose weights are borrowed.

    Args:
        shells: The layers without weights, as modules to call.
        config: Head options: `draft_lora_rank`, `draft_lora_alpha`.
    """

    def __init__(self, shells: Sequence[nn.Module], config: MTPHeadConfig) -> None:
        super().__init__()
        self.shells, self.gradient_checkpointing = [list(shells)], False  # in a list: no submodules, never saved
        rank = config.draft_lora_rank
        scale = (2 * rank if config.draft_lora_alpha is None else config.draft_lora_alpha) / rank
        self.adapters = nn.ModuleList(
            nn.ModuleDict({_key(name): Adapter(module.weight.shape, rank, scale) for name, module in _linears(shell)})
            for shell in shells
        )

    def weights(self, layers: Sequence[nn.Module]) -> list[Weights]:
        """Return, by layer, the weights of the backbone's `layers` plus those of the adapters."""
        return [self._weights(layer, slot) for slot, layer in enumerate(layers)]

    def _weights(self, layer: nn.Module, slot: int) -> Weights:
        weights = {name: p.detach() for name, p in (*layer.named_parameters(), *layer.named_buffers())}
        for key, adapter in cast(Mapping[str, Adapter], self.adapters[slot]).items():
            name = key.replace("-", ".") + ".weight"
            shape = (adapter.lora_B.shape[0], adapter.lora_A.shape[1])
            weight = weights.get(name)
            if weight is None or weight.is_meta or weight.shape != shape or not weight.is_floating_point():
                raise ValueError(f"draft_layers need {name} as a matrix {shape}: load it plainly, merge adapters")
            weights[name] = adapter.added_to(weight)
        return weights

    def run(self, slot: int, weights: Weights, states: Tensor, *args: object, **options: object) -> Tensor:
        """Run one layer on states [B, T, d]; without a cache its activations may be recomputed in backward."""
        shell = self.shells[0][slot]

        def layer(states: Tensor) -> Tensor:
            output = functional_call(shell, weights, (states, *args), options)
            return output[0] if isinstance(output, tuple) else output

        cached = any(isinstance(value, Cache | CacheLayerMixin) for value in options.values())
        saves = self.gradient_checkpointing and torch.is_grad_enabled() and not cached
        return checkpoint(layer, states, use_reentrant=False) if saves else layer(states)


class DraftLayers(LayerAdapters):
    """The adapters of a backbone's last k layers, for heads apart from it.

    Args:
        config: Head options: `backbone_config`, `draft_layers`, `draft_lora_rank`, `draft_lora_alpha`.
    """

    def __init__(self, config: MTPHeadConfig) -> None:
        count, source = config.draft_layers, LayerSource(read_config(config.backbone_config))
        if count > len(source.layers):
            raise ValueError(f"draft_layers={count}: the backbone has {len(source.layers)} layers")
        super().__init__(source.last_layers(count), config)
        self.config, self.cache_name = source.config, source.cache_name
        self.kinds = [attention_kind(source.config, index) for index in range(-count, 0)]
        self.rotary = source.rotary()

    def bind(self, backbone: PreTrainedModel) -> BoundLayers:
        """Return the layers with their current weights, for a step of training or a call of `generate`."""
        layers = list(cast(nn.ModuleList, backbone.get_decoder().layers))[-len(self.adapters) :]
        follow_experts(self.config, backbone)
        return BoundLayers(self, self.weights(layers), backbone)


class BoundLayers:
    """Draft layers with fixed weights, and the final norm of a backbone."""

    def __init__(self, layers: DraftLayers, weights: list[Weights], backbone: PreTrainedModel) -> None:
        self.layers, self.weights, self.norm = layers, weights, BackboneParts(backbone).norm

    def __call__(
        self, states: Tensor, attention_mask: Tensor | None, position_ids: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """Run over z, [B, T, d], the input of the first layer: [B, T, d], after the final norm.

        `attention_mask` is [B, past + T], `position_ids` [B or 1, T]; `cache`, the drafter's own, is extended.
        """
        own = self.layers
        dtype = next(iter(self.weights[0].values())).dtype
        states = states.detach().to(dtype)
        for slot, weights in enumerate(self.weights):
            inputs = states, attention_mask, position_ids, cache
            options = layer_options(own.config, own.rotary, *inputs, own.kinds[slot], slot, own.cache_name)
            states = own.run(slot, weights, states, **options)
        return self.norm(states)


def _linears(layer: nn.Module) -> list[tuple[str, nn.Linear]]:
    modules = ((name, module) for name, module in layer.named_modules() if isinstance(module, nn.Linear))
    return [(name, module) for name, module in modules if type(module) is nn.Linear]


def _key(name: str) -> str:
    """Return a name that a ModuleDict takes; names of layers hold no hyphen."""
    return name.replace(".", "-")


def new_layers(
    config: MTPHeadConfig, backbone: PreTrainedModel, count: int, rank: int, alpha: float | None
) -> DraftLayers:
    """Return draft layers for heads that have none, and give their config the options of these."""
    changes = {"draft_layers": count, "draft_lora_rank": rank, "draft_lora_alpha": alpha}
    changes |= {"backbone_config": backbone.config.get_text_config().to_dict()}
    checked = MTPHeadConfig.from_dict(config.to_dict() | changes)
    layers = DraftLayers(checked)
    for module in layers.modules():
        if isinstance(module, Adapter):
            module.reset_head(config.initializer_range)
    for name, value in changes.items():
        setattr(config, name, value)
    return layers
