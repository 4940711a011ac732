"""Fields of config.json that engines read and transformers' classes do not write: older names, and constants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ..modeling import DeepSeekMTP
from ..training.utils import replace_text

ENGINE_ONLY = {
    "longcat_flash": "it has no weights of zero experts, which engines do not take and transformers allocates",
    "mimo": "its config.json names the configuration of Qwen2, for vLLM has none of MiMo-7B",
}
"""Families whose directories are for engines alone, and why."""


def add_fields(path: Path, model: DeepSeekMTP) -> None:
    """Add to a written config.json what engines read under older names."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(config.get("rope_parameters") or {})
    theta, kind = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    older = {"torch_dtype": config.get("dtype")}
    if "full_attention" not in rope:  # else every kind of layer has its own, which the older fields cannot say
        older |= {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope | {"type": kind}}
    family = _OF_FAMILIES.get(model.config.model_type)
    config = (family(model.config, model) if family else {}) | older | config
    if model.config.model_type == "mimo":
        config["model_type"] = "qwen2"
    replace_text(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def engine_state(model: DeepSeekMTP) -> dict[str, Tensor] | None:
    """Return the tensors to write, where they are not the model's own.

    LongCat's zero experts hand on their input, so official files have no weights of them, while transformers allocates
    gates for them.
    """
    if model.config.model_type != "longcat_flash":
        return None
    count = model.config.n_routed_experts
    state = model.state_dict()
    return {name: state[name][:count] if name.endswith("experts.gate_up_proj") else state[name] for name in state}


def _deepseek(config: PreTrainedConfig, model: DeepSeekMTP) -> dict[str, Any]:
    return {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def _hy3(config: Any, model: DeepSeekMTP) -> dict[str, Any]:
    """Return what vLLM's Hy3 reads; transformers has the first one as a list, and takes the others for granted."""
    kinds = [*config.mlp_layer_types, "sparse"]
    return {
        "first_k_dense_replace": kinds.index("sparse"),
        "qk_norm": True,
        "expert_hidden_dim": config.moe_intermediate_size,
        "route_norm": True,
    }


def _exaone(config: Any, model: DeepSeekMTP) -> dict[str, Any]:
    """Return the kinds of the modules, which vLLM would otherwise take from the first layers."""
    return {"mtp_layer_types": model.mtp.kinds}


def _exaone_4_5(config: Any, model: DeepSeekMTP) -> dict[str, Any]:
    """Return fields of the text that vLLM's module looks up in the whole configuration."""
    text = config.get_text_config()
    return {"vocab_size": text.vocab_size, "tie_word_embeddings": text.tie_word_embeddings}


def _longcat(config: Any, model: DeepSeekMTP) -> dict[str, Any]:
    """Return what transformers takes for granted."""
    return {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}


def _mimo_v2(config: Any, model: DeepSeekMTP) -> dict[str, Any]:
    """Return the official names: transformers has lists of kinds, and doubles the heads of sliding layers itself."""
    full, sliding = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
    return {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "layernorm_epsilon": config.rms_norm_eps,
        "rope_theta": full["rope_theta"],
        "partial_rotary_factor": full["partial_rotary_factor"],
        "swa_rope_theta": sliding["rope_theta"],
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": 2 * config.num_key_value_heads,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": config.v_head_dim,
        "sliding_window_size": config.sliding_window - 1,  # without the token itself
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }


_OF_FAMILIES = {
    "deepseek_v3": _deepseek,
    "exaone4_5": _exaone_4_5,
    "exaone_moe": _exaone,
    "hy_v3": _hy3,
    "longcat_flash": _longcat,
    "mimo_v2_flash": _mimo_v2,
}
