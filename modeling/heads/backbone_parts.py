"""What heads borrow of their backbone, at the moment of a call: never stored on a module, so that copies stay right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from ..decoder_layers import final_norm, finished_logits
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


@runtime_checkable
class HasBackboneParts(Protocol):
    """A model that says itself what heads borrow of it."""

    def backbone_parts(self) -> BackboneParts:
        """Return the parts."""
        ...


def output_embeddings(model: PreTrainedModel) -> nn.Linear:
    """Return the unembedding of a causal language model: a linear map, or a quantised one that is called alike.

    Raises:
        ValueError: It has none.
    """
    unembedding = model.get_output_embeddings()
    if unembedding is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings")
    return cast(nn.Linear, unembedding)


def backbone_parts(model: PreTrainedModel) -> BackboneParts:
    """Return the parts of a causal language model, which may have a `backbone_parts` of its own."""
    if isinstance(model, HasBackboneParts):
        return model.backbone_parts()
    unembedding, text = output_embeddings(model), model.config.get_text_config()
    return BackboneParts(
        unembed=lambda states: finished_logits(frozen(unembedding, states.to(dtype_of(unembedding, states))), text),
        embed=lambda tokens: frozen(model.get_input_embeddings(), tokens),
        norm=lambda states: frozen(final_norm(model.get_decoder()), states),
    )


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
    """Return the floating dtype that a module computes in; that of the states where its weights are integers."""
    weight = next(module.parameters(), states)
    return weight.dtype if weight.is_floating_point() else states.dtype


def compute_device(model: PreTrainedModel) -> torch.device:
    """Return where a model computes, which is not where its weights lie while they are offloaded."""
    hooks = (vars(module)["_hf_hook"] for module in model.modules() if "_hf_hook" in vars(module))
    devices = [device for hook in hooks if (device := vars(hook).get("execution_device")) is not None]
    return torch.device(devices[0]) if devices and model.device.type == "meta" else model.device
