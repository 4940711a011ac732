"""The families of heads: what builds the module of each, and what its law is. Heads know no backbone.

A family is registered here and, with its options and what cards say of it, in `configuration.head_families` under the
same name. Everything else asks the registry, never a name or a class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...configuration import MTPHeadConfig
from .backbone_parts import BackboneParts
from .circuit_head import CircuitHead
from .circuits import circuit_from_logits
from .ff import FFHead
from .shared import SharedHead
from .window_law import WindowLaw

Parameters = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HeadFamily:
    """What makes a family of heads.

    Args:
        build: From the config, the width d and the number of token ids V to the module.
        parameters: Calls the module on hidden states [..., d], with what it borrows of the backbone (None while there
            is none), and names what it returns for `law`.
        law: From `head_type`, the parameters and a dtype to the law.
    """

    build: Callable[[MTPHeadConfig, int, int], nn.Module]
    parameters: Callable[[nn.Module, MTPHeadConfig, torch.Tensor, BackboneParts | None], Parameters]
    law: Callable[..., WindowLaw] = circuit_from_logits


def _build_independent(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> nn.Module:
    leaves = {"full": FFHead, "shared": SharedHead}
    return leaves[config.leaf](hidden_size, vocab_size, config.window)


def _independent(
    head: nn.Module, config: MTPHeadConfig, hidden_states: torch.Tensor, backbone: BackboneParts | None
) -> Parameters:
    return {"leaf_logits": head(hidden_states, config.window, backbone).unsqueeze(-2)}


def _circuit(
    head: nn.Module, config: MTPHeadConfig, hidden_states: torch.Tensor, backbone: BackboneParts | None
) -> Parameters:
    return head(hidden_states, backbone)


FAMILIES: dict[str, HeadFamily] = {
    "ff": HeadFamily(_build_independent, _independent),
    "cp": HeadFamily(CircuitHead, _circuit),
    "hmm": HeadFamily(CircuitHead, _circuit),
    "btree": HeadFamily(CircuitHead, _circuit),
}


def build_head(config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> nn.Module:
    """The head module that `config` describes."""
    return FAMILIES[config.head_type].build(config, hidden_size, vocab_size)


def window_law(
    head: nn.Module, config: MTPHeadConfig, hidden_states: torch.Tensor, backbone: BackboneParts | None = None
) -> WindowLaw:
    """The law of the next `config.window` tokens given hidden states [..., d], in float32 (float64 kept)."""
    family = FAMILIES[config.head_type]
    parameters = family.parameters(head, config, hidden_states, backbone)
    dtype = torch.promote_types(parameters["leaf_logits"].dtype, torch.float32)
    return family.law(config.head_type, dtype=dtype, **parameters)


def init_head(module: nn.Module, std: float = 0.02) -> None:
    """Initialises the parameters that a module of a head holds itself, for a model's `_init_weights`.

    Args:
        module: Any module; those of heads have a `reset_head`. Tensors that were loaded stay.
        std: `initializer_range` of the model.
    """
    if reset := getattr(module, "reset_head", None):
        reset(std)
