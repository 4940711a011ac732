"""Tiny configurations of every family that `DeepSeekMTP` supports, and random models of them."""

import torch
from transformers import (
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    GemmaConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    HYV3Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tokenahead import DeepSeekMTP

VOCABULARY = 96
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    num_nextn_predict_layers=1,
)
_EXPERTS = dict(
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
)
_LATENT = dict(
    kv_lora_rank=16,
    q_lora_rank=None,
    qk_rope_head_dim=8,
    v_head_dim=8,
    qk_nope_head_dim=8,
    num_key_value_heads=4,
)
_FAMILIES = {
    "deepseek_v3": (DeepseekV3Config, _EXPERTS | _LATENT),
    "glm4_moe": (Glm4MoeConfig, _EXPERTS | dict(head_dim=8)),
    "glm4_moe_lite": (Glm4MoeLiteConfig, _EXPERTS | _LATENT | dict(q_lora_rank=16)),
    "hy_v3": (
        HYV3Config,
        dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, num_shared_experts=1, head_dim=8),
    ),
    "ernie4_5_moe": (
        Ernie4_5_MoeConfig,
        dict(moe_intermediate_size=16, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    ),
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, dict(head_dim=8)),
    "mistral": (MistralConfig, dict(sliding_window=6)),
    "gemma": (GemmaConfig, dict(head_dim=8)),
}
NAMES = list(_FAMILIES)
RETROFITS = ["llama", "qwen2", "qwen3", "mistral", "gemma"]


def family_config(name: str, **changes):
    """A tiny configuration with one module."""
    kind, options = _FAMILIES[name]
    return kind(**(_COMMON | options | changes))


def shake(model, seed: int = 0, size: float = 0.1):
    """Adds noise to all parameters, so that no norm and no router is left at its start."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * size
    return model


def family_model(name: str, seed: int = 0, **changes) -> DeepSeekMTP:
    """A random model of `family_config`, in evaluation mode."""
    torch.manual_seed(seed)
    return shake(DeepSeekMTP(family_config(name, **changes)), seed).eval()


def random_ids(batch: int = 2, length: int = 16, seed: int = 0) -> torch.Tensor:
    """Token ids [batch, length]."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
