"""Backbones that carry adapters of peft: a copy into which they are merged, while the given model stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .copies import sharing_copy
from .unwrapping import uncompiled, unwrap

_TRACES = "peft_config", "_hf_peft_config_loaded"


def carries_adapters(model: nn.Module) -> bool:
    """Whether peft has wrapped a model or put adapters into it."""
    return hasattr(model, "peft_config") or any(hasattr(module, "base_layer") for module in model.modules())


def merged_copy(model: Any) -> PreTrainedModel:
    """A copy that computes what a model with its active adapters does, without adapters.

    It shares all tensors with the model but those that adapters change. The model is not touched: neither its weights
    nor its names.

    Args:
        model: A model of transformers, with adapters in it or not, or a PeftModel; they may be compiled.

    Raises:
        TypeError: No model of transformers.
        ValueError: Adapters that cannot be merged: learned prompts, copies of whole modules, quantised layers.
    """
    wrapped, within = uncompiled(model), unwrap(model)
    if not carries_adapters(wrapped):
        return sharing_copy(within)
    if wrapped is not within:
        _check_prompts(wrapped)
    _check(within)
    copy = sharing_copy(within, ignore_adapters=True)
    for name, layer in list(copy.named_modules()):
        if hasattr(layer, "base_layer") and hasattr(layer, "merge"):
            parent, _, own = name.rpartition(".")
            setattr(copy.get_submodule(parent), own, _merged(layer))
    for name in _TRACES:
        vars(copy).pop(name, None)
    return copy


def adapter_marks(model: nn.Module) -> tuple[Any, ...]:
    """What changes when the adapters of a model are trained, switched, merged or taken away."""
    return tuple(
        (tuple(layer.active_adapters), layer.disable_adapters, layer.merged)
        + tuple((p.data_ptr(), p._version) for name, p in layer.named_parameters() if "base_layer" not in name)
        for layer in model.modules()
        if hasattr(layer, "base_layer") and hasattr(layer, "merge")
    )


def _check_prompts(model: Any) -> None:
    """Refuses a PeftModel with learned prompts, which are no part of the model within."""
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        raise ValueError(f"{type(model).__name__} has learned prompts, which cannot be merged; give the model within")


def _check(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        if hasattr(layer, "modules_to_save"):
            raise ValueError(
                f"{name} is trained as a whole by peft (modules_to_save): merge_and_unload() the PeftModel first"
            )
        if type(layer).__name__ == "GatedLinear":
            raise ValueError(f"{name} has gated adapters of a PTPForCausalLM: give the model that it was made from")
        if hasattr(layer, "base_layer") and hasattr(layer, "merge"):
            weight = layer.get_base_layer().weight
            if not (weight.is_floating_point() and hasattr(layer, "unmerge")):
                raise ValueError(
                    f"{name} is quantised ({type(layer.get_base_layer()).__name__}, {weight.dtype}), and its adapters "
                    "cannot be merged; load the backbone in full precision"
                )


@torch.no_grad()
def _merged(layer: Any) -> nn.Module:
    """The base layer with the active adapters in its weights, which are its own then."""
    base = layer.get_base_layer()
    if layer.disable_adapters or layer.merged:
        return base
    for name, parameter in list(base.named_parameters(recurse=False)):
        setattr(base, name, nn.Parameter(parameter.clone(), requires_grad=parameter.requires_grad))
    layer.merge(safe_merge=True)
    return layer.get_base_layer()
