"""Directories of EAGLE heads for other libraries and engines: names, configurations, and what each of them cannot
read."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...configuration import EagleHeadConfig
from .loading import AUX_IDS

_LLAMA_FIELDS = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
    "head_dim",
    "attention_bias",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_OPTIONS_OF_3 = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def folder_config(config: EagleHeadConfig, layout: str, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a directory.

    Args:
        config: The head's.
        layout: One of `LAYOUTS` but our own.
        dtype: Of the tensors.
    """
    values = {name: getattr(config, name) for name in _LLAMA_FIELDS} | _rope_fields(config)
    values |= {"tie_word_embeddings": False, "torch_dtype": str(dtype).removeprefix("torch.")}
    if config.loss_options:
        values["loss_options"] = config.loss_options
    if layout == "speculators":
        return _speculators_config(config, values)
    values |= {"architectures": [_architecture(config, layout)], "model_type": "llama"}
    if config.version == 1:
        return values | {"bias": config.fc_bias, "qkv_bias": config.attention_bias}
    values |= {"draft_vocab_size": config.draft_vocab_size} | {name: getattr(config, name) for name in _OPTIONS_OF_3}
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    nested = {"use_aux_hidden_state": config.use_aux_hidden_state}
    if config.aux_layers is not None:
        values |= {AUX_IDS: config.aux_layers, "num_aux_hidden_states": config.num_aux}
        if config.aux_layers[0] != 1:  # a 1 would be ambiguous here, and the other entry says it all
            nested[AUX_IDS] = _counted_by_outputs(config.aux_layers)
    if config.norm_before_fc:
        nested["norm_before_fc"] = True
    return values | {"eagle_config": nested}


def _architecture(config: EagleHeadConfig, layout: str) -> str:
    if config.version == 3:
        return "LlamaForCausalLM" if layout == "official" else "LlamaForCausalLMEagle3"
    return "LlamaForCausalLMEagle" if layout == "sglang" else "LlamaForCausalLM"


def _rope_fields(config: EagleHeadConfig) -> dict[str, Any]:
    """The flat fields that every reader knows; `type` is what old ones call `rope_type`."""
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope["rope_type"]
    return {"rope_theta": theta} | ({} if kind == "default" else {"rope_scaling": rope | {"type": kind}})


def _counted_by_outputs(aux_layers: list[int]) -> list[int]:
    """SpecForge's and SGLang's ids: a first id of 1 says that they count outputs of layers."""
    return [index - 1 for index in aux_layers] if aux_layers[0] == 2 else list(aux_layers)


def _speculators_config(config: EagleHeadConfig, layer: dict[str, Any]) -> dict[str, Any]:
    layer = {key: value for key, value in layer.items() if key not in ("loss_options", "torch_dtype")}
    layer |= {"model_type": "qwen3" if config.qk_norm else "llama", "mlp_bias": False}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    values = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": config.base_model_name_or_path, "architectures": _verifier_classes(config)},
        },
    } | {name: getattr(config, name) for name in _OPTIONS_OF_3}
    if config.aux_layers is not None:
        values[AUX_IDS] = config.aux_layers
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    return values | ({"loss_options": config.loss_options} if config.loss_options else {})


def _verifier_classes(config: EagleHeadConfig) -> list[str]:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.base_model_type)
    return [] if name is None else [name]


def folder_tensors(
    config: EagleHeadConfig, layout: str, state: dict[str, torch.Tensor], embeddings: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Tensors of a directory under the layout's names.

    Args:
        config: The head's.
        layout: One of `LAYOUTS` but our own.
        state: The head's tensors.
        embeddings: The backbone's, for a layout that repeats them; None where the head has its own, or none is at hand.
    """
    state = dict(state)
    if layout == "speculators" and embeddings is not None:
        state.setdefault("embed_tokens.weight", embeddings)
    if config.version == 1:
        if layout == "sglang":  # it builds fc with a bias, and would leave a missing one as it came
            state.setdefault("fc.bias", torch.zeros(config.hidden_size, dtype=state["fc.weight"].dtype))
        return state
    # vLLM has no place for a map where all tokens are drafted, and stops at one; the others ask for it
    if layout not in ("official", "vllm") or config.draft_vocab_size < config.vocab_size:
        state |= _vocabulary(config, state)
    if layout == "speculators":
        return state
    return {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in state.items()}


def _vocabulary(config: EagleHeadConfig, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    offsets = state.get("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long)).cpu()
    ids = offsets + torch.arange(len(offsets))
    return {"d2t": offsets, "t2d": torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)}


def check_layout(config: EagleHeadConfig, layout: str) -> None:
    """Raises where the reader of a layout would load the head wrongly, or not at all.

    Raises:
        ValueError: An unknown layout, or an option that its reader does not know; the message names it.
    """
    readers = {"official": _official, "specforge": _specforge, "speculators": _speculators, "vllm": _vllm}
    if layout not in readers | {"sglang": _sglang}:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(readers)}, sglang")
    for refused, reason in (readers | {"sglang": _sglang})[layout](config):
        if refused:
            raise ValueError(f"layout={layout!r} cannot hold this head: {reason}")


def _official(config: EagleHeadConfig) -> list[tuple[bool, str]]:
    used = [name for name in _OPTIONS_OF_3 if getattr(config, name)]
    rope = config.rope_parameters
    return [
        (bool(used), f"the official code knows no {', '.join(used)}"),
        (config.qk_norm, "the official code has no norms of queries and keys (qk_norm)"),
        (not config.use_aux_hidden_state, "the official code always reads auxiliary states (use_aux_hidden_state)"),
        (config.num_hidden_layers > 1, f"the official code has one layer, not {config.num_hidden_layers}"),
        (
            config.head_dim * config.num_attention_heads != config.hidden_size,
            f"the official code takes hidden_size / num_attention_heads for head_dim, not {config.head_dim}",
        ),
        (
            rope["rope_type"] not in ("default", "linear", "dynamic"),
            f"the official code knows rope_type 'linear' and 'dynamic', not {rope['rope_type']!r}",
        ),
        (
            rope["rope_type"] != "default" and rope["rope_theta"] != 10_000,
            f"the official code takes base 10000 for a scaled rope, not {rope['rope_theta']:g}",
        ),
    ]


def _specforge(config: EagleHeadConfig) -> list[tuple[bool, str]]:
    return [*_sglang(config), (config.version == 1, "it is a layout of version 3")]


def _speculators(config: EagleHeadConfig) -> list[tuple[bool, str]]:
    return [
        (config.version == 1, "it is a layout of version 3"),
        (not config.use_aux_hidden_state, "speculators always reads auxiliary states (use_aux_hidden_state)"),
    ]


def _vllm(config: EagleHeadConfig) -> list[tuple[bool, str]]:
    first = config.version == 1
    return [
        (first and config.fc_bias, "vLLM builds fc without a bias for version 1, and would draft wrongly"),
        (first and config.attention_bias, "vLLM's reader of version 1 would also want a bias of o_proj"),
        (
            not first and config.aux_layers is not None and config.aux_layers != sorted(set(config.aux_layers)),
            f"vLLM hands over every state once and in order, not as in aux_layers={config.aux_layers}",
        ),
        (not first and config.qk_norm, "vLLM reads norms of queries and keys from the layout 'speculators' only"),
    ]


def _sglang(config: EagleHeadConfig) -> list[tuple[bool, str]]:
    third = config.version == 3
    return [
        (config.qk_norm, "SGLang has no norms of queries and keys (qk_norm)"),
        (third and config.attention_bias, "SGLang builds q, k and v without biases (attention_bias)"),
        (third and config.norm_before_residual, "SGLang's residual is not normed (norm_before_residual)"),
        (third and config.norm_before_fc, "SGLang has no norm over all states (norm_before_fc)"),
        (third and config.num_hidden_layers > 1, "further layers are called otherwise there (num_hidden_layers)"),
        (
            third and config.aux_layers is not None and config.aux_layers[0] == 1,
            f"SGLang adds one to ids that begin with 1, so aux_layers={config.aux_layers} cannot be written",
        ),
    ]
