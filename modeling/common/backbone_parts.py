"""What drafters borrow of a backbone: its unembedding, embeddings and norm for a call, and layers of its own class.

Parts are never stored on a module, so that copies stay right; layers are called outside their model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cache, cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModel, Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer
from transformers.masking_utils import (
    LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from ...configuration.cache_names import CACHE, name_of_cache
from ...configuration.fields import field, has_short_convolutions, masks_padding_alone, rotates_anew
from ...configuration.mtp_families import REFUSED
from ...generation.backbone.wrapped_models import Kwargs, call_frozen, is_unit, untyped, weights_fetched
from ...generation.tensors.masks import model_mask
from ...generation.tensors.tensor_files import Fields
from .draft_vocabulary import DraftVocabulary

Map = Callable[[Tensor], Tensor]


class BackboneParts:
    """Functions of a causal language model, through which no gradient reaches its parameters; made for every call.

    Of a `vocabulary` there are logits of its tokens, and embeddings of codes.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: DraftVocabulary | None = None) -> None:
        self.model, self.vocabulary = model, vocabulary

    @cached_property
    def unembed(self) -> Map:
        """From hidden states [..., d] after the final norm to logits [..., V]."""
        return partial(_unembed, output_embeddings(self.model), self.model.config.get_text_config(), self.vocabulary)

    @cached_property
    def embed(self) -> Map:
        """From token ids [...] to embeddings [..., d]."""
        table, part = self.model.get_input_embeddings(), self.vocabulary
        return partial(frozen, table) if part is None else lambda codes: frozen(table, part.tokens(codes))

    @cached_property
    def norm(self) -> Map:
        """The final norm, [..., d] to [..., d]."""
        return partial(frozen, final_norm(self.model.get_decoder()))


def required(backbone: BackboneParts | None) -> BackboneParts:
    """Return the parts of an attached backbone."""
    if backbone is None:
        raise RuntimeError("these heads borrow parts of their backbone: call attach(backbone) first")
    return backbone


def output_embeddings(model: PreTrainedModel) -> nn.Linear:
    """Return the unembedding of a causal language model: a linear map, or a quantised one that is called alike."""
    unembedding = model.get_output_embeddings()
    if unembedding is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings")
    return cast(nn.Linear, unembedding)


def _unembed(unembedding: nn.Module, config: PreTrainedConfig, part: DraftVocabulary | None, states: Tensor) -> Tensor:
    states = states.to(dtype_of(unembedding, states))
    if part is not None:
        return finished_logits(part_logits(part, unembedding, states), config)
    logits = frozen(unembedding, states) if torch.is_grad_enabled() else unembedding(states)
    return finished_logits(logits, config)


def part_logits(part: DraftVocabulary, unembedding: nn.Module, states: Tensor) -> Tensor:
    """Return the logits [..., U] that an unembedding makes of states [..., H]; its parameters get no gradient."""
    linear = unembedding if type(unembedding) is nn.Linear and not is_unit(unembedding) else None
    if linear is None or "_hf_hook" in vars(linear) or linear.weight.is_meta or isinstance(linear.weight, DTensor):
        # such weights cannot be read outside their module's forward: all logits are computed
        return frozen(unembedding, states).index_select(-1, part.on(states.device))
    rows = part.rows(linear.weight)  # [U, H]
    bias = None if linear.bias is None else linear.bias.detach()[part.on(rows.device)]  # [U]
    return nn.functional.linear(states.to(rows.device), rows, bias)  # [..., U]


def _gathered(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def frozen(module: nn.Module, *args: object) -> Any:
    """Return `module(*args)`, through which gradients reach the arguments but no parameter.

    The module itself is called, never its weight read, for hooks of accelerate and quantised maps.
    """
    if is_unit(module):
        return call_frozen(module, *args)
    if not torch.is_grad_enabled():
        return module(*args)
    trained = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained or any(value.is_meta for value in trained.values()):
        return module(*args)
    return functional_call(module, trained, args)


def dtype_of(module: nn.Module, states: Tensor) -> torch.dtype:
    """Return the floating dtype that a module computes in; that of the states where its weights are integers."""
    weight = next(module.parameters(), states)
    return weight.dtype if weight.is_floating_point() else states.dtype


def compute_device(model: PreTrainedModel) -> torch.device:
    """Return the device where a model computes, which differs from that of offloaded weights."""
    hooks = (vars(module)["_hf_hook"] for module in model.modules() if "_hf_hook" in vars(module))
    devices = [device for hook in hooks if (device := vars(hook).get("execution_device")) is not None]
    return torch.device(devices[0]) if devices and model.device.type == "meta" else model.device


@torch.no_grad()
def weight_of(linear: nn.Module, like: Tensor) -> Tensor:
    """Return the matrix [out, in] of a linear map; of a quantised, offloaded or adapted one as `like`, [out, in]."""
    if type(linear) is nn.Linear and not linear.weight.is_meta:
        return _gathered(linear.weight.detach())
    unit = torch.eye(like.shape[1], dtype=like.dtype, device=like.device)  # [in, in]
    return (linear(unit) - linear(torch.zeros_like(unit[:1]))).T  # without the bias


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights of a layer of a backbone, which may be quantised, offloaded or adapted, into a plain one."""
    for name, own in target.named_modules():
        other = source.get_submodule(name)
        if isinstance(own, nn.Linear) and type(other) is not nn.Linear:
            own.weight.copy_(weight_of(other, own.weight))
            if own.bias is not None:
                own.bias.copy_(other(own.weight.new_zeros(1, own.in_features))[0])  # what it makes of 0
            continue
        with weights_fetched(other):
            stored = dict(other.named_parameters(recurse=False))
            for part, weight in own.named_parameters(recurse=False):
                weight.copy_(_gathered(stored[part]))


_MASKS = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING | {
    "hybrid": create_causal_mask,
    "hybrid_sliding": create_sliding_window_causal_mask,
}
_NORMS = ("norm", "final_layer_norm", "final_layernorm", "ln_f", "norm_f")


class LayerSource:
    """The decoder layers of an architecture, from a model on the meta device.

    Attributes:
        config: The model's, as its layers hold it.
        cache_name: The argument by which a layer takes its cache.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            self._body = AutoModel.from_config(deepcopy(config))
        reason, layers = REFUSED.get(config.model_type), getattr(self._body, "layers", None)
        takes = layers and "position_embeddings" in inspect.signature(type(layers[-1]).forward).parameters
        if reason is None and not (takes and hasattr(self._body, "rotary_emb")):
            reason = "its layers do not take rotary positions and a mask"
        if reason is not None:
            raise _refusal(config, reason)
        self.config: PreTrainedConfig = self._body.config
        self.layers: nn.ModuleList = self._body.layers
        self.cache_name = name_of_cache(type(self.layers[-1]).forward) or CACHE

    def new_layers(self, count: int) -> list[nn.Module]:
        """Return `count` new layers like the last one, whose slots in a cache are 0, 1, ..."""
        last = len(self.layers) - 1
        layers = [type(self.layers[-1])(self.config, last) for _ in range(count)]
        set_cache_slots(layers)
        return layers

    def last_layers(self, count: int) -> list[nn.Module]:
        """Return the last `count` layers on the meta device, whose slots in a cache are 0, 1, ..."""
        layers = list(self.layers[-count:])
        set_cache_slots(layers)
        return layers

    def rotary(self) -> nn.Module:
        """Return a new module of rotary positions; it has no parameters."""
        return type(self._body.rotary_emb)(self.config)

    def norm(self) -> nn.Module:
        """Return a new norm like the model's final one."""
        eps = field(self.config, "rms_norm_eps", "layer_norm_eps", default=1e-6)
        return type(final_norm(self._body))(self.config.hidden_size, eps=eps)


def follow_experts(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Let layers that hold `config` compute their experts as a model does now (`set_experts_implementation`)."""
    config._experts_implementation = model.config.get_text_config()._experts_implementation


def layer_options(
    config: PreTrainedConfig,
    rotary: nn.Module | None,
    states: Tensor,
    attention_mask: Tensor | dict[str, Tensor] | None,
    position_ids: Tensor,
    cache: Cache | None = None,
    kind: str = "full_attention",
    slot: int = 0,
    cache_name: str = CACHE,
) -> Kwargs:
    """Return what a layer of a `kind`, with a `slot` in the caller's cache, takes besides its states [B, T, d].

    `attention_mask` is [B, past + T], or what is seen [B, 1, T, W] bool, of all layers or by kind; `position_ids` is
    [B or 1, T], or three with images.
    """
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask[kind if kind in attention_mask else "full_attention"]
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.dtype == torch.bool:
        attention_mask = model_mask(attention_mask[:, 0], config, states.dtype)
    extra: Kwargs = {}
    if has_short_convolutions(config):
        is_padding = attention_mask is not None and attention_mask.dim() == 2
        extra["conv_mask"] = _own_tokens(states, attention_mask) if is_padding else None
    if masks_padding_alone(config):
        mask = _own_tokens(states, attention_mask)
    else:
        mask = _MASKS.get(kind, create_causal_mask)(
            config=config,
            inputs_embeds=states,
            attention_mask=attention_mask,
            **untyped({CACHE: cache}),
            position_ids=text_positions(position_ids),
            layer_idx=slot,
        )
    positions = rotary_positions(position_ids)
    if rotates_anew(config):
        positions = positions.expand(3, len(states), -1)
        if cache is not None:  # with those of all columns that it holds, [3, B, W + T]
            layer = cast(DynamicIndexedLayer, cache.layers[slot])
            held = layer.indexer_position_ids
            layer.indexer_position_ids = positions = positions if held is None else torch.cat([held, positions], dim=-1)
    return {
        "attention_mask": mask,
        "position_ids": text_positions(position_ids),
        "position_embeddings": None if rotary is None else rotated(rotary, states, positions, kind),
        cache_name: cache,
    } | extra


def _own_tokens(states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return which of the positions that a layer reads are tokens, [B, T] bool."""
    if attention_mask is None:
        return states.new_ones(states.shape[:2], dtype=torch.bool)
    return attention_mask[:, -states.shape[1] :].bool()


def text_positions(position_ids: Tensor) -> Tensor | None:
    """Return the positions in the text, [B, T], of position ids [B, T] or [4, B, T]; None of three alone."""
    if position_ids.dim() == 2:
        return position_ids
    return position_ids[0] if len(position_ids) == 4 else None


def rotary_positions(position_ids: Tensor) -> Tensor:
    """Return the part of position ids that is rotated by, [B, T] or [3, B, T] (time, height, width)."""
    return position_ids if position_ids.dim() == 2 else position_ids[-3:]


def layer_kind(config: PreTrainedConfig, index: int) -> str:
    """Return how a layer attends, as `layer_types` calls it."""
    if layer_types := field(config, "layer_types"):
        return layer_types[index]
    return "full_attention" if field(config, "sliding_window") is None else "sliding_attention"


def attention_kind(config: PreTrainedConfig, index: int) -> str:
    """Return `layer_kind` of a layer that can be run by itself."""
    kind = layer_kind(config, index)
    if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
        raise _refusal(config, f"its layer {index} is of layer_types {kind!r}, and not of plain attention")
    return kind


def rotated(rotary: nn.Module, states: Tensor, positions: Tensor, kind: str) -> Any:
    """Return what a layer of a kind rotates by; by name, where rotary embeddings do not have the names of kinds."""
    if not knows_layer_types(type(rotary)):
        return rotary(states, positions)
    names = vars(rotary).get("layer_types", [kind])
    made = {name: rotary(states, positions, name) for name in ([kind] if kind in names else names)}
    return made.get(kind, made)


@cache
def knows_layer_types(rotary: type[nn.Module]) -> bool:
    """Return whether positions are rotated differently in layers of different kinds."""
    return "layer_type" in inspect.signature(rotary.forward).parameters


def set_cache_slots(layers: Iterable[nn.Module]) -> None:
    """Number the layers for a separate cache: 0, 1, ..."""
    for slot, layer in enumerate(layers):
        for module in layer.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                vars(module)["layer_idx"] = slot


def read_config(values: Fields | None) -> PreTrainedConfig:
    """Return the config of a model from the fields of its `config.json`."""
    values = dict(values or {})
    return AutoConfig.for_model(values.pop("model_type"), **values)


def final_norm(body: nn.Module) -> nn.Module:
    """Return the norm after the last layer, by its known names."""
    for name, module in body.named_children():
        if name in _NORMS:
            return module
    raise ValueError(f"{type(body).__name__} has no final norm that heads could share")


def finished_logits(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """Return logits [..., V] with what a family does after its unembedding: cap tanh(factor W h / divisor / cap)."""
    known, cap = getattr(config, "unpadded_vocab_size", None), getattr(config, "final_logit_softcapping", None)
    scaling, width = getattr(config, "logits_scaling", None), getattr(config, "logits_mup_width_multiplier", None)
    if known is not None and logits.shape[-1] == config.vocab_size:
        logits = logits[..., :known]  # without padding of the table
    if (divisor := width if scaling is None else scaling) is not None:
        logits = logits / float(divisor)
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * float(factor)
    return logits if cap is None else torch.tanh(logits / float(cap)) * float(cap)


def _refusal(config: PreTrainedConfig, reason: str) -> ValueError:
    return ValueError(f"backbone_config: a head cannot have a layer of model_type={config.model_type!r}: {reason}")
