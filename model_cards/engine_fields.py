"""Fields of config.json that engines read and transformers' classes do not write: older names, and constants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from ..modeling import DeepSeekMTP
from ..training.utils import replace_file

ENGINE_ONLY = {
    "longcat_flash": "it has no weights of zero experts, which engines do not take and transformers allocates",
    "mimo": "its config.json names the configuration of Qwen2, for vLLM has none of MiMo-7B",
}
"""Families whose directories are for engines alone, and why."""


def add_fields(path: Path, model: DeepSeekMTP) -> None:
    """Add to a written config.json the fields that engines read under older names."""
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = dict(config.get("rope_parameters") or {})
    theta, rope_type = rope.pop("rope_theta", 10000.0), rope.get("rope_type", "default")
    older = {"torch_dtype": config.get("dtype")}
    if "full_attention" not in rope:  # else every type of layer has its own, which the older fields cannot express
        older |= {"rope_theta": theta, "rope_scaling": None if rope_type == "default" else rope | {"type": rope_type}}
    config = _family_fields(model) | older | config
    if model.config.model_type == "mimo":
        config["model_type"] = "qwen2"
    replace_file(path, json.dumps(config, indent=2, sort_keys=True) + "\n")


def engine_state(model: DeepSeekMTP) -> dict[str, Tensor] | None:
    """Return the tensors to write, where they are not the model's own.

    LongCat's zero experts return their input, so official files have no weights of them, while transformers allocates
    gates for them.
    """
    if model.config.model_type != "longcat_flash":
        return None
    count = model.config.n_routed_experts
    state = model.state_dict()
    return {name: state[name][:count] if name.endswith("experts.gate_up_proj") else state[name] for name in state}


def _hy3(config: Any) -> dict[str, object]:
    """Return the fields of vLLM's Hy3; transformers has the first one as a list, and the others as constants."""
    return {
        "first_k_dense_replace": [*config.mlp_layer_types, "sparse"].index("sparse"),
        "qk_norm": True,
        "expert_hidden_dim": config.moe_intermediate_size,
        "route_norm": True,
    }


def _mimo_v2(config: Any) -> dict[str, object]:
    """Return the official names: transformers has lists of types, and doubles the heads of sliding layers itself."""
    full, sliding = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
    return {
        "hybrid_layer_pattern": [int(each == "sliding_attention") for each in config.layer_types],
        "moe_layer_freq": [int(each == "sparse") for each in config.mlp_layer_types],
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


def _family_fields(model: DeepSeekMTP) -> dict[str, object]:
    config = model.config
    match config.model_type:
        case "deepseek_v3":
            return {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
        case "longcat_flash":  # constants of transformers
            return {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"}
        case "exaone4_5":  # fields of the text, which vLLM's module reads from the whole configuration
            text = config.get_text_config()
            return {"vocab_size": text.vocab_size, "tie_word_embeddings": text.tie_word_embeddings}
        case "exaone_moe":  # vLLM would take the types of the modules from the first layers
            return {"mtp_layer_types": model.mtp.kinds}
        case "hy_v3":
            return _hy3(config)
        case "mimo_v2_flash":
            return _mimo_v2(config)
    return {}
