"""Decoder layers of heads: their own, and the backbone's last ones with low-rank adapters.

Layer heads are decoder layers on the states below the backbone's last layer (Gloeckle et al., Mehra et al.). In
directories of facebook/multi-token-prediction, numbered layers are the trunk and, last, head 1; `extra_heads.{j}` are
the others, on the same trunk. With head 1 as its last layer the rest is a plain Llama.

MtPC's draft layers run the backbone's last k layers once more, with their own adapters, on z, the input of the first of
them, and over verified tokens only. Only adapters are parameters here. The weights are the backbone's, borrowed for a
call: W + s B A is computed for every step of training and once per call of `generate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import Cache, LlamaConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import CacheLayerMixin

from ...configuration.fields import check_counts
from ...configuration.foreign_fields import FieldTable, names
from ...configuration.head_families import LAYER
from ...configuration.heads import MTPHeadConfig
from ...generation.backbone.wrapped_models import is_unit
from ...generation.tensors.tensor_files import Tensors, read_json, read_tensors, renamed
from ..common.backbone_parts import (
    BackboneParts,
    LayerSource,
    attention_kind,
    copy_weights,
    follow_experts,
    layer_options,
    read_config,
    required,
)
from .circuit_head import factorised_distribution
from .family import Directory, HeadFamily, HeadLayout, Parts, register

Weights = dict[str, Tensor]


class Adapter(nn.Module):
    """Low-rank change s B A of a weight [out, in]; A starts as peft's, B at 0."""

    def __init__(self, shape: Sequence[int], rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = nn.Parameter(torch.zeros(rank, shape[1]))  # [r, in]
        self.lora_B = nn.Parameter(torch.zeros(shape[0], rank))  # [out, r]

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        bound = 1 / math.sqrt(self.lora_A.shape[1])
        init.uniform_(self.lora_A, -bound, bound)
        init.zeros_(self.lora_B)


class LayerAdapters(nn.Module):
    """Low-rank adapters for every linear map of some layers, `shells` without weights, whose weights are borrowed."""

    def __init__(self, shells: Sequence[nn.Module], config: MTPHeadConfig) -> None:
        super().__init__()
        self.shells, self.gradient_checkpointing = [list(shells)], False  # in a list: no submodules, never saved
        rank = config.draft_lora_rank
        scale = (2 * rank if config.draft_lora_alpha is None else config.draft_lora_alpha) / rank
        self.adapters = nn.ModuleList()
        for shell in shells:
            linears = ((name, module) for name, module in shell.named_modules() if type(module) is nn.Linear)
            own = {name.replace(".", "-"): Adapter(module.weight.shape, rank, scale) for name, module in linears}
            self.adapters.append(nn.ModuleDict(own))  # whose names hold no dot; those of layers hold no hyphen

    def weights(self, layers: Sequence[nn.Module]) -> list[Weights]:
        """Return, by layer, the weights of the backbone's `layers` plus those of the adapters."""
        return [_adapted(layer, cast(Mapping[str, Adapter], own)) for layer, own in zip(layers, self.adapters)]

    def run(self, slot: int, weights: Weights, states: Tensor, *args: object, **options: object) -> Tensor:
        """Run one layer on states [B, T, d]; without a cache its activations may be recomputed in backward."""
        shell = self.shells[0][slot]

        def layer(states: Tensor) -> Tensor:
            output = functional_call(shell, weights, (states, *args), options)
            return output[0] if isinstance(output, tuple) else output

        cached = any(isinstance(value, Cache | CacheLayerMixin) for value in options.values())
        saves = self.gradient_checkpointing and torch.is_grad_enabled() and not cached
        return checkpoint(layer, states, use_reentrant=False) if saves else layer(states)


def _adapted(layer: nn.Module, adapters: Mapping[str, Adapter]) -> Weights:
    weights = {name: p.detach() for name, p in (*layer.named_parameters(), *layer.named_buffers())}
    for key, adapter in adapters.items():
        name, shape = key.replace("-", ".") + ".weight", (len(adapter.lora_B), adapter.lora_A.shape[1])
        weight = weights.get(name)
        if weight is None or weight.is_meta or weight.shape != shape or not weight.is_floating_point():
            raise ValueError(f"draft_layers need {name} as a matrix {shape}: load it plainly, merge adapters")
        weights[name] = weight.detach() + (adapter.scale * adapter.lora_B @ adapter.lora_A).to(weight)
    return weights


class DraftLayers(LayerAdapters):
    """The adapters of a backbone's last k layers, for heads apart from it."""

    def __init__(self, config: MTPHeadConfig) -> None:
        count, source = config.draft_layers, LayerSource(read_config(config.backbone_config))
        if count > len(source.layers):
            raise ValueError(f"draft_layers={count}: the backbone has {len(source.layers)} layers")
        super().__init__(source.last_layers(count), config)
        self.config, self.cache_name = source.config, source.cache_name
        self.kinds = [attention_kind(source.config, index) for index in range(-count, 0)]
        self.rotary = source.rotary()

    def bind(self, backbone: PreTrainedModel) -> Callable[..., Tensor]:
        """Return `run_bound` with their current weights and a final norm, for a step or a call of `generate`."""
        layers = list(cast(nn.ModuleList, backbone.get_decoder().layers))[-len(self.adapters) :]
        follow_experts(self.config, backbone)
        return partial(self.run_bound, self.weights(layers), BackboneParts(backbone).norm)

    def run_bound(
        self,
        weights: list[Weights],
        norm: Callable[[Tensor], Tensor],
        states: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Cache | None = None,
    ) -> Tensor:
        """Run over z, [B, T, d], the input of the first layer: [B, T, d], after the final norm."""
        states = states.detach().to(next(iter(weights[0].values())).dtype)
        for slot, own in enumerate(weights):
            inputs = states, attention_mask, position_ids, cache, self.kinds[slot]
            options = layer_options(self.config, self.rotary, *inputs, slot, self.cache_name)
            states = self.run(slot, own, states, **options)
        return norm(states)


FILE, PARAMS = "consolidated.pth", "params.json"
_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_STACKS = {"layers": "model.layers", "extra_heads": "extra_heads"}
_NAMES = [
    *((f"{stack}.{{k}}.{part}.weight", f"{own}.{{k}}.{name}.weight")
      for stack, own in _STACKS.items() for part, name in _LAYER.items()),
    ("tok_embeddings.weight", "model.embed_tokens.weight"),
    ("norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
]  # fmt: skip


class DecoderLayers(nn.ModuleList):
    """New layers like a model's last one, side by side over one sequence of states."""

    def __init__(self, source: LayerSource, count: int) -> None:
        super().__init__(source.new_layers(count))
        self.config, self.cache_name = source.config, source.cache_name

    def run(
        self,
        inputs: Sequence[Tensor],
        norm: Callable[[Tensor], Tensor],
        rotary: nn.Module,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        cache: Cache | None = None,
    ) -> list[Tensor]:
        """Return every layer's normed output [B, T, d] for its own input; in training, several are recomputed."""
        read = inputs[0], attention_mask, position_ids, cache, attention_kind(self.config, -1)
        options = layer_options(self.config, rotary, *read, cache_name=self.cache_name)

        def run(layer: nn.Module, part: Tensor) -> Tensor:
            return norm(layer(part, **options))

        recomputes = self.training and torch.is_grad_enabled() and len(self) > 1 and not any(map(is_unit, self))
        call = partial(checkpoint, run, use_reentrant=False) if recomputes else run
        return [call(layer, part) for layer, part in zip(self, inputs)]


class LayerHead(nn.Module):
    """Logits of head k are W norm(f_k(z)): its own decoder layer f_k, the backbone's norm and unembedding.

    z is the input of the backbone's last layer or, with `mix="weighted"`, each head's learned mean of the outputs of
    all layers below it. Position 1 is the backbone's own (`first="backbone"`), or has a head like the rest.
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        count = config.num_depths - (config.first == "backbone")
        source = LayerSource(read_config(config.backbone_config))
        attention_kind(source.config, -1)
        self.layers, self.rotary = DecoderLayers(source, count), source.rotary()
        mixed = len(_hidden_layers(config)) - 1
        self.mix = nn.Parameter(torch.zeros(count, mixed)) if config.mix == "weighted" else None

    def features(
        self,
        states: Sequence[Tensor],
        attention_mask: Tensor | None,
        position_ids: Tensor,
        backbone: BackboneParts,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the inputs of the unembedding for every position of the window, [B, T, n d]."""
        *below, last = states
        dtype = next(self.layers.parameters()).dtype
        inputs = [below[-1].to(dtype)] * len(self.layers)
        if self.mix is not None:
            shares = (self.mix / self.config.mix_temperature).softmax(-1)  # [heads, layers]
            inputs = list(torch.einsum("kl,l...d->k...d", shares, torch.stack(below).to(dtype)))
        follow_experts(self.layers.config, backbone.model)
        normed = self.layers.run(inputs, backbone.norm, self.rotary, attention_mask, position_ids, cache)
        return torch.cat(normed if self.config.first == "own" else [last.to(normed[0].dtype), *normed], -1)

    def forward(self, features: Tensor, backbone: Parts = None, start: int = 0, stop: int | None = None) -> Tensor:
        states = features.unflatten(-1, (self.config.num_depths, -1))[..., start:stop, :]
        return required(backbone).unembed(states)  # [..., stop - start, V]

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        if self.mix is None:
            return
        uniform = self.config.mix_init == "uniform"
        start = torch.full_like(self.mix, 0.1 if uniform else 0.0)
        start[:, -1] += 0.0 if uniform else 10 * self.config.mix_temperature  # all but e^-10 of the mean
        init.copy_(self.mix, start)

    def start_from(self, backbone: BackboneParts) -> None:
        last = cast(nn.ModuleList, backbone.model.get_decoder().layers)[-1]
        copied = len(self.layers) if self.config.init == "copied" else int(self.config.first == "own")
        for layer in list(self.layers)[:copied]:
            copy_weights(last, layer)


def _hidden_layers(config: MTPHeadConfig) -> list[int]:
    if config.mix == "none":
        return [-2, -1]
    layers = read_config(config.backbone_config).get_text_config().num_hidden_layers
    return [*range(1, layers), -1]


def _read(directory: Path) -> Directory:
    """Return the options of the heads and their tensors."""
    config, tensors, count = _read_model(directory)
    if count < 2:
        raise ValueError(f"{directory}: n_future_tokens={count}: no heads; MTPHeads.backbone_from_official loads it")
    heads = {name.replace("extra_heads", "layers"): part for name, part in tensors.items() if "extra_heads" in name}
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    return sizes | {"head_type": "layer", "window": count, "backbone_config": config.to_dict()}, heads


def read_backbone(directory: Path) -> tuple[LlamaConfig, Tensors]:
    """Return the Llama whose last layer is head 1."""
    config, tensors, _ = _read_model(directory)
    return config, {name: tensor for name, tensor in tensors.items() if not name.startswith("extra_heads")}


def _write(config: MTPHeadConfig, tensors: Tensors, backbone: PreTrainedModel) -> Directory:
    """Return the fields of params.json and tensors of `consolidated.pth`, which holds the backbone too."""
    values = config.backbone_config or {}
    heads = values["num_attention_heads"]
    head_dim = values.get("head_dim") or values["hidden_size"] // heads
    ours = {name.replace("layers", "extra_heads", 1): tensor for name, tensor in tensors.items()}
    named = renamed(_half_split(backbone.state_dict() | ours, head_dim, back=True), _NAMES, "this backbone", back=True)
    fields = {"dim": config.hidden_size, "n_heads": heads, "n_kv_heads": values["num_key_value_heads"]}
    fields |= {"n_layers": values["num_hidden_layers"] + config.num_drafts, "multiple_of": 1}
    fields |= {"vocab_size": config.vocab_size, "n_future_tokens": config.window, "norm_eps": values["rms_norm_eps"]}
    return fields | {"rope_theta": values["rope_parameters"]["rope_theta"]}, named


_PARAMS = ("dim", "n_heads", "n_layers", "norm_eps")
_TENSORS = ("tok_embeddings.weight", "layers.0.feed_forward.w1.weight")


def _read_model(directory: Path) -> tuple[LlamaConfig, Tensors, int]:
    params, tensors = read_json(directory / PARAMS), read_tensors([directory / FILE])
    tensors.pop("rope.freqs", None)
    for content, needed, file in ((params, _PARAMS, PARAMS), (tensors, _TENSORS, FILE)):
        if missing := [name for name in needed if name not in content]:
            raise ValueError(f"{directory / file} holds no {', '.join(missing)}")
    check_counts(directory, params, len(tensors))
    rows = len(tensors["tok_embeddings.weight"])
    count, width, heads = params.get("n_future_tokens", 1), params["dim"], params["n_heads"]
    config = LlamaConfig(
        hidden_size=width,
        vocab_size=rows,
        intermediate_size=len(tensors["layers.0.feed_forward.w1.weight"]),
        num_hidden_layers=params["n_layers"] - count + 1,
        num_attention_heads=heads,
        num_key_value_heads=params.get("n_kv_heads") or heads,
        head_dim=width // heads,
        rms_norm_eps=params["norm_eps"],
        rope_parameters={"rope_theta": params.get("rope_theta", 10000.0), "rope_type": "default"},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return config, _half_split(renamed(tensors, _NAMES, directory), width // heads), count


def _refusal(config: MTPHeadConfig) -> str | None:
    kind = (config.backbone_config or {}).get("model_type")
    if config.first != "backbone" or config.mix != "none":
        return f"it holds first='backbone' and mix='none', not first={config.first!r} and mix={config.mix!r}"
    return None if kind == "llama" else f"it holds Llama layers, not model_type={kind!r}"


def _half_split(tensors: Tensors, head_dim: int, back: bool = False) -> Tensors:
    """Reorder rows of queries and keys from rope pairs (0, 1), (2, 3), .. to pairs (i, i + D / 2), or back."""
    pairs = (2, head_dim // 2) if back else (head_dim // 2, 2)
    turned = {
        name: weight.view(-1, *pairs, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        for name, weight in tensors.items()
        if name.endswith(("q_proj.weight", "k_proj.weight"))
    }
    return tensors | turned


_FIELDS = FieldTable(
    "gloeckle",
    {"": names("dim n_layers n_heads n_kv_heads norm_eps rope_theta n_future_tokens vocab_size")},
    {"": names("multiple_of ffn_dim_multiplier max_seq_len max_batch_size model_parallel_size")},
)
_GLOECKLE = HeadLayout(
    "gloeckle",
    lambda directory, fields: (directory / PARAMS).is_file(),
    *(_read, _refusal, _write, FILE, PARAMS, _FIELDS),  # FILE is the only form that their code reads
)
register(
    HeadFamily(
        LAYER,
        LayerHead,
        factorised_distribution,
        features=lambda head, *context: head.features(*context),
        hidden_layers=_hidden_layers,
        layer_config=lambda config, text: text.to_dict(),
        is_independent=True,
        layouts=[_GLOECKLE],
    )
)
