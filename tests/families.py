"""Tiny configurations of every family that `DeepSeekMTP` supports, and random models of them."""

import torch
from transformers import AutoConfig

from tokenahead import DeepSeekMTP
from tokenahead.configuration.mtp_families import FAMILIES, RETROFIT, set_modules

VOCABULARY = 96
_COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
_EXPERTS = dict(
    moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
    n_group=1, topk_group=1,
)  # fmt: skip
_LATENT = dict(
    kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, num_key_value_heads=4
)
_INDEXED = _LATENT | dict(q_lora_rank=16, index_topk=6, index_head_dim=16, index_n_heads=16)
_DELTA = dict(
    head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    layer_types=["linear_attention", "full_attention", "linear_attention"], num_hidden_layers=3,
)  # fmt: skip
_QWEN_EXPERTS = dict(moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
_POOLED = dict(
    layer_types=["linear_attention", "indexed_attention", "linear_attention"], hc_count=2, hc_lowrank=8,
    ple_layer_ids=[1], ngram_vocab_size_base=20, heads_per_ngram=2, make_ngram_vocab_size_divisible_by=4,
    split_ngram_parts=2, indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=6,
    indexer_compress_ratio=2, eos_token_id=1,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2], partial_rotary_factor=0.5),
)  # fmt: skip
_KDA = _LATENT | dict(
    layer_types=["linear_attention", "full_attention", "linear_attention"], num_hidden_layers=3,
    moe_intermediate_size=16, num_experts_per_tok=2, num_local_experts=4, n_group=1, topk_group=1,
)  # fmt: skip
_CONVOLVED = dict(
    head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=1, swa_head_dim=8, sliding_window_size=6, d_rel=4,
    rel_extent=9, log_scaling_n_floor=4, conv_kernel_size=4, mlp_layer_types=["dense", "sparse"],
    moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, route_scale=2.0,
    logits_mup_width_multiplier=2.0, chain_hidden_post_norm=True,
)  # fmt: skip
_WINDOWS = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6)
_FAMILIES = {
    "bailing_hybrid": _KDA | dict(head_dim=8, short_conv_kernel_size=3, first_k_dense_replace=1),
    "deepseek_v3": _EXPERTS | _LATENT, "deepseek_v32": _EXPERTS | _INDEXED,
    "deepseek_v4": dict(
        num_hidden_layers=3,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        compress_rates={"heavily_compressed_attention": 5, "compressed_sparse_attention": 2},
        mlp_layer_types=["hash_moe", "moe", "moe"], sliding_window=6, num_key_value_heads=1, head_dim=16,
        q_lora_rank=16, partial_rotary_factor=0.5, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        o_groups=2, o_lora_rank=8, index_n_heads=16, index_head_dim=8, index_topk=3, hc_mult=2, hc_sinkhorn_iters=3,
    ),
    "dots3_note_text": _EXPERTS
    | _INDEXED
    | dict(
        head_dim=16, layer_types=["indexed_attention", "sliding_attention"], sliding_window=6,
        swa_num_attention_heads=2, swa_num_key_value_heads=2, swa_q_lora_rank=16, swa_kv_lora_rank=16, swa_head_dim=16,
        swa_qk_nope_head_dim=8, swa_v_head_dim=8, shared_experts_intermediate_size=16,
    ),
    "ernie4_5_moe": dict(moe_intermediate_size=16, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    "exaone_moe": _WINDOWS | dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8),
    "gemma": dict(head_dim=8), "glm4_moe": _EXPERTS | dict(head_dim=8),
    "glm4_moe_lite": _EXPERTS | _LATENT | dict(q_lora_rank=16),
    "glm_moe_dsa": _EXPERTS | _INDEXED | dict(indexer_types=["full", "shared"]),
    "hy_v3": dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, num_shared_experts=1, head_dim=8),
    "hy_v4": _INDEXED
    | dict(
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, indexer_types=["full", "shared"], hc_mult=2
    ),
    "inkling_text": _CONVOLVED | dict(layer_types=["hybrid_sliding", "hybrid"], mtp_local_layer_ids=[1]),
    "kimi_linear": _KDA | dict(linear_head_dim=8, linear_num_heads=4), "llama": {}, "longcat_flash": _LATENT
    | dict(
        num_layers=2, q_lora_rank=16, head_dim=8, ffn_hidden_size=48, expert_ffn_hidden_size=16, moe_topk=2,
        n_routed_experts=4, zero_expert_num=1,
    ),
    "mellum": _WINDOWS | dict(head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2), "mimo": {},
    "mimo_v2_flash": _EXPERTS | _WINDOWS | dict(head_dim=8, v_head_dim=8, num_key_value_heads=1),
    "mistral": dict(sliding_window=6),
    "nemotron_h": dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention"], head_dim=8,
        ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=8, n_groups=2, chunk_size=8, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, moe_shared_expert_intermediate_size=16,
    ),
    "qwen2": dict(tie_word_embeddings=True), "qwen3": dict(head_dim=8), "qwen3_5_moe_text": _DELTA | _QWEN_EXPERTS,
    "qwen3_5_text": _DELTA, "qwen3_next": _DELTA | _QWEN_EXPERTS, "qwen4_exp_text": _DELTA | _QWEN_EXPERTS | _POOLED,
}  # fmt: skip
_SPARSE = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, num_local_experts=4)
_BACKBONES = {
    "apertus": {}, "arcee": {}, "bitnet": {}, "cohere2": _WINDOWS, "diffllama": {},
    "deepseek_v2": _EXPERTS | _LATENT | dict(head_dim=8, topk_method="greedy"), "dots1": _EXPERTS,
    "ernie4_5": dict(head_dim=8), "exaone4": _WINDOWS,
    "gemma2": _WINDOWS | dict(head_dim=8, final_logit_softcapping=2.0), "gemma3_text": _WINDOWS | dict(head_dim=8),
    "glm": dict(head_dim=8), "glm4": dict(head_dim=8), "gpt_oss": _WINDOWS | _SPARSE | dict(head_dim=8),
    "granite": dict(logits_scaling=4.0, embedding_multiplier=3.0), "granitemoe": _SPARSE | dict(logits_scaling=4.0),
    "helium": dict(head_dim=8), "hunyuan_v1_dense": dict(head_dim=8),
    "hunyuan_v1_moe": dict(head_dim=8, num_experts=4, moe_topk=2), "minimax_m2": _SPARSE | dict(head_dim=8),
    "ministral3": dict(head_dim=8), "mixtral": _SPARSE | dict(sliding_window=6, head_dim=8),
    "nemotron": dict(head_dim=8), "olmo2": {}, "olmoe": {}, "olmo3": _WINDOWS, "persimmon": {}, "phi": {},
    "phi3": dict(sliding_window=6), "qwen2_moe": _SPARSE | dict(shared_expert_intermediate_size=16),
    "qwen3_moe": _SPARSE | dict(head_dim=8), "seed_oss": dict(head_dim=8), "smollm3": dict(no_rope_layers=[1, 0]),
    "stablelm": {}, "starcoder2": dict(sliding_window=6),
}  # fmt: skip
CHUNKED = dict(
    hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, num_local_experts=2, no_rope_layers=[1, 0], attention_chunk_size=6,
    layer_types=["chunked_attention", "full_attention"], pad_token_id=None, bos_token_id=None,
)  # fmt: skip
"""Of Llama 4's text, which has chunks instead of windows."""
NAMES = list(_FAMILIES)
"""Families that are held in every way."""
BACKBONES = list(_BACKBONES)
"""Further backbones that modules can be made for."""
RETROFITS = [name for name in NAMES if FAMILIES.get(name, RETROFIT) is RETROFIT]
RECURRENT = ["bailing_hybrid", "kimi_linear", "nemotron_h"]
RECURRENT += ["qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text"]


def family_config(name: str, num_nextn_predict_layers: int = 1, **changes):
    """A tiny configuration with so many modules."""
    config = AutoConfig.for_model(name, **(_COMMON | (_FAMILIES | _BACKBONES)[name] | changes))
    set_modules(config, num_nextn_predict_layers)
    return config


def shake(model, seed: int = 0, size: float = 0.1):
    """Adds noise to all parameters, so that no norm and no router is left at its start."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * size
    return model


def family_model(name: str, seed: int = 0, num_nextn_predict_layers: int = 1, **changes) -> DeepSeekMTP:
    """A random model of `family_config`, in evaluation mode."""
    torch.manual_seed(seed)
    return shake(DeepSeekMTP(family_config(name, num_nextn_predict_layers, **changes)), seed).eval()


def most_modules(name: str, wanted: int = 2) -> int:
    """As many modules as wanted, or as the family can have."""
    return min(wanted, FAMILIES.get(name, RETROFIT).most_modules or wanted)


def random_ids(batch: int = 2, length: int = 16, seed: int = 0) -> torch.Tensor:
    """Token ids [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
