"""What heads borrow of their backbone, at the moment of a call: never stored on a module, so that copies stay right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel

from ..decoder_layers import final_norm
from ..wrapped_models import call_frozen, is_unit


@dataclass(frozen=True)
class BackboneParts:
    """Functions of a backbone, through which no gradient reaches its parameters. Made anew for every call.

    Args:
        unembed: From hidden states [..., d] after the final norm to logits [..., V].
        embed: From token ids [...] to embeddings [..., d].
        norm: The final norm, [..., d] to [..., d].
    """

    unembed: Callable[[torch.Tensor], torch.Tensor]
    embed: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor]


def required(backbone: BackboneParts | None) -> BackboneParts:
    """Return the parts.

    Raises:
        RuntimeError: There are none.
    """
    if backbone is None:
        raise RuntimeError("these heads borrow parts of their backbone: call attach(backbone) first")
    return backbone


def backbone_parts(model: PreTrainedModel) -> BackboneParts:
    """The parts of a causal language model, which may have a `backbone_parts` of its own."""
    if own := getattr(model, "backbone_parts", None):
        return own()
    unembedding, text = model.get_output_embeddings(), model.config.get_text_config()
    return BackboneParts(
        unembed=partial(_unembed, unembedding, text),
        embed=partial(frozen, model.get_input_embeddings()),
        norm=lambda states: frozen(final_norm(model.get_decoder()), states),
    )


def _unembed(unembedding: nn.Module, config: PreTrainedConfig, states: torch.Tensor) -> torch.Tensor:
    states = states.to(dtype_of(unembedding, states))
    return _finish(frozen(unembedding, states) if torch.is_grad_enabled() else unembedding(states), config)


def _finish(logits: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """What some families do to the logits that leave their unembedding."""
    logits = logits * (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * (logits / cap).tanh()


def frozen(module: nn.Module, *args: Any) -> Any:
    """`module(*args)`, through which gradients reach the arguments but no parameter.

    The module itself is called, never its weight read: hooks of accelerate (offloaded weights) and other classes of
    linear maps (quantised ones) do their work.
    """
    if is_unit(module):
        return call_frozen(module, *args)
    if not torch.is_grad_enabled():
        return module(*args)
    trained = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained or any(value.is_meta for value in trained.values()):
        return module(*args)
    return functional_call(module, trained, args)


def dtype_of(module: nn.Module, states: torch.Tensor) -> torch.dtype:
    """The floating dtype that a module computes in; that of the states where its weights are integers."""
    weight = next(module.parameters(), states)
    return weight.dtype if weight.is_floating_point() else states.dtype


def compute_device(model: PreTrainedModel) -> torch.device:
    """Where a model computes, which is not where its weights lie while they are offloaded."""
    hooks = (module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook"))
    devices = [hook.execution_device for hook in hooks if getattr(hook, "execution_device", None) is not None]
    return torch.device(devices[0]) if devices and model.device.type == "meta" else model.device
