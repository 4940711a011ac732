"""Heads that are decoder layers on the states below the backbone's last layer (Gloeckle et al., Mehra et al.)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers import initialization as init

from ...configuration import MTPHeadConfig
from ..decoder_layers import LayerSource, layer_kind, layer_options, read_config
from .backbone_parts import BackboneParts
from .one_by_one import sums_one_by_one


class DecoderLayers(nn.ModuleList):
    """New layers like a model's last one, side by side over one sequence of states.

    Args:
        source: The model's layers.
        count: How many.
    """

    def __init__(self, source: LayerSource, count: int) -> None:
        super().__init__(source.new_layers(count))
        self.config, self.cache_name = source.config, source.cache_name

    def run(
        self,
        inputs: Sequence[torch.Tensor],
        rotary: nn.Module,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: Cache | None = None,
    ) -> list[torch.Tensor]:
        """Return every layer's output [B, T, d] for its own input; arguments as for `layer_options`."""
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
        """Return what every layer takes besides its states."""
        kind = layer_kind(self.config, -1)
        return layer_options(
            self.config, rotary, states, attention_mask, position_ids, cache, kind, cache_name=self.cache_name
        )


class LayerHead(nn.Module):
    """Logits of head k are W norm(f_k(z)): a decoder layer f_k of its own, the backbone's norm and unembedding.

    z is the input of the backbone's last layer or, with `mix="weighted"`, a learned mean of the outputs of all layers
    below it, one mean per head. Position 1 is the backbone's own distribution (`first="backbone"`), or has a head like
    the rest.

    Args:
        config: Head options: `window`, `first`, `mix`, `mix_temperature`, `mix_init`, `backbone_config`.
        hidden_size: d.
        vocab_size: V.
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        count = config.window - (config.first == "backbone")
        source = LayerSource(read_config(config.backbone_config))
        self.layers, self.rotary = DecoderLayers(source, count), source.rotary()
        mixed = len(hidden_layers(config)) - 1
        self.mix = nn.Parameter(torch.zeros(count, mixed)) if config.mix == "weighted" else None

    def features(
        self,
        states: Sequence[torch.Tensor],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        backbone: BackboneParts,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """What the unembedding reads for every position of the window, [B, T, n d].

        Args:
            states: Those that `hidden_layers` names, [B, T, d] each.
            attention_mask: [B, past + T], 0 for padding.
            position_ids: [B or 1, T].
            backbone: Whose norm is borrowed.
            cache: Keys and values of earlier rows; extended.
        """
        *below, last = states
        outputs = self.layers.run(self._inputs(below), self.rotary, attention_mask, position_ids, cache)
        normed = [backbone.norm(output) for output in outputs]
        return torch.cat(normed if self.config.first == "own" else [last.to(normed[0].dtype), *normed], -1)

    def one_by_one(
        self,
        states: Mapping[int, torch.Tensor] | Sequence[torch.Tensor],
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        backbone: BackboneParts,
        targets: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of all heads with the memory of one (`sums_one_by_one`), where they read the same states.

        Args:
            states: By index, those below the last layer, and the last, [B, T, d].
            attention_mask: [B, T], 0 for padding.
            position_ids: [B or 1, T].
            backbone: Whose norm and unembedding are borrowed.
            targets: [B, T, n] int64, -100 where nothing is scored.
            weights: [n].

        Returns:
            The scalar, and detached sums of cross-entropies per depth, [n].
        """
        z = states[-2].to(next(self.layers.parameters()).dtype)
        options = self.layers.options(z, self.rotary, attention_mask, position_ids)

        def run(k: int, inputs: torch.Tensor) -> torch.Tensor:
            return backbone.norm(self.layers[k](inputs, **options))

        borrowed = self.config.first == "backbone"
        layers, unembed, vocab = list(self.layers), backbone.unembed, self.vocab_size
        loss, sums = sums_one_by_one(run, layers, z, targets[..., borrowed:], weights[borrowed:], unembed, vocab)
        if not borrowed:
            return loss, sums
        last = states[-1].to(z.dtype)
        first, own = sums_one_by_one(
            lambda k, inputs: inputs, [nn.Module()], last, targets, weights[:1], unembed, vocab
        )
        return loss + first, torch.cat([own, sums])

    def _inputs(self, below: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        dtype = next(self.layers.parameters()).dtype
        if self.mix is None:
            return [below[-1].to(dtype)] * len(self.layers)
        shares = (self.mix / self.config.mix_temperature).softmax(-1)
        return list(torch.einsum("kl,l...d->k...d", shares, torch.stack(list(below)).to(dtype)))

    def forward(
        self, features: torch.Tensor, backbone: BackboneParts | None = None, start: int = 0, stop: int | None = None
    ) -> dict[str, torch.Tensor]:
        """`leaf_logits` [..., n, 1, V] from features [..., n d], or those of the places start .. stop - 1."""
        states = features.unflatten(-1, (self.config.window, -1))[..., start:stop, :]
        return {"leaf_logits": backbone.unembed(states).unsqueeze(-2)}

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Starts the means, whatever `std` is."""
        if self.mix is None:
            return
        uniform = self.config.mix_init == "uniform"
        start = torch.full_like(self.mix, 0.1 if uniform else 0.0)
        start[:, -1] += 0.0 if uniform else 10 * self.config.mix_temperature  # all but e^-10 of the mean
        init.copy_(self.mix, start)

    def start_from(self, backbone: PreTrainedModel) -> None:
        """Every layer starts as the backbone's last one, as its adapters, if it has any, make it."""
        weights = _merged(backbone.get_decoder().layers[-1])
        for layer in self.layers:
            layer.load_state_dict(weights)


def _merged(layer: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's weights, by the names that they have without adapters of peft."""
    adapted = {name: module for name, module in layer.named_modules() if hasattr(module, "get_base_layer")}
    weights = {
        name.replace(".base_layer.", "."): value
        for name, value in layer.state_dict().items()
        if not any(name.startswith(f"{own}.") and ".base_layer." not in name for own in adapted)
    }
    for name, module in adapted.items():
        for adapter in [] if module.disable_adapters else module.active_adapters:
            key = f"{name}.weight"
            weights[key] = weights[key] + module.get_delta_weight(adapter).to(weights[key])
    return weights


def hidden_layers(config: MTPHeadConfig) -> list[int]:
    """The states that layer heads read: below the last layer, and the last."""
    if config.mix == "none":
        return [-2, -1]
    layers = read_config(config.backbone_config).get_text_config().num_hidden_layers
    return [*range(1, layers), -1]
