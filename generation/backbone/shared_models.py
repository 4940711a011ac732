"""Models that several processes share: FSDP2 shards their weights, or tensor parallelism divides their layers."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig


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


def bind_forwards(copied: nn.Module) -> None:
    """Let a copy of a divided model run its own layers: a copied forward is that of the original."""
    for module in copied.modules():
        if held := _closure_of(module):
            del vars(module)["forward"]
            if "self" in held:  # else it adds gradients of a norm up, of which a frozen one has none
                held["self"].install_forward(module, held["mesh"])


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
        if not isinstance(weight, DTensor):
            raise ValueError(
                f"tensor parallelism by {type(style).__name__}: adapters cannot follow it"
            )  # nor gradients
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
        raise ValueError(f"{purpose}: {type(model).__name__} is divided among tp_size={size} processes; load it whole")


def holds_shares(model: nn.Module, learn: bool = False) -> bool:
    """Return whether this process has shares of a model's weights, of such as `learn`."""
    return any(isinstance(each, DTensor) and each.requires_grad >= learn for each in model.parameters())


def training_size(model: nn.Module, reader: str) -> int | None:
    """Return among how many processes a model is divided on which something learns, or None: it is whole."""
    if (size := tensor_parallel_size(model)) == 1:
        return None
    if size != (world := distributed.get_world_size()) or getattr(model, "_tp_size", None) != size:
        # nobody would add the gradients of the others
        among = f"{type(model).__name__} is divided among tp_size={size} of {world} processes"
        raise ValueError(f"a trainer of {reader}: {among}: load it over all of them (tp_plan='auto'), or whole")
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

    Each process reads its own shares of the files. Embeddings, norm and unembedding, which drafters read, are whole.
    Options are those of `from_pretrained`.
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


def _make_root(model: FSDPModule) -> None:
    """Name the outermost unit now: drafters call a model without its head, or a layer of it, first."""
    model._get_fsdp_state()._lazy_init()


@contextmanager
def shares_hidden(model: nn.Module) -> Iterator[None]:
    """Take the shares of processes out of a model, which have no gradients: DDP keeps in step what is whole alone."""
    held = {module: module._parameters for module in model.modules()}
    try:
        for module, every in held.items():
            shares = {name: each for name, each in every.items() if isinstance(each, DTensor)}
            module._parameters = {name: each for name, each in every.items() if name not in shares}
            vars(module).update(shares)  # FSDP2 reads them
        yield
    finally:
        for module, every in held.items():
            for name in every.keys() - module._parameters.keys():
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
