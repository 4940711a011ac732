"""The families of heads: what builds the module of each, and what its distribution is. Heads know no backbone.

A family is registered here and, with its options and what cards say of it, in `configuration.head_families` under the
same name. Everything else asks the registry, never a name or a class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig

from ...configuration import MTPHeadConfig
from ..wrapped_models import call
from . import hydra, layer
from .backbone_parts import BackboneParts
from .circuit_families import circuit_from_logits
from .circuit_head import CircuitHead
from .ff import FFHead
from .hydra import HydraHead
from .layer import LayerHead
from .medusa import MedusaHead
from .shared import SharedHead
from .window_distribution import FactorisedDistribution, WindowDistribution


@dataclass(frozen=True)
class HeadFamily:
    """What makes a family of heads.

    Args:
        build: From the config, the width d and the number of token ids V to the module.
        distribution: Of the module and its config, at features [..., F], with what is borrowed of the backbone (None
            while there is none): the distribution of the next n tokens, in float32 (float64 kept). It takes `start` and
            `stop`, too, the places of the window that are asked about: what concerns others alone need not be computed,
            and independent positions are those places only.
        hidden_layers: Which states of the backbone it reads, as `output_hidden_states` counts them, the last included.
        attends: Whether features look at other positions; the head then has a cache, of verified rows only.
        layer_config: From a head's config and its backbone's to the config of the decoder layer that it needs, if any.
        is_independent: Whether the distribution behind the window's first token is the same, whatever that token is.
    """

    build: Callable[[MTPHeadConfig, int, int], nn.Module]
    distribution: Callable[..., WindowDistribution]
    hidden_layers: Callable[[MTPHeadConfig], list[int]] = lambda config: [-1]
    attends: Callable[[MTPHeadConfig], bool] = lambda config: False
    layer_config: Callable[[MTPHeadConfig, PreTrainedConfig], dict[str, Any] | None] = lambda config, text: None
    is_independent: bool = False


def _build_independent(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> nn.Module:
    leaves = {"full": FFHead, "shared": SharedHead}
    return leaves[config.leaf](hidden_size, vocab_size, config.window)


def _independent_distribution(
    head: nn.Module,
    config: MTPHeadConfig,
    features: torch.Tensor,
    backbone: BackboneParts | None,
    start: int = 0,
    stop: int | None = None,
) -> WindowDistribution:
    stop = config.window if stop is None else stop
    return FactorisedDistribution(_exact(call(head, features, stop, backbone, start).unsqueeze(-2)))


def _factorised_distribution(
    head: nn.Module,
    config: MTPHeadConfig,
    features: torch.Tensor,
    backbone: BackboneParts | None,
    start: int = 0,
    stop: int | None = None,
) -> WindowDistribution:
    return FactorisedDistribution(_exact(call(head, features, backbone, start, stop)["leaf_logits"]))


def _circuit_distribution(
    head: nn.Module,
    config: MTPHeadConfig,
    features: torch.Tensor,
    backbone: BackboneParts | None,
    start: int = 0,
    stop: int | None = None,
) -> WindowDistribution:
    parameters = call(head, features, backbone, stop)
    dtype = _exact(parameters["leaf_logits"][..., :0]).dtype
    return circuit_from_logits(config.head_type, dtype=dtype, **parameters)


def _exact(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


FAMILIES: dict[str, HeadFamily] = {
    "ff": HeadFamily(_build_independent, _independent_distribution, is_independent=True),
    "cp": HeadFamily(CircuitHead, _circuit_distribution),
    "hmm": HeadFamily(CircuitHead, _circuit_distribution),
    "btree": HeadFamily(CircuitHead, _circuit_distribution),
    "medusa": HeadFamily(MedusaHead, _factorised_distribution, is_independent=True),
    "hydra": HeadFamily(HydraHead, hydra.hydra_distribution, hydra.hidden_layers, hydra.attends, hydra.layer_config),
    "layer": HeadFamily(
        LayerHead,
        _factorised_distribution,
        layer.hidden_layers,
        lambda config: True,
        lambda config, text: text.to_dict(),
        is_independent=True,
    ),
}


def head_features(
    head: nn.Module,
    states: Sequence[torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    backbone: BackboneParts | None = None,
    cache: Cache | None = None,
) -> torch.Tensor:
    """What the distribution of every position is made from.

    Args:
        head: The head; one that reads more than the last state has `features`.
        states: Those that the family's `hidden_layers` names, [B, T, d] each.
        attention_mask: [B, past + T], 0 for padding.
        position_ids: [B or 1, T].
        backbone: What the head borrows.
        cache: The head's own keys and values of earlier rows; extended.

    Returns:
        [B, T, F].
    """
    make = getattr(head, "features", None)
    return states[-1] if make is None else make(states, attention_mask, position_ids, backbone, cache)


def build_head(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> nn.Module:
    """The head module that `config` describes."""
    return FAMILIES[config.head_type].build(config, hidden_size, vocab_size)


def window_distribution(
    head: nn.Module, config: MTPHeadConfig, features: torch.Tensor, backbone: BackboneParts | None = None
) -> WindowDistribution:
    """The distribution of the next `config.window` tokens given features [..., F], in float32 (float64 kept).

    For most families the features are the last hidden states [..., d] (`head_features`). The head computes in its own
    dtype, whatever that of the features is.
    """
    return FAMILIES[config.head_type].distribution(head, config, _in_dtype(features, head), backbone)


def distribution_after(
    head: nn.Module,
    config: MTPHeadConfig,
    features: torch.Tensor,
    last: torch.Tensor,
    length: int,
    backbone: BackboneParts | None = None,
) -> WindowDistribution:
    """`window_distribution` given its first token, as far as a draft of `length` tokens reads it: no other leaf is
    computed.

    Args:
        head: The head.
        config: Its config.
        features: [..., F].
        last: [...] int64, the token that was verified behind the features.
        length: At least 1, at most `config.window` - 1.
        backbone: What the head borrows.

    Returns:
        A distribution of `length` tokens or more, of which the first `length` are as they should be.
    """
    family, features = FAMILIES[config.head_type], _in_dtype(features, head)
    if family.is_independent:
        return family.distribution(head, config, features, backbone, 1, length + 1)
    return family.distribution(head, config, features, backbone, 0, length + 1).condition(last)


def _in_dtype(features: torch.Tensor, head: nn.Module) -> torch.Tensor:
    own = (parameter.dtype for parameter in head.parameters() if parameter.is_floating_point())
    return features.to(next(own, features.dtype))


def init_head(module: nn.Module, std: float = 0.02) -> None:
    """Initialises the parameters that a module of a head holds itself, for a model's `_init_weights`.

    Args:
        module: Any module; those of heads have a `reset_head`. Tensors that were loaded stay.
        std: `initializer_range` of the model.
    """
    if reset := getattr(module, "reset_head", None):
        reset(std)
