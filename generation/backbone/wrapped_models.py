"""Models that are compiled, sharded (FSDP2), checkpointing or adapted by peft: unwrapping, copies, merging."""

from __future__ import annotations

import copy
import hashlib
import inspect
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from accelerate.utils.modeling import get_state_dict_offloaded_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import GenerationMixin, PreTrainedModel

from .shared_models import bind_forwards, check_whole, holds_shares, is_sharded, training_size

Model = TypeVar("Model")
Kwargs = dict[str, Any]  # keyword arguments by name
_READABLE = (torch.float64, torch.float32, torch.bfloat16)
_OF_FRAMEWORKS = ("torch.", "transformers.", "accelerate.", "deepspeed.")
_PER_SEQUENCE = {"adapter_names", "alora_offsets"}
"""Arguments of a PeftModel that its layers get by hooks, with one value for each sequence."""


def untyped(value: object) -> Any:
    """Return a value without its type: `GenerationMixin` is typed for what no `PreTrainedModel` satisfies."""
    return value


def uncompiled(model: Model) -> Model:
    """Return the model that `torch.compile` has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def unwrap(model: object) -> PreTrainedModel:
    """Return the model within a PeftModel, within a compiled one, or the model itself."""
    within: Any = uncompiled(model)
    if hasattr(within, "peft_config") and callable(getattr(within, "get_base_model", None)):
        within = uncompiled(within.get_base_model())
    if isinstance(within, nn.Module) and hasattr(within, "config"):
        return cast(PreTrainedModel, within)
    raise TypeError(f"a {type(within).__name__} is no model of transformers; pass a PreTrainedModel or a PeftModel")


def input_embeddings(model: PreTrainedModel) -> nn.Embedding:
    """Return the embeddings of a model's tokens, or a module that is called like them."""
    return cast(nn.Embedding, model.get_input_embeddings())


def has_own_cache(model: PreTrainedModel) -> bool:
    """Return whether a model has caches of its own class (`own_cache`), and not those of transformers."""
    make = getattr(model, "own_cache", None)
    return make is not None and make() is not None


def is_base(method: Callable[..., object]) -> bool:
    """Return whether a method is that of every model."""
    return inspect.ismethod(method) and vars(GenerationMixin).get(method.__name__) is method.__func__


def fingerprint(model: PreTrainedModel) -> str | None:
    """Return the text by which a drafter identifies its backbone: `SHAPES DIGEST/DIGEST OF LAYERS`.

    The first part is of the unembedding and the last norm, in bfloat16; the second of a few rows of every matrix of the
    decoder, if they are readable and carry no adapters. None: weights are quantised, sharded, offloaded or in float16.
    """
    if not isinstance(model, PreTrainedModel):  # a substitute has no names to read by
        return None
    weight, decoder = getattr(model.get_output_embeddings(), "weight", None), cast(Any, model).get_decoder()
    norms = [part.weight for part in decoder.children() if isinstance(getattr(part, "weight", None), nn.Parameter)]
    weights = [] if weight is None else [weight, *[one for one in norms if one.dim() == 1][-1:]]
    if (ends := _digest(weights, 1024)) is None:
        return None
    matrices = [each for each in decoder.parameters() if each.dim() > 1]
    layers = None if carries_adapters(model) else _digest(matrices, 4)
    shapes = " ".join("x".join(map(str, weight.shape)) for weight in weights)
    return f"{shapes} {ends}" + (f"/{layers}" if layers else "")


def same_backbone(recorded: str, actual: str) -> bool:
    """Return whether two fingerprints agree in all parts that both have."""
    return all(one == other for one, other in zip(recorded.split("/"), actual.split("/")))


@torch.no_grad()
def _digest(weights: Sequence[Tensor], count: int) -> str | None:
    """Return a hash of about so many rows of each weight; None where one cannot be read, or there is none."""
    digest = hashlib.sha256()
    for weight in weights:
        if weight.is_meta or type(weight.data) is not Tensor or weight.dtype not in _READABLE:
            return None
        rows = weight.detach() if weight.dim() < 3 else weight.detach().flatten(0, -2)
        rows = rows[:: max(1, len(rows) // count)]
        digest.update(rows.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16] if weights else None


def checkpoints_activations(model: nn.Module) -> bool:
    """Return whether some layer inside `model` checkpoints its activations."""
    return any(vars(module).get("gradient_checkpointing") for module in model.modules())


@contextmanager
def checkpointing_paused(model: nn.Module) -> Iterator[None]:
    """Pause activation checkpointing inside `model` where there are no gradients: layers drop their cache meanwhile."""
    idle = model.training and not torch.is_grad_enabled()
    modules = model.modules() if idle else ()
    paused = [each for each in map(vars, modules) if each.get("gradient_checkpointing")]
    try:
        for state in paused:
            state["gradient_checkpointing"] = False
        yield
    finally:
        for state in paused:
            state["gradient_checkpointing"] = True


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model, with weights that are offloaded."""
    state = model.state_dict()
    is_offloaded = any(tensor.is_meta for tensor in state.values())
    return state | get_state_dict_offloaded_model(model) if is_offloaded else state


def sharing_copy(model: PreTrainedModel, ignore_adapters: bool = False) -> PreTrainedModel:
    """Return a copy of a model that shares all tensors with the original; modules, config and parameters are its own.

    With `ignore_adapters`, a model with adapters of peft is copied, too (`merged_copy` removes them).
    """
    if hasattr(model, "peft_config") and not ignore_adapters:
        raise ValueError(f"{type(model).__name__} carries adapters of peft: merge_and_unload() them first")
    if is_sharded(model) or any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} is sharded by FSDP2 or offloaded: load it whole")
    # a shallow copy of a parameter of any class is another parameter over the same tensor
    tensors = {id(each): copy.copy(each) for each in model.parameters() if not isinstance(each, DTensor)}
    shares = (each for each in model.parameters() if isinstance(each, DTensor))  # whose copies would be no leaves
    tensors |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in shares}
    copied = copy.deepcopy(model, tensors | {id(buffer): buffer for buffer in model.buffers()})
    bind_forwards(copied)
    return copied


def drop_collectors(model: nn.Module) -> None:
    """Remove the local functions that collect hidden states, which no pickle takes; later calls add them again."""
    for module in model.modules():
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if "output_capturing_hook" in getattr(hook, "__name__", "")]:
            del hooks[key]
        vars(module).pop("_output_capturing_hooks_installed", None)


def has_foreign_hooks(model: nn.Module) -> bool:
    """Return whether hooks run at the layers of a model that are no framework's: they may hold a value per sequence."""
    layers = (module for module in model.modules() if module is not model)
    tables = (table for layer in layers for table in (layer._forward_pre_hooks, layer._forward_hooks))
    hooks = (hook for table in tables for hook in table.values())
    return any(not getattr(getattr(hook, "func", hook), "__module__", "").startswith(_OF_FRAMEWORKS) for hook in hooks)


def peft_arguments(model: nn.Module) -> set[str]:
    """Return which arguments of a PeftModel its layers get in this call, for each sequence."""
    return {name for _, _, names in _peft_hooks(model) for name in names}


def drop_peft_arguments(model: nn.Module) -> None:
    """Remove the hooks that hand on such arguments: peft leaves them where a call ends with an error."""
    for hooks, key, _ in _peft_hooks(model):
        del hooks[key]


def _peft_hooks(model: nn.Module) -> list[tuple[dict[int, Any], int, set[str]]]:
    """Return such hooks, by their table and key, and what they hand on."""
    hooks = [(table, key) for module in model.modules() for table in [module._forward_pre_hooks] for key in table]
    named = ((table, key, _PER_SEQUENCE & getattr(table[key], "keywords", {}).keys()) for table, key in hooks)
    return [each for each in named if each[2]]


class PicklableMixin(nn.Module):
    """A model around one of transformers that can be pickled after hidden states were collected."""

    def __getstate__(self) -> dict[str, object]:
        """Return all attributes, after those functions are removed."""
        drop_collectors(self)
        return vars(self)


class WrapperMixin:
    """The embeddings of a backbone, for a model around it."""

    base_model_prefix: str
    takes_shares = False  # whether it learns where processes share a frozen backbone

    @property
    def inner(self) -> PreTrainedModel:
        """The backbone."""
        return getattr(self, self.base_model_prefix or "backbone")

    @property
    def tp_size(self) -> int | None:
        """As that of a drafter."""
        if not self.takes_shares or holds_shares(self.inner, learn=True):
            check_whole(self.inner, f"a trainer of {type(self).__name__}")
        return training_size(self.inner, type(self).__name__)

    def get_input_embeddings(self) -> nn.Module:
        """Return the backbone's."""
        return self.inner.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the backbone's."""
        self.inner.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the backbone's."""
        return cast(nn.Module, self.inner.get_output_embeddings())

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Set the backbone's."""
        self.inner.set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the backbone's embeddings and its head, which all parts share."""
        embeddings = self.inner.resize_token_embeddings(*args, **kwargs)
        self.vocab_size = embeddings.num_embeddings  # as transformers notes it
        return embeddings


def carries_adapters(model: nn.Module) -> bool:
    """Return whether peft has wrapped a model or put adapters into it."""
    return hasattr(model, "peft_config") or bool(_adapted_layers(model))


def _adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the layers that peft has adapted, with their names."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # without an import nothing can be adapted
    if tuners is None:
        return []
    return [(name, module) for name, module in model.named_modules() if isinstance(module, tuners.BaseTunerLayer)]


def base_layer(layer: nn.Module) -> nn.Module:
    """Return the layer that peft has adapted, or the layer itself."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    is_adapted = tuners is not None and isinstance(layer, tuners.BaseTunerLayer)
    return cast(Any, layer).get_base_layer() if is_adapted else layer


def merged_copy(model: Any) -> PreTrainedModel:
    """Return a copy that computes what a model with its active adapters does; it shares what they do not change."""
    wrapped, within = uncompiled(model), unwrap(model)
    if not carries_adapters(wrapped):
        return sharing_copy(within)
    if wrapped is not within and any(config.is_prompt_learning for config in wrapped.peft_config.values()):
        raise ValueError(f"{type(model).__name__} has learned prompts, which cannot be merged; pass the model within")
    if saved := next((name for name, _ in within.named_modules() if name.endswith(".modules_to_save")), None):
        raise ValueError(f"{saved}: merge_and_unload() the PeftModel first")
    if any(type(layer).__name__ == "GatedLinear" for layer in within.modules()):
        raise ValueError("gated adapters of a PTPForCausalLM cannot be merged: pass the model that it was made from")
    copied = sharing_copy(within, ignore_adapters=True)
    for name, layer in _adapted_layers(copied):
        copied.set_submodule(name, _merged(layer))
    for name in ("peft_config", "_hf_peft_config_loaded"):
        vars(copied).pop(name, None)
    return copied


def adapter_marks(model: nn.Module) -> tuple[Hashable, ...]:
    """Return values that change when adapted layers of a model are trained, scaled, switched, merged or restored."""
    return tuple(
        (tuple(layer.active_adapters), layer.disable_adapters, layer.merged)
        + tuple(getattr(layer, "scaling", {}).items())
        + tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in layer.parameters())
        for _, layer in _adapted_layers(model)
    )


@torch.no_grad()
def _merged(layer: Any) -> nn.Module:
    """Return the base layer with the active adapters merged into copies of its weights."""
    base = layer.get_base_layer()
    if layer.disable_adapters or layer.merged:
        return base
    for name, parameter in list(base.named_parameters(recurse=False)):
        setattr(base, name, nn.Parameter(parameter.clone(), requires_grad=parameter.requires_grad))
    layer.merge(safe_merge=True)
    return layer.get_base_layer()
