"""Checkpoints of EAGLE heads for other libraries and engines: names, configurations, and what each cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ...configuration.eagle import EagleHeadConfig
from ...configuration.fields import refuse
from ...generation.tensors.tensor_files import Fields, write_json
from ...generation.tensors.wrapped_models import input_embeddings
from ..common.drafter_configs import speculators_fields
from .conversion import AUX_IDS
from .modules import EagleNetwork

_LLAMA_FIELDS = (
    *("hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size", "head_dim", "attention_bias"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
_ARCHITECTURES = {(1, "sglang"): "LlamaForCausalLMEagle"}
_ARCHITECTURES |= {(3, layout): "LlamaForCausalLMEagle3" for layout in ("specforge", "vllm", "sglang")}
_OPTIONS_OF_3 = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def write_layout(head: EagleNetwork, directory: Path, layout: str, state: dict[str, Tensor] | None = None) -> None:
    """Write a head in the layout of another library; `state` holds its tensors, where they had to be gathered."""
    embeddings = input_embeddings(head.backbone).weight.detach() if head.is_attached else None
    tensors = layout_tensors(head.config, layout, head.state_dict() if state is None else state, embeddings)
    written = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(written, directory / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    write_json(directory / CONFIG_NAME, layout_config(head.config, layout, head.dtype))


def layout_config(config: EagleHeadConfig, layout: str, dtype: torch.dtype) -> Fields:
    """Return the fields of config.json in a layout, for tensors of `dtype`."""
    values = config.to_dict()
    options = {name: values[name] for name in _OPTIONS_OF_3}
    values = {name: values[name] for name in _LLAMA_FIELDS} | _rope_fields(config)
    values |= {"tie_word_embeddings": False, "torch_dtype": str(dtype).removeprefix("torch.")}
    if loss := config.loss_options.changed():
        values["loss_options"] = loss
    if layout == "speculators":
        return _speculators_config(config, values) | options
    values |= {"architectures": [_ARCHITECTURES.get((config.version, layout), "LlamaForCausalLM")]}
    values |= {"model_type": "llama"}
    if config.version == 1:
        return values | {"bias": config.fc_bias or layout == "sglang", "qkv_bias": config.attention_bias}
    values |= {"draft_vocab_size": config.draft_vocab_size} | options
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    nested: Fields = {"use_aux_hidden_state": config.use_aux_hidden_state}
    if config.aux_layers is not None:
        values |= {AUX_IDS: config.aux_layers, "num_aux_hidden_states": config.num_aux}
        if config.aux_layers[0] != 1:  # which would be ambiguous here
            by_outputs = config.aux_layers[0] == 2  # SpecForge and SGLang take a first id of 1 for indices of outputs
            nested[AUX_IDS] = [index - by_outputs for index in config.aux_layers]
    if config.mask_token_id is not None:
        values["ptd_token_id"] = config.mask_token_id
    if config.norm_before_fc:
        nested["norm_before_fc"] = True
    return values | {"eagle_config": nested}


def _rope_fields(config: EagleHeadConfig) -> Fields:
    """Return flat fields, which every reader supports; old ones call `rope_type` `type`."""
    rope = dict(cast(Fields, config.rope_parameters))
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    return {"rope_theta": theta} | ({} if kind == "default" else {"rope_scaling": rope | {"type": kind}})


def _speculators_config(config: EagleHeadConfig, layer: Fields) -> Fields:
    layer = {key: value for key, value in layer.items() if key not in ("loss_options", "torch_dtype")}
    layer |= {"model_type": "qwen3" if config.qk_norm else "llama", "mlp_bias": False}
    values = speculators_fields(config, "eagle3", "Eagle3DraftModel", layer, 5) | {"embed_requires_grad": False}
    if config.aux_layers is not None:
        values[AUX_IDS] = config.aux_layers
    loss = config.loss_options.changed()
    return values | ({"loss_options": loss} if loss else {})


def layout_tensors(
    config: EagleHeadConfig, layout: str, state: dict[str, Tensor], embeddings: Tensor | None = None
) -> dict[str, Tensor]:
    """Return a head's tensors under the layout's names; `embeddings` are the backbone's, which some layouts repeat."""
    state = dict(state)
    if layout == "speculators" and embeddings is not None:
        state.setdefault("embed_tokens.weight", embeddings)
    if config.version == 1:
        if layout == "sglang":  # it builds fc with a bias, and would not initialise a missing one
            state.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=state["fc.weight"].dtype))
        return state
    # vLLM refuses a map where all tokens are drafted; the others need it
    size = config.draft_vocab_size or config.vocab_size
    if layout not in ("official", "vllm") or size < config.vocab_size:
        offsets = state["d2t"].cpu() if "d2t" in state else torch.zeros(size, dtype=torch.long)
        ids = offsets + torch.arange(size)  # [Vd]
        state |= {"d2t": offsets, "t2d": torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)}
    if layout == "speculators":
        return state
    return {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in state.items()}


def check_layout(config: EagleHeadConfig, layout: str) -> None:
    """Refuse an unknown layout, or one whose reader does not support an option of the head."""
    at_once = config.mask_token_id is not None and layout != "vllm"
    readers = {
        "official": _official(config),
        "specforge": [*_sglang(config), (config.version == 1, "it is a layout of version 3")],
        "speculators": [
            (config.version == 1, "it is a layout of version 3"),
            (not config.use_aux_hidden_state, "speculators always reads auxiliary states (use_aux_hidden_state)"),
        ],
        "vllm": _vllm(config),
        "sglang": _sglang(config),
    }
    if layout not in readers:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(readers)}")
    has_part = config.version == 1 and config.draft_vocab_size != config.vocab_size
    reasons = [
        (at_once, "vLLM alone runs rows at once (mask_token_id)"),
        (has_part, f"others read no draft vocabulary for version 1 (draft_vocab_size={config.draft_vocab_size})"),
        *readers[layout],
    ]
    refuse((refused, f"layout={layout!r} cannot hold this head: {reason}") for refused, reason in reasons)


def _official(config: EagleHeadConfig) -> list[tuple[bool, str]]:
    values, rope = config.to_dict(), cast(Fields, config.rope_parameters)
    used = [name for name in _OPTIONS_OF_3 if values[name]]
    narrow, kind = config.hidden_size != (config.head_dim or 0) * config.num_attention_heads, rope["rope_type"]
    return [
        (bool(used), f"the official code has no {', '.join(used)}"),
        (config.qk_norm, "the official code has no norms of queries and keys (qk_norm)"),
        (not config.use_aux_hidden_state, "the official code always reads auxiliary states (use_aux_hidden_state)"),
        (config.num_hidden_layers > 1, f"the official code has one layer, not {config.num_hidden_layers}"),
        (bool(config.head_dim) and narrow, f"the official code derives head_dim, which is not {config.head_dim}"),
        (kind not in ("default", "linear", "dynamic"), f"the official code has no rope_type {kind!r}"),
        (kind != "default" and rope["rope_theta"] != 10_000, "the official code takes base 10000 for a scaled rope"),
    ]


def _vllm(config: EagleHeadConfig) -> list[tuple[bool, str]]:
    first, layers = config.version == 1, config.aux_layers
    unordered = not first and layers is not None and layers != sorted(set(layers))
    return [
        (first and config.fc_bias, "vLLM builds fc without a bias for version 1, and would draft wrongly"),
        (first and config.attention_bias, "vLLM's reader of version 1 would also want a bias of o_proj"),
        (unordered, f"vLLM passes every state once and in order, not as in aux_layers={layers}"),
        (not first and config.qk_norm, "vLLM reads norms of queries and keys from the layout 'speculators' only"),
    ]


def _sglang(config: EagleHeadConfig) -> list[tuple[bool, str]]:
    third, layers = config.version == 3, config.aux_layers
    begins_with_one = third and layers is not None and layers[0] == 1
    return [
        (config.qk_norm, "SGLang has no norms of queries and keys (qk_norm)"),
        (third and config.attention_bias, "SGLang builds q, k and v without biases (attention_bias)"),
        (third and config.norm_before_residual, "SGLang's residual is not normed (norm_before_residual)"),
        (third and config.norm_before_fc, "SGLang has no norm over all states (norm_before_fc)"),
        (third and config.num_hidden_layers > 1, "SGLang has other names for further layers (num_hidden_layers)"),
        (begins_with_one, f"SGLang adds one to ids that begin with 1, so that it reads no aux_layers={layers}"),
    ]
