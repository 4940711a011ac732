"""Building and loading a main model with its modules from one ordinary checkpoint.

A checkpoint holds module k as layer L + k of the main model. So the main model's own class, extended by these layers
and the few parts that a plain layer lacks, loads everything at once, with all that transformers knows about fused
experts, quantised weights, shards, dtypes and devices. Afterwards the extra layers are taken out again (`split`).

Before it, headers are checked for what transformers would load wrongly without a warning. Float8 is dequantised here,
since transformers misreads or refuses a matrix that ends within a block, and cannot save the model afterwards.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
)

from ...configuration.fields import field
from ...configuration.mtp_families import (
    SAME,
    MiMoConfig,
    MTPFamily,
    announced_modules,
    check_fields_of_modules,
    count_modules,
    family_of,
    num_layers,
    set_modules,
)
from ...generation.backbone.wrapped_models import Kwargs, untyped
from ...generation.tensors.tensor_files import Names, Tensors, read_tensors, renamed, tensor_dtypes, weight_files
from ..common.backbone_parts import final_norm, layer_kind
from ..common.loading import StrictLoadingMixin
from .modules import MTPModule, MTPModules, OneStream, StreamHead, StreamProjection, last_map

SCALES = ("weight_scale_inv", "weight_scale", "scale")  # suffixes of tensors that may hold a weight's scales
_BLOCK = (128, 128)


def check_checkpoint(
    name: str | PathLike, config: PreTrainedConfig, inference_only: bool = False, variant: str | None = None, **hub: Any
) -> tuple[PreTrainedConfig, bool]:
    """Return the configuration to load with, and whether modules repeat the main model's embeddings and head."""
    family, wanted, layers = family_of(config), announced_modules(config), num_layers(config)
    dtypes = tensor_dtypes(name, variant, **hub)
    # float8 codes without scales would load as weights that are hundreds of times too large
    codes = [key for key, each in dtypes.items() if each.startswith(("F8_E4M3", "F8_E5M2")) and key.endswith(".weight")]
    if codes and field(config, "quantization_config") is None:
        raise ValueError(f"{name}: {codes[0]} is stored as float8, but config.json has no quantization_config")
    stems = [key.removesuffix("weight") for key in codes]
    if bare := [stem for stem in stems if not any(stem + scale in dtypes for scale in SCALES)]:
        raise ValueError(f"{name}: {len(bare)} float8 weights lack scales, such as {bare[0]}weight_scale_inv")
    if inference_only:
        return config, False
    stored = 0
    while (ours := tuple(family.prefixes(layers, stored))) and any(key.startswith(ours) for key in dtypes):
        stored += 1
    if not stored:
        raise ValueError(
            f"{name}: no tensors of modules ({ours[0]}*): see modules=, inference_only=True, from_backbone"
        )
    if wanted is None:  # as in official files of some families
        config = copy.deepcopy(config)
        set_modules(config, stored)
    elif stored != wanted:
        raise ValueError(f"{name}: config.json has {family.count}={wanted}, but the checkpoint has {stored} modules")
    copies = [family.file_name(f"{family.stem}.layers.{layers}.{each}", layers, stored) for each in family.copies]
    return _spare_projection(config, dtypes), bool(copies) and dtypes.keys() >= {*copies}


def _spare_projection(config: PreTrainedConfig, dtypes: dict[str, str]) -> PreTrainedConfig:
    """Exclude `eh_proj` from transformers' FP8 quantizer where the file has it unquantised (DeepSeek's)."""
    quantization = field(config, "quantization_config")
    ends = "eh_proj.weight", ".e_proj.weight", ".h_proj.weight"
    plain = all(not dtype.startswith("F8") for key, dtype in dtypes.items() if key.endswith(ends))
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "fp8" or not plain:
        return config
    config = copy.deepcopy(config)
    spared = quantization.get("modules_to_not_convert") or ["lm_head"]  # transformers' default
    config.quantization_config = quantization | {"modules_to_not_convert": [*spared, "eh_proj"]}
    return config


def is_to_be_dequantized(config: PreTrainedConfig, requested: object = None) -> bool:
    """Return whether float8 weights are dequantised at loading: where `requested`, or without a GPU for float8."""
    if _option(field(config, "quantization_config"), "quant_method") != "fp8":
        return False
    capable = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    return not capable or bool(_option(requested, "dequantize"))


def dequantize(codes: Tensor, scales: Tensor, block: tuple[int, int] = _BLOCK) -> Tensor:
    """Return codes [M, N] times the scale of their block, in float32.

    Scales are [ceil(M / block[0]), ceil(N / block[1])], or one number; uint8 ones are exponents biased by 127.
    """
    factors = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    if factors.numel() == 1:
        return codes.float() * factors.reshape(())
    wanted = tuple(-(-size // step) for size, step in zip(codes.shape, block))
    if tuple(factors.shape) != wanted:
        shape, actual = tuple(codes.shape), tuple(factors.shape)
        raise ValueError(f"a float8 weight {shape} in blocks of {tuple(block)} needs scales {wanted}, not {actual}")
    for dim, step in enumerate(block):
        factors = factors.repeat_interleave(step, dim).narrow(dim, 0, codes.shape[dim])
    return codes.float() * factors


def _option(quantization: object, name: str) -> Any:
    return quantization.get(name) if isinstance(quantization, dict) else getattr(quantization, name, None)


PER_LAYER = "layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers", "swiglu_limits", "swiglu_limits_shared"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The main model of MiMo-7B: Qwen2's network under the name that its checkpoints, vLLM and SGLang use."""

    config: MiMoConfig
    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected = [r"^model\.mtp_layers\."]


DeviceMap = dict[str, int | str | torch.device]  # by prefixes of names, as accelerate has them


class StackBody(nn.Module):
    """Several layers of the model in sequence (Nemotron-H: attention, then experts), called as one."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(layers)

    def forward(self, hidden_states: Tensor, **options: object) -> Tensor:
        for layer in self.parts:
            hidden_states = layer(hidden_states, **options)
        return hidden_states


class LatentBody(nn.Module):
    """New objects of one latent attention and one dense MLP with their norms; LongCat's own layers hold two of each."""

    def __init__(self, layer: Any, config: PreTrainedConfig) -> None:
        super().__init__()
        norm, size, eps = type(layer.input_layernorm[0]), config.hidden_size, config.rms_norm_eps
        self.self_attn: nn.Module = type(layer.self_attn[0])(config=config, layer_idx=0)
        self.mlp: nn.Module = type(layer.mlps[0])(config)
        self.input_layernorm: nn.Module = norm(size, eps=eps)
        self.post_attention_layernorm: nn.Module = norm(size, eps=eps)

    def forward(self, hidden_states: Tensor, **options: object) -> Tensor:
        attended, *_ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **options)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def new_body(layers: nn.ModuleList, config: PreTrainedConfig) -> nn.Module:
    """Return a module's body with new weights, made of the classes of the model's layers (not for `body="layer"`)."""
    if family_of(config).body == "latent":
        return LatentBody(layers[-1], config)
    own = copy.deepcopy(config)
    own.layers_block_type = config.mtp_layers_block_type
    make: Callable[..., nn.Module] = type(layers[-1])
    parts = [make(own, layer_idx=index) for index in range(len(own.layers_block_type))]
    body = StackBody(parts)
    for module in body.modules():
        if vars(module).get("config") is own:
            vars(module)["config"] = config  # which holds the attention implementation, now and when it is changed
    return body


def main_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class for a configuration, or ours for a family that transformers does not know."""
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if config.get_text_config() is not config and type(config) in whole:
        return whole[type(config)]
    if config.model_type == MiMoConfig.model_type:  # bundled code registers nothing with the Auto classes
        return MiMoForCausalLM
    return untyped(MODEL_FOR_CAUSAL_LM_MAPPING)[type(config)]


def module_kinds(config: PreTrainedConfig, name: str, count: int) -> Sequence[object]:
    """Return the values of the per-layer field `name` of a configuration for `count` modules."""
    kind, text = dict(family_of(config).block).get(name), config.get_text_config()
    of_layers = field(text, name)
    own = field(text, f"mtp_{name}") or [of_layers[-1] if kind is None else kind]
    own = of_layers[:count] if own == [SAME] else own
    return [*own, *own[-1:] * count][:count]


def extended_config(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Return a copy of the configuration with `count` more layers of the modules' kind."""
    config = copy.deepcopy(config)
    text: Any = config.get_text_config()
    if family_of(config).body != "layer":
        return config
    for name in PER_LAYER:
        if values := field(text, name):
            setattr(text, name, [*values, *module_kinds(config, name, count)])
    size = text.num_hidden_layers
    text.num_hidden_layers += count
    if text.is_heterogeneous:
        layers = _overrides(text)
        likes = {index: text.layer_types.index(text.layer_types[index]) for index in range(size, size + count)}
        text.per_layer_config = layers | {index: layers[like] for index, like in likes.items() if like in layers}
    return config


def _overrides(config: PreTrainedConfig) -> dict[int, dict[str, object]]:
    """Return the fields of single layers that differ from the configuration's own."""
    return {int(index): dict(own) for index, own in config.to_dict()["per_layer_config"].items()}


def extended_class(config: PreTrainedConfig, count: int, ignored: list[str]) -> type[PreTrainedModel]:
    """Return a subclass of the main model's class whose last `count` layers also have the parts of a module.

    `config` is not extended; `ignored` are patterns of further tensors that a checkpoint may hold.
    """
    original: Any = main_class(config)
    family = family_of(config)

    class Extended(StrictLoadingMixin, original):
        _keys_to_ignore_on_load_unexpected = ignored

        def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            layers, text = decoder_layers(self), config.get_text_config()
            if family.body != "layer":
                layers.extend([new_body(layers, text) for _ in range(count)])
            for layer in layers[len(layers) - count :]:
                _attach_parts(layer, self.get_decoder(), text, family)
                if family.rotates:
                    rotate_all(layer)
                if family.scales_nothing:  # as transformers' class does with a window
                    vars(layer.get_submodule("self_attn"))["is_sliding"] = True
            if family.shares_norm and family.norm_before_head:
                for layer in layers[len(layers) - count : -1]:
                    del layer.shared_head
            if count:
                self.init_weights()  # initialises the added parts only

    # transformers looks up conversions by class and module name
    Extended.__name__, Extended.__module__ = original.__name__, original.__module__
    Extended.__qualname__ = original.__qualname__
    return Extended


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder layers of a main model."""
    return cast(nn.ModuleList, model.get_decoder().get_submodule("layers"))


def new_chain(model: PreTrainedModel, modules: list[MTPModule], kinds: list[str]) -> MTPModules:
    """Return the modules of a main model, of these kinds of attention."""
    rotary = dict(model.get_decoder().named_children()).get("rotary_emb")
    return MTPModules(modules, model.config.get_text_config(), rotary, kinds)


def _attach_parts(layer: nn.Module, decoder: nn.Module, config: PreTrainedConfig, family: MTPFamily) -> None:
    """Give a decoder layer the parts of a module, under DeepSeek-V3's names; `config` is that of the text."""
    size, last = config.hidden_size, last_map(decoder, family)
    if family.streams:
        head: dict[str, nn.Module] = {"mixer": fresh_norm(last)}
        if (streams := field(config, "hc_mult")) is None:  # all streams have one norm
            make: Callable[..., nn.Module] = type(last.get_submodule("hc_norm"))
            norms = [make(width, eps=config.rms_norm_eps) for width in (size, config.hc_count * size)]
        else:
            *norms, out_norm = (fresh_norm(final_norm(decoder)) for _ in range(3))
            head = {"mixer": StreamHead(head["mixer"], out_norm, streams)}
        layer.enorm, layer.hnorm = norms
        layer.eh_proj = StreamProjection(size)
    else:
        head = {"norm": fresh_norm(last)} if family.norm_before_head else {}
        layer.enorm, layer.hnorm = fresh_norm(last), fresh_norm(last)
        layer.eh_proj = nn.Linear(2 * size, size, bias=False)
    if family.one_stream:
        mixes = field(config, "hc_sinkhorn_iters") is not None
        layer.attn_hc, layer.ffn_hc = OneStream(mixes), OneStream(mixes)
    if family.own_heads:
        head["output"] = nn.Linear(size, config.vocab_size, bias=False)
    if head:
        layer.shared_head = nn.ModuleDict(head)
    if family.own_embeddings:
        layer.embed_tokens = nn.Embedding(config.vocab_size, size)


def rotate_all(layer: nn.Module) -> None:
    """Let a layer of full attention rotate its positions, which transformers' class does where it has no window."""
    attention: Any = layer.get_submodule("self_attn")
    if not attention.is_sliding:
        attention.sliding_window = None


def fresh_norm(norm: nn.Module) -> nn.Module:
    """Return a copy of a norm, or of a mixer of streams, that `init_weights` will initialise."""
    norm = copy.deepcopy(norm)
    for owner in (*norm.modules(), *norm.parameters()):
        vars(owner).pop("_is_hf_initialized", None)
    return norm


def split(model: PreTrainedModel, count: int) -> tuple[PreTrainedModel, MTPModules]:
    """Take the last `count` layers out of an extended model, which becomes a plain one, as modules."""
    config, layers, plain_class = model.config.get_text_config(), decoder_layers(model), main_class(model.config)
    family, size = family_of(model.config), len(layers) - count
    if family.shares_norm and family.norm_before_head:
        for layer in layers[size:-1]:
            layer.shared_head = nn.ModuleDict(dict(layers[-1].get_submodule("shared_head").named_children()))
    modules = [_module_of(layer, family, field(config, "hc_mult", default=0)) for layer in layers[size:]]
    kinds = [layer_kind(config, size + k) if family.body == "layer" else "full_attention" for k in range(count)]
    del layers[size:]
    if family.body == "layer":
        for name in PER_LAYER:
            if values := field(config, name):
                setattr(config, name, values[:size])
        if config.is_heterogeneous:
            config.per_layer_config = {index: own for index, own in _overrides(config).items() if index < size}
        config.num_hidden_layers = size
    set_modules(model.config, count)
    model.__class__ = plain_class
    vars(model).pop("_weight_conversions", None)  # of this file, perhaps quantised; saving uses those of the class
    model._keys_to_ignore_on_load_unexpected = set(type(model)._keys_to_ignore_on_load_unexpected or [])
    return model, new_chain(model, modules, kinds)


def _module_of(layer: nn.Module, family: MTPFamily, streams: int) -> MTPModule:
    held = {name: part for name, part in layer.named_modules() if part is not layer}
    parts = {name: held[name] for name in ("enorm", "hnorm", "eh_proj")}
    norm = held[family.last_part] if family.norm_before_head else nn.Identity()
    module = MTPModule(**parts, block=layer, norm=norm)
    module.head, module.embed_tokens = held.get("shared_head.output"), held.get("embed_tokens")
    module.embedding_first = family.embedding_first
    for name in (*parts, *["shared_head"] * family.norm_before_head, *["embed_tokens"] * family.own_embeddings):
        delattr(layer, name)
    module.streams = 1 if family.one_stream else streams if family.streams else 0
    module.early = family.early or family.unnormed
    return module


def build(config: PreTrainedConfig) -> tuple[PreTrainedModel, MTPModules]:
    """Return a main model and modules with new weights."""
    count = count_modules(config)
    model = extended_class(config, count, [])(extended_config(config, count))
    return split(model, count)


def load(
    name: str | PathLike | None, config: PreTrainedConfig, inference_only: bool, **options: Any
) -> tuple[PreTrainedModel, MTPModules, Kwargs]:
    """Return a main model, its modules (none with `inference_only`) and transformers' loading report.

    `name` is None with `state_dict` among the options of `from_pretrained`.
    """
    family, layers, stored = family_of(config), num_layers(config), count_modules(config)
    count = 0 if inference_only else stored
    extended = extended_class(config, count, _ignored(config, stored, inference_only))
    if isinstance(devices := options.get("device_map"), dict) and len(devices) > 1:
        with torch.device("meta"):
            options["device_map"] = _spread(devices, extended(extended_config(config, count)))
    model, report = untyped(extended).from_pretrained(
        name,
        config=extended_config(config, count),
        key_mapping=family.renames(layers, count) or None,
        output_loading_info=True,
        **options,
    )
    _align(model)
    return *split(model, count), report


def _spread(devices: DeviceMap, model: nn.Module) -> DeviceMap:
    """Return a device map without entries within others, which accelerate cannot offload: children replace them."""
    result = dict(devices)
    for name, module in model.named_modules():
        inside = f"{name}." if name else ""
        if name in result and any(other.startswith(inside) for other in result if other != name):
            device = result.pop(name)
            result = {inside + child: device for child, _ in module.named_children()} | result
    return result


def _align(model: PreTrainedModel) -> None:
    """Copy small unaligned weights of a mapped file: kernels round by alignment, so two files would differ."""
    for weight in model.parameters():
        if weight.device.type == "cpu" and weight.data_ptr() % 64 and weight.numel() < 2**18:
            weight.data = weight.data.clone()


def _ignored(config: PreTrainedConfig, stored: int, inference_only: bool) -> list[str]:
    """Return patterns of tensors that are not loaded: copies, other towers and, with `inference_only`, all modules."""
    family, layers = family_of(config), num_layers(config)
    theirs = [prefix for k in range(max(stored, 1)) for prefix in family.prefixes(layers, k)]
    own = untyped(main_class(config))._keys_to_ignore_on_load_unexpected or []
    others = [pattern for pattern in own if not any(re.search(pattern, prefix) for prefix in theirs)]
    if inference_only:
        return others + ["^" + re.escape(prefix) for prefix in theirs]
    copies = "|".join(re.escape(name) for name in family.copies)
    stem = re.escape(family.stem)
    return others + ([rf"^{stem}\.layers\.\d+\.({copies})$"] if copies else [])


def in_full(tensors: Tensors, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Tensors:
    """Return tensors of a checkpoint, its float8 codes multiplied by their scales."""
    block = _option(field(config, "quantization_config"), "weight_block_size") or _BLOCK
    for key in [key for key, tensor in tensors.items() if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]:
        stem = key.removesuffix("weight")
        scales = next(tensors.pop(stem + suffix) for suffix in SCALES if stem + suffix in tensors)
        tensors[key] = dequantize(tensors[key], scales, block).to(dtype)
    return {key: tensor for key, tensor in tensors.items() if not key.endswith("activation_scale")}


def modules_of(
    base: str | PathLike, name: str | PathLike, config: PreTrainedConfig, ignore_fields: Sequence[str], **hub: Any
) -> tuple[PreTrainedConfig, bool, Tensors]:
    """Return what `check_checkpoint` does of a checkpoint with another one's modules, and their tensors in full."""
    hub = {key: value for key, value in hub.items() if key not in ("revision", "subfolder")}
    check_fields_of_modules(base, PreTrainedConfig.get_config_dict(base, **hub)[0], ignore_fields)
    theirs, shared = check_checkpoint(base, AutoConfig.from_pretrained(base, **hub), **hub)
    family, count = family_of(theirs), count_modules(theirs)
    for what in ("model_type", "hidden_size", "vocab_size", family.layers):
        if (own := field(config.get_text_config(), what)) != (other := field(theirs.get_text_config(), what)):
            raise ValueError(f"modules={base}: it has {what}={other!r}, and {name} has {own!r}")
    for owner, each in ((base, theirs), (name, config)):
        if (method := _option(field(each, "quantization_config"), "quant_method")) not in (None, "fp8"):
            raise ValueError(f"modules={base}: {owner} is quantised ({method}), and neither full precision nor float8")
    config, tensors, files = copy.deepcopy(config), Tensors(), weight_files(base, **hub)
    set_modules(config, count, theirs)
    for prefix in (each for k in range(count) for each in family.prefixes(num_layers(theirs), k)):
        tensors |= {prefix + key: tensor for key, tensor in read_tensors(files, prefix).items()}
    return config, shared, in_full(tensors, theirs)


def load_dequantized(
    name: str | PathLike, config: PreTrainedConfig, inference_only: bool, hub: Kwargs, others: Tensors, **options: Any
) -> tuple[PreTrainedModel, MTPModules, Kwargs]:
    """Load as `load` does, with `others`, from float8 times its scales where it is so; `hub` has `revision`, ..."""
    wanted = options.pop("dtype", None)
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    dtype = wanted if isinstance(wanted, torch.dtype) else vars(torch).get(str(wanted), stored)
    tensors = in_full(read_tensors(weight_files(name, options.pop("variant", None), **hub)), config, dtype) | others
    config = copy.deepcopy(config)
    unread = {*hub} if vars(config).pop("quantization_config", None) is None else {*hub, "quantization_config"}
    options = {key: value for key, value in options.items() if key not in unread}
    main, modules, report = load(None, config, inference_only, state_dict=tensors, dtype=dtype, **options)
    main.config.name_or_path = str(name)
    with suppress(OSError):
        main.generation_config = GenerationConfig.from_pretrained(name, **hub)
    return main, modules, report


_PARTS = {"enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "eh_proj."}
_PARTS |= {"{last}.": "norm.", "shared_head.output.": "head.", "embed_tokens.": "embed_tokens.", "": "block."}
"""Prefixes of the parts of a module, in DeepSeek-V3 and here."""


def is_official(name: str) -> bool:
    """Return whether a name is a family's (`mtp.fc.weight`, `mtp.0.attn.`) and not ours (`mtp.0.eh_proj.weight`)."""
    first, index, part, *_ = name.split(".")
    return first == "mtp" and not (index.isdigit() and f"{part}." in _PARTS.values())


def num_elements(tensors: dict[str, Tensor], ignored: tuple[str, ...]) -> int:
    """Return how many numbers there are, without copies, whose names end with one of `ignored`."""
    copies = {name for name in tensors if name.endswith(ignored) and name.count(".") > 2}
    return sum(tensor.numel() for name, tensor in tensors.items() if name not in copies)


def names_in_files(config: PreTrainedConfig, count: int) -> Names:
    """Return DeepSeek-V3's names of a model with so many modules, and those of `DeepSeekMTP`."""
    family, layers = family_of(config), num_layers(config)
    indices = [(f"{family.stem}.layers.{layers + k}.", f"mtp.{k}.") for k in range(count)]
    parts = {part.format(last=family.last_part): own for part, own in _PARTS.items()}
    pairs = [(theirs + part, ours + own) for theirs, ours in indices for part, own in parts.items()] + indices
    return [(theirs + "{rest}", ours + "{rest}") for theirs, ours in (*pairs, ("", "main."), ("", ""))]


def device_map_of(devices: DeviceMap, config: PreTrainedConfig, official: bool) -> DeviceMap:
    """Return a device map with the names of a `DeepSeekMTP`, or with those of its checkpoint (`official`).

    Of the former `"main"` and `"mtp"` are for all parts without an entry.
    """
    if "" in devices and not official:
        return devices
    count = count_modules(config)
    if "mtp" in devices:
        devices = {f"mtp.{k}": devices["mtp"] for k in range(count)} | devices
    parts = {f"{name}.": device for name, device in devices.items() if name != "mtp"}
    result = renamed(parts, names_in_files(config, count), "device_map", back=official)
    return {name.strip("."): device for name, device in result.items()}
