"""Copies of models: one that shares its tensors with the original, and what a pickle must leave out."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedModel


def sharing_copy(model: PreTrainedModel, ignore_adapters: bool = False) -> PreTrainedModel:
    """A copy of a model in which every tensor lies where the original's does.

    Modules, configurations and parameters are the copy's own, so that layers may be replaced, options set and
    parameters frozen or moved; only numbers written into a tensor (by training it, say) show in both.

    Args:
        model: The original.
        ignore_adapters: Copy a model with adapters of peft, too (`merging.merged_copy` takes them off).

    Raises:
        ValueError: A model that peft has wrapped, or whose weights are offloaded: new parts are made from its tensors.
    """
    if hasattr(model, "peft_config") and not ignore_adapters:
        raise ValueError(
            f"{type(model).__name__} carries adapters of peft; give it with them merged in (merge_and_unload()), or "
            "without them"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"weights of {type(model).__name__} are offloaded; load it whole, and load what is saved of the new model "
            "with a device_map"
        )
    # a copy of a parameter that is not deep is a parameter of its own over the same tensor, whatever its class
    tensors = {id(parameter): copy.copy(parameter) for parameter in model.parameters()}
    return copy.deepcopy(model, tensors | {id(buffer): buffer for buffer in model.buffers()})


def drop_collectors(model: PreTrainedModel) -> None:
    """Takes off the local functions that transformers leaves on a model's layers, which no pickle takes.

    They collect hidden states, and are put there again by the next call that asks for some.
    """
    for module in model.modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if "output_capturing_hook" in getattr(hook, "__name__", "")]:
            del hooks[key]
        vars(module).pop("_output_capturing_hooks_installed", None)


class PicklableMixin:
    """A model around one of transformers, on whose layers transformers leaves what no pickle takes."""

    def __getstate__(self) -> dict[str, Any]:
        """All attributes, after those functions are taken off."""
        drop_collectors(self)
        return vars(self)
