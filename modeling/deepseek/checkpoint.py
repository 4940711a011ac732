"""Modules and main model in one ordinary checkpoint folder: how both are built, loaded and named there.

A folder holds module k as if it were layer L + k of the main model. So the main model's own class, given that many
layers and the few parts that a plain layer lacks, loads everything at once, with all that transformers knows about
fused experts, quantised weights, shards, dtypes and devices. The extra layers are then taken out of it again.
"""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ...configuration.mtp_families import COUNT, MTPFamily, count_modules, family_of
from ..loading import StrictLoadingMixin
from .checkpoint_files import COPIES, weight_files
from .float8 import dequantized_tensors
from .modules import MTPModule, MTPModules

_PER_LAYER = ("layer_types", "mlp_layer_types")
_PARTS = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}


def main_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """transformers' own class for a configuration.

    Raises:
        ValueError: A class whose layers keep a recurrent state.
    """
    found = AutoModelForCausalLM._model_mapping[type(config)]
    if getattr(found, "_is_stateful", False):
        raise ValueError(f"DeepSeekMTP does not support {found.__name__}: its layers keep a recurrent state")
    return found


def extended_config(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """A copy of the configuration with `count` more layers, each like the last one."""
    config = copy.deepcopy(config)
    for name in _PER_LAYER:
        if values := getattr(config, name, None):
            setattr(config, name, [*values, *values[-1:] * count])
    config.num_hidden_layers += count
    return config


def extended_class(config: PreTrainedConfig, count: int, ignored: list[str]) -> type[PreTrainedModel]:
    """The main model's class, whose last `count` layers also have the parts of a module.

    Args:
        config: The main model's configuration, not extended.
        count: Modules to be built; 0 for the main model alone.
        ignored: Patterns of tensors that a checkpoint may hold besides.
    """
    original, family = main_class(config), family_of(config)

    class Extended(StrictLoadingMixin, original):
        _keys_to_ignore_on_load_unexpected = ignored

        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            decoder = self.get_decoder()
            for layer in decoder.layers[len(decoder.layers) - count :]:
                _attach_parts(layer, decoder.norm, config.hidden_size, family.norm_before_head)
            if count:
                self.init_weights()  # only what was not there the first time

    # transformers looks up conversions by class and module name
    Extended.__name__, Extended.__qualname__, Extended.__module__ = (
        original.__name__,
        original.__qualname__,
        original.__module__,
    )
    return Extended


def _attach_parts(layer: nn.Module, norm: nn.Module, hidden_size: int, norm_before_head: bool) -> None:
    """Gives a decoder layer the parts of a module, under DeepSeek-V3's names."""
    layer.enorm, layer.hnorm = _fresh(norm), _fresh(norm)
    layer.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
    if norm_before_head:
        layer.shared_head = nn.Module()
        layer.shared_head.norm = _fresh(norm)


def _fresh(norm: nn.Module) -> nn.Module:
    """A norm of the same class that is yet to be initialised."""
    norm = copy.deepcopy(norm)
    for owner in (norm, *norm.parameters()):
        if hasattr(owner, "_is_hf_initialized"):
            del owner._is_hf_initialized
    return norm


def split(model: PreTrainedModel, count: int) -> tuple[PreTrainedModel, MTPModules]:
    """Takes the last `count` layers out of an extended model, which becomes a plain one of transformers' class.

    Returns:
        The main model, and the modules.
    """
    config, decoder = model.config, model.get_decoder()
    family, kept = family_of(config), len(decoder.layers) - count
    modules = [_module_of(layer, family) for layer in decoder.layers[kept:]]
    del decoder.layers[kept:]
    for name in _PER_LAYER:
        if values := getattr(config, name, None):
            setattr(config, name, values[:kept])
    config.num_hidden_layers = kept
    setattr(config, COUNT, count)
    model.__class__ = type(model).__mro__[2]  # behind `Extended` and `StrictLoadingMixin`
    vars(model).pop("_weight_conversions", None)  # of this file, perhaps quantised; saving uses those of the class
    model._keys_to_ignore_on_load_unexpected = set(type(model)._keys_to_ignore_on_load_unexpected or [])
    return model, MTPModules(modules, config, decoder.rotary_emb)


def _module_of(layer: nn.Module, family: MTPFamily) -> MTPModule:
    norm = layer.shared_head.norm if family.norm_before_head else nn.Identity()
    module = MTPModule(layer.enorm, layer.hnorm, layer.eh_proj, layer, norm, family.embedding_first)
    for name in ("enorm", "hnorm", "eh_proj", "shared_head"):
        if hasattr(layer, name):
            delattr(layer, name)
    return module


def build(config: PreTrainedConfig) -> tuple[PreTrainedModel, MTPModules]:
    """Main model and modules with fresh weights."""
    count = count_modules(config)
    model = extended_class(config, count, [])(extended_config(config, count))
    return split(model, count)


def load(
    name: Any, config: PreTrainedConfig, inference_only: bool, **options: Any
) -> tuple[PreTrainedModel, MTPModules, dict]:
    """Main model and modules from a checkpoint.

    Args:
        name: Folder or Hub repository, or None with `state_dict` among the options.
        config: Its configuration.
        inference_only: Leave the modules out.
        options: As for `PreTrainedModel.from_pretrained`.

    Returns:
        The main model, the modules (none with `inference_only`), and transformers' report on the loading.

    Raises:
        ValueError: Missing tensors, wrong shapes, a damaged file.
    """
    family, layers, stored = family_of(config), config.num_hidden_layers, count_modules(config)
    count = 0 if inference_only else stored
    patterns = ["^" + re.escape(prefix) for k in range(stored) for prefix in family.prefixes(layers, k)]
    if not inference_only:
        patterns = [rf"^model\.layers\.\d+\.({'|'.join(map(re.escape, COPIES))})$"]
    model, report = extended_class(config, count, patterns).from_pretrained(
        name,
        config=extended_config(config, count),
        key_mapping=family.renames(layers, count) or None,
        output_loading_info=True,
        **options,
    )
    return *split(model, count), report


def load_dequantized(
    name: Any, config: PreTrainedConfig, inference_only: bool, hub: dict[str, Any], **options: Any
) -> tuple[PreTrainedModel, MTPModules, dict]:
    """As `load`, from float8 weights that are multiplied by their scales first.

    Args:
        name: Folder or Hub repository.
        config: Its configuration.
        inference_only: Leave the modules out.
        hub: `revision`, `token`, ...
        options: As for `PreTrainedModel.from_pretrained`.
    """
    asked = options.pop("dtype", None)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    dtype = asked if isinstance(asked, torch.dtype) else getattr(torch, str(asked), stored)
    tensors = dequantized_tensors(weight_files(name, **hub), config, dtype)
    config = copy.deepcopy(config)
    del config.quantization_config
    options = {key: value for key, value in options.items() if key not in {*hub, "quantization_config"}}
    main, modules, report = load(None, config, inference_only, state_dict=tensors, dtype=dtype, **options)
    main.config.name_or_path = str(name)
    with suppress(OSError):
        main.generation_config = GenerationConfig.from_pretrained(name, **hub)
    return main, modules, report


def official_names(state: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """Renames the tensors of a `DeepSeekMTP` as DeepSeek-V3 does, L = `num_layers`."""
    return {_official_name(name, num_layers): tensor for name, tensor in state.items()}


def own_names(state: dict[str, torch.Tensor], num_layers: int) -> dict[str, torch.Tensor]:
    """The reverse of `official_names`; copies of embeddings and head are left out."""
    kept = {name: tensor for name, tensor in state.items() if not name.endswith(COPIES) or name.count(".") < 4}
    return {_own_name(name, num_layers): tensor for name, tensor in kept.items()}


def own_device_map(devices: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """A device map of the model that was loaded at once, by the names of a `DeepSeekMTP`."""
    return {_own_name(f"{name}.", num_layers).strip(".") if name else "": devices[name] for name in devices}


def _official_name(name: str, num_layers: int) -> str:
    if name.startswith("main."):
        return name.removeprefix("main.")
    _, index, part, rest = name.split(".", 3)
    part = "" if part == "block" else _PARTS[part] + "."
    return f"model.layers.{num_layers + int(index)}.{part}{rest}"


def _own_name(name: str, num_layers: int) -> str:
    match = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    if match is None or int(match[1]) < num_layers:
        return f"main.{name}"
    for part, official in _PARTS.items():
        if match[2].startswith(official + "."):
            return f"mtp.{int(match[1]) - num_layers}.{part}{match[2].removeprefix(official)}"
    return f"mtp.{int(match[1]) - num_layers}.block.{match[2]}"
