"""Models that are compiled, checkpointing, offloaded, adapted by peft, or shared by processes.

FSDP2 shards the weights of a model, or tensor parallelism divides its layers.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from types import FunctionType
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.distributed import DistributedConfig

from ..contract import SpeculativeCache

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


def own_cache_of(model: PreTrainedModel) -> Callable[[], SpeculativeCache] | None:
    """Return the constructor of a model's own class of cache (`own_cache`); None: it has caches of transformers."""
    return getattr(model, "own_cache", lambda: None)()


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
    weight, decoder = getattr(model.get_output_embeddings(), "weight", None), cast(nn.Module, model.get_decoder())
    own = (getattr(part, "weight", None) for part in decoder.children())
    norms = [each for each in own if isinstance(each, nn.Parameter) and each.dim() == 1]
    weights = [] if weight is None else [weight, *norms[-1:]]
    if (ends := _digest(weights, 1024)) is None:
        return None
    shapes = " ".join("x".join(map(str, weight.shape)) for weight in weights)
    matrices = [each for each in decoder.parameters() if each.dim() > 1]
    layers = None if carries_adapters(model) else _digest(matrices, 4)
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


@contextmanager
def weights_fetched(module: nn.Module) -> Iterator[None]:
    """Let a hook of accelerate, which code that travels with models cannot import, fetch a module's own weights."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        hook.pre_forward(module)
    try:
        yield
    finally:
        if hook is not None:
            hook.post_forward(module, None)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model, with weights that are offloaded; a hook may fetch those of all submodules."""
    state = dict(model.state_dict())
    for prefix, module in model.named_modules():
        if "_hf_hook" in vars(module):
            with weights_fetched(module):
                fetched = module.state_dict(prefix=f"{prefix}." if prefix else "")
                state |= {name: tensor for name, tensor in fetched.items() if not tensor.is_meta}
    return state


def sharing_copy(model: PreTrainedModel, ignore_adapters: bool = False) -> PreTrainedModel:
    """Return a copy of a model that shares all tensors with the original; modules, config, parameters are its own."""
    if hasattr(model, "peft_config") and not ignore_adapters:  # `merged_copy` removes them
        raise ValueError(f"{type(model).__name__} carries adapters of peft: merge_and_unload() them first")
    if is_sharded(model) or any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{type(model).__name__} is sharded by FSDP2 or offloaded: load it whole")
    # a shallow copy of a parameter of any class is another parameter over the same tensor
    tensors = {id(each): copy.copy(each) for each in model.parameters() if not isinstance(each, DTensor)}
    shares = (each for each in model.parameters() if isinstance(each, DTensor))  # whose copies would be no leaves
    tensors |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in shares}
    copied = copy.deepcopy(model, tensors | {id(buffer): buffer for buffer in model.buffers()})
    for module in copied.modules():  # the copied forward of a divided module is that of the original
        if held := _closure_of(module):
            del vars(module)["forward"]
            if "self" in held:  # else it adds gradients of a norm up, of which a frozen one has none
                held["self"].install_forward(module, held["mesh"])
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


def _peft_hooks(model: nn.Module) -> list[tuple[dict[int, Callable[..., object]], int, set[str]]]:
    """Return such hooks, by their table and key, and what they hand on."""
    hooks = [(table, key) for module in model.modules() for table in [module._forward_pre_hooks] for key in table]
    named = ((table, key, _PER_SEQUENCE & getattr(table[key], "keywords", {}).keys()) for table, key in hooks)
    return [each for each in named if each[2]]


class WrapperMixin(nn.Module):
    """The embeddings of a backbone, for a model around it, which can be pickled after hidden states were collected."""

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

    def __getstate__(self) -> dict[str, object]:
        drop_collectors(self)
        return vars(self)

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
    return hasattr(model, "peft_config") or any(map(_is_adapted, model.modules()))


def _is_adapted(layer: nn.Module) -> TypeGuard[Any]:
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # without an import nothing can be adapted
    return tuners is not None and isinstance(layer, tuners.BaseTunerLayer)


def base_layer(layer: nn.Module) -> nn.Module:
    """Return the layer that peft has adapted, or the layer itself."""
    return layer.get_base_layer() if _is_adapted(layer) else layer


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
    for name, layer in list(copied.named_modules()):
        if _is_adapted(layer):
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
        for layer in filter(_is_adapted, model.modules())
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


def is_unit(module: nn.Module) -> bool:
    """Return whether FSDP2 gathers and shards this module on its own."""
    return isinstance(module, FSDPModule)


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 shards a model, or a part of it."""
    return any(map(is_unit, model.modules()))


def tensor_parallel_size(model: nn.Module) -> int:
    """Return among how many processes tensor parallelism divides the layers of a model; 1: among none."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    named = max(vars(module).get("_tp_size") or 1 for module in model.modules())
    if named > 1 or is_sharded(model):
        return named
    return max((each.device_mesh.size() for each in model.parameters() if isinstance(each, DTensor)), default=1)


def _closure_of(module: nn.Module) -> Mapping[str, Any]:
    """Return what transformers has bound to the forward of a divided module: `self`, its style, and `mesh`."""
    forward = vars(module).get("forward")
    if not isinstance(forward, FunctionType) or forward.__name__ != "tp_forward":
        return {}
    return inspect.getclosurevars(forward).nonlocals


@dataclass(frozen=True)
class LayerDivision:
    """How tensor parallelism divides a linear layer: each process reads, or returns, some of the features."""

    mesh: DeviceMesh  # the processes
    placement: Placement  # of the weight [out, in] among them
    of_inputs: bool  # whether it reads a part of the features, or returns one

    @classmethod
    def of(cls, layer: nn.Module) -> LayerDivision | None:
        """Return the division of a layer; None: it reads and returns all features."""
        if not (held := _closure_of(layer)):
            return None
        style, weight = held["self"], layer.get_parameter("weight")
        if not isinstance(weight, DTensor):  # nor could gradients
            raise ValueError(f"tensor parallelism by {type(style).__name__}: adapters cannot follow it")
        [placement] = weight.placements
        of_inputs = placement.is_shard(1)
        outside = getattr(style, "input_layouts" if of_inputs else "output_layouts", Shard(-1))
        return None if outside == Replicate() else cls(held["mesh"], placement, of_inputs)

    def product(self, x: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """Return B (A x) as the layer returns its features; gradients of A [r, in] and B [out, r] are whole."""
        if self.of_inputs:
            return linear(self.summed(linear(x, self.share(down))), up)
        low = self._replicated(linear(x, down)).to_local(grad_placements=[Partial()])
        return linear(low, self.share(up))

    def share(self, weight: Tensor) -> Tensor:
        """Return this process's share of a weight of the layer's features."""
        return self._replicated(weight).redistribute(placements=[self.placement]).to_local()

    def summed(self, parts: Tensor) -> Tensor:
        """Return the sum of what all processes have."""
        return DTensor.from_local(parts, self.mesh, [Partial()], run_check=False).full_tensor()

    def _replicated(self, tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, self.mesh, [Replicate()], run_check=False)


def whole_copy(part: nn.Module) -> nn.Module:
    """Return a copy of a part of a model that each process holds and runs whole, though the model may be divided."""
    shares = ((id(each), each) for each in part.parameters() if isinstance(each, DTensor))
    whole = {key: nn.Parameter(_whole(each.detach()), each.requires_grad) for key, each in shares}
    copied = copy.deepcopy(part, whole)
    for module in filter(_closure_of, copied.modules()):
        del vars(module)["forward"]
    return copied


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_draws(model: nn.Module) -> None:
    """Let all processes that hold parts of a model draw the same random numbers, those of the first."""
    if tensor_parallel_size(model) == 1:
        return
    mesh = next(each.device_mesh for each in model.parameters() if isinstance(each, DTensor))
    source = torch if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)
    state = source.get_rng_state().to(mesh.device_type)
    distributed.broadcast(state, group=mesh.get_group("tp" if mesh.ndim > 1 else None), group_src=0)
    source.set_rng_state(state.cpu())


def check_whole(model: nn.Module, purpose: str) -> None:
    """Refuse a model whose layers tensor parallelism divides among processes."""
    if (size := tensor_parallel_size(model)) > 1:
        raise ValueError(f"{purpose}: {type(model).__name__} has tensor parallelism (tp_size={size}); load it whole")


def holds_shares(model: nn.Module, learn: bool = False) -> bool:
    """Return whether this process has shares of a model's weights, of such as `learn`."""
    return any(isinstance(each, DTensor) and each.requires_grad >= learn for each in model.parameters())


def training_size(model: nn.Module, reader: str) -> int | None:
    """Return among how many processes a model is divided on which something learns, or None: it is whole."""
    if (size := tensor_parallel_size(model)) == 1:
        return None
    if size != (world := distributed.get_world_size()) or getattr(model, "_tp_size", None) != size:
        # nobody would add the gradients of the others
        among = f"{type(model).__name__} has tensor parallelism over tp_size={size} of {world} processes"
        raise ValueError(f"a trainer of {reader}: {among}: load it over all, or whole, with strategy shard_backbone")
    return size


def shard(model: PreTrainedModel, device: torch.device) -> None:
    """Divide the layers of a frozen model among all processes (FSDP2), if it is not; it computes on `device`.

    Embeddings, norms and unembedding, which drafters read, stay whole, and so does what learns within layers.
    """
    if is_sharded(model) or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    check_whole(model, "shard_backbone")
    layers = [module for module in model.modules() if _is_layer(module, model)]
    if not layers:
        raise ValueError(f"shard_backbone: {type(model).__name__} does not name its layers (_no_split_modules)")
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    learning = {each for each in model.parameters() if each.requires_grad}
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=learning)
    whole = {each for each in model.parameters() if not isinstance(each, DTensor)}
    for tensor in [*whole, *model.buffers()]:
        tensor.data = tensor.data.to(device)
    _make_root(fully_shard(model, mesh=mesh, ignored_params=whole))  # so that each layer is gathered before its turn


def load_sharded(
    name: str | PathLike, load: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_pretrained, **options: Any
) -> PreTrainedModel:
    """Load a frozen causal language model whose layers are divided among all processes: none ever holds it whole.

    Embeddings, norm and unembedding, which drafters read, are whole. Options are those of `from_pretrained`.
    """
    world = distributed.get_world_size() if distributed.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        options["distributed_config"] = DistributedConfig(fsdp_size=world)
    model = load(name, **options).requires_grad_(False)
    for unit in model.modules():
        if isinstance(unit, FSDPModule) and not _is_layer(unit, model):
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
    if isinstance(model, FSDPModule):
        _make_root(model)
    return model


def _is_layer(module: nn.Module, model: PreTrainedModel) -> bool:
    return type(module).__name__.removeprefix("FSDP") in (model._no_split_modules or ())


def _make_root(model: FSDPModule) -> None:  # drafters call a model without its head, or a layer of it, first
    model._get_fsdp_state()._lazy_init()


@contextmanager
def shares_hidden(model: nn.Module) -> Iterator[None]:
    """Take the shares of processes out of a model, which have no gradients: DDP keeps in step what is whole alone."""
    held = {module: module._parameters for module in model.modules() if holds_shares(module)}
    try:
        for module, every in held.items():
            shares = {name: each for name, each in every.items() if isinstance(each, DTensor)}
            module._parameters = {name: each for name, each in every.items() if name not in shares}
            vars(module).update(shares)  # FSDP2 reads them
        yield
    finally:
        for module, every in held.items():
            for name, each in every.items():
                if isinstance(each, DTensor):
                    vars(module).pop(name, None)
            module._parameters = every | module._parameters  # in the order before


def gathered_state(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the tensors of a model that processes share, whole; None: each process has a whole model."""
    shared = holds_shares(model)
    return {name: _whole(each).cpu() for name, each in model.state_dict().items()} if shared else None


def gather(modules: Iterable[object]) -> None:
    """Gather the parameters of FSDP2 units; they are sharded again in backward."""
    for module in modules:
        if isinstance(module, FSDPModule):
            module.unshard()


@contextmanager
def readable(model: PreTrainedModel) -> Iterator[None]:
    """Keep gathered, between forwards, what drafters read of a model that FSDP2 shards; all processes must do so."""
    parts = dict.fromkeys([model, model.base_model, model.get_input_embeddings(), model.get_output_embeddings()])
    shared = [part for part in parts if part is not None and holds_shares(part)]  # not what is whole anyway
    units = [part for part in shared if isinstance(part, FSDPModule)]
    gather(units)
    handle = model.register_forward_hook(lambda *_: gather(units)) if units else None  # after the hook that shards
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        for unit in units:
            unit.reshard()


def call(module: nn.Module, *args: object) -> Any:
    """Return `module(*args)`; of an FSDP2 unit without its hooks.

    They would take a backward of a chunk of the loss, amid the forward, for the end of the unit's own.
    """
    if not is_unit(module):
        return module(*args)
    gather([module])
    return module.forward(*args)


def call_frozen(unit: nn.Module, *args: object) -> Tensor:
    """Return `call` of a unit; gradients reach the arguments but no parameter."""
    gather([unit])
    with parameters_frozen(unit):
        return unit.forward(*args)


@contextmanager
def parameters_frozen(module: nn.Module) -> Iterator[None]:
    """Let no parameter of a module require a gradient."""
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
