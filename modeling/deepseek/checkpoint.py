"""Modules and main model in one ordinary checkpoint directory: how both are built, loaded and named there.

A directory holds module k as if it were layer L + k of the main model. So the main model's own class, given that many
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
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ...configuration.mimo import MiMoConfig
from ...configuration.mtp_families import MTPFamily, count_modules, family_of, num_layers, set_modules
from ..loading import StrictLoadingMixin
from .bodies import new_body
from .checkpoint_files import COPIES, weight_files
from .float8 import dequantized_tensors
from .mimo import MiMoForCausalLM
from .modules import MTPModule, MTPModules, layer_kind

PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers")
"""Fields of configurations that hold one entry for each layer."""
# not looked up in transformers, because code that travels registers nothing there
_OWN_CLASSES = {MiMoConfig.model_type: MiMoForCausalLM}
_PARTS = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}


def main_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """transformers' own class for a configuration, or ours for a family that transformers does not know."""
    return _OWN_CLASSES.get(config.model_type) or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the language model alone, where transformers' class for text takes no other."""
    nested = config.sub_configs.get("text_config")
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    is_text_only = type(config) in mapping and mapping[type(config)].config_class is nested
    return config.get_text_config() if nested is not None and is_text_only else config


def module_kinds(config: PreTrainedConfig, name: str, count: int) -> list[str]:
    """What the per-layer field `name` of a configuration would say of `count` modules."""
    own = getattr(config, f"mtp_{name}", None) or [dict(family_of(config).block).get(name, getattr(config, name)[-1])]
    return [*own, *own[-1:] * count][:count]


def extended_config(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """A copy of the configuration with `count` more layers, of the modules' kind."""
    config = copy.deepcopy(config)
    if family_of(config).body != "layer":
        return config
    for name in PER_LAYER:
        if values := getattr(config, name, None):
            setattr(config, name, [*values, *module_kinds(config, name, count)])
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
            if family.body != "layer":
                decoder.layers.extend([new_body(decoder.layers, config) for _ in range(count)])
            for layer in decoder.layers[len(decoder.layers) - count :]:
                _attach_parts(layer, final_norm(decoder), config.hidden_size, family.norm_before_head)
            if count:
                self.init_weights()  # only what was not there the first time

    # transformers looks up conversions by class and module name
    Extended.__name__, Extended.__qualname__, Extended.__module__ = (
        original.__name__,
        original.__qualname__,
        original.__module__,
    )
    return Extended


def final_norm(decoder: nn.Module) -> nn.Module:
    """The norm behind the main model's last layer."""
    return decoder.norm if hasattr(decoder, "norm") else decoder.norm_f


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
    config, decoder, plain_class = model.config, model.get_decoder(), main_class(model.config)
    family, kept = family_of(config), len(decoder.layers) - count
    modules = [_module_of(layer, family) for layer in decoder.layers[kept:]]
    kinds = [layer_kind(config, kept + k) if family.body == "layer" else "full_attention" for k in range(count)]
    del decoder.layers[kept:]
    if family.body == "layer":
        for name in PER_LAYER:
            if values := getattr(config, name, None):
                setattr(config, name, values[:kept])
        config.num_hidden_layers = kept
    set_modules(config, count)
    model.__class__ = plain_class
    vars(model).pop("_weight_conversions", None)  # of this file, perhaps quantised; saving uses those of the class
    model._keys_to_ignore_on_load_unexpected = set(type(model)._keys_to_ignore_on_load_unexpected or [])
    return model, MTPModules(modules, config, getattr(decoder, "rotary_emb", None), kinds)


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
        name: Directory or Hub repository, or None with `state_dict` among the options.
        config: Its configuration.
        inference_only: Leave the modules out.
        options: As for `PreTrainedModel.from_pretrained`.

    Returns:
        The main model, the modules (none with `inference_only`), and transformers' report on the loading.

    Raises:
        ValueError: Missing tensors, wrong shapes, a damaged file.
    """
    family, layers, stored = family_of(config), num_layers(config), count_modules(config)
    count = 0 if inference_only else stored
    patterns = _ignored(config, stored, inference_only)
    model, report = extended_class(config, count, patterns).from_pretrained(
        name,
        config=extended_config(config, count),
        key_mapping=family.renames(layers, count) or None,
        output_loading_info=True,
        **options,
    )
    _align(model)
    return *split(model, count), report


def _align(model: PreTrainedModel, bytes_: int = 64, largest: int = 2**18) -> None:
    """Copies small weights that lie anyhow in a mapped file: kernels round by alignment, two files would differ."""
    for weight in model.parameters():
        if weight.device.type == "cpu" and weight.data_ptr() % bytes_ and weight.numel() < largest:
            weight.data = weight.data.clone()


def _ignored(config: PreTrainedConfig, stored: int, inference_only: bool) -> list[str]:
    """Patterns of tensors that are left in the files: copies, other towers and, where not wanted, all modules."""
    family, layers = family_of(config), num_layers(config)
    theirs = [prefix for k in range(max(stored, 1)) for prefix in family.prefixes(layers, k)]
    own = main_class(config)._keys_to_ignore_on_load_unexpected or []
    others = [pattern for pattern in own if not any(re.search(pattern, prefix) for prefix in theirs)]
    if inference_only:
        return others + ["^" + re.escape(prefix) for prefix in theirs]
    copies = "|".join(re.escape(name) for name in family.copies)
    return others + ([rf"^model\.layers\.\d+\.({copies})$"] if copies else [])


def load_dequantized(
    name: Any, config: PreTrainedConfig, inference_only: bool, hub: dict[str, Any], **options: Any
) -> tuple[PreTrainedModel, MTPModules, dict]:
    """As `load`, from float8 weights that are multiplied by their scales first.

    Args:
        name: Directory or Hub repository.
        config: Its configuration.
        inference_only: Leave the modules out.
        hub: `revision`, `token`, ...
        options: As for `PreTrainedModel.from_pretrained`.
    """
    asked = options.pop("dtype", None)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    dtype = asked if isinstance(asked, torch.dtype) else getattr(torch, str(asked), stored)
    tensors = dequantized_tensors(weight_files(name, options.pop("variant", None), **hub), config, dtype)
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


def official_device_map(devices: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """The reverse of `own_device_map`; a map that has the directory's names already stays as it is.

    Args:
        devices: Devices by beginnings of names, as accelerate infers them from a `DeepSeekMTP`, or as `hf_device_map`
            has them. `"main"` and `"mtp"` stand for all parts that have no entry of their own.
        config: The main model's configuration.
    """
    layers, found = num_layers(config), {}
    modules = [f"model.layers.{layers + k}" for k in range(count_modules(config))]
    for name, device in devices.items():
        part, _, rest = name.partition(".")
        index, _, inner = rest.partition(".")
        if part == "mtp" and not rest:
            found |= dict.fromkeys(modules, device)
        elif part == "mtp" and index.isdigit():
            found[f"{modules[int(index)]}.{_inner_name(inner)}".rstrip(".")] = device
        elif part != "mtp":
            found[rest if part == "main" else name] = device
    return found


def _inner_name(inner: str) -> str:
    part, _, rest = inner.partition(".")
    return rest if part == "block" else ".".join(filter(None, (_PARTS.get(part, part), rest)))


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
