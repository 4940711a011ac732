"""Tiny models for `benchmarks/serving.py`, large enough for vLLM's CPU kernels, trained until their drafts are right.

The text that they learn: the next token is one of two permutations of the last token; which one, the parity of the
token before it says. So a drafter needs the hidden state and the newest token, and a mistake in either shows. The two
permutations differ by the last bit of what they permute, so no two positions of the text have the same successor, and
it seldom repeats itself.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tokenahead import DeepSeekMTP
from tokenahead.configuration.mtp_families import set_modules
from tokenahead.generation.backbone.wrapped_models import untyped

Module = TypeVar("Module", bound=nn.Module)
VOCABULARY, WIDTH = 128, 64
REJECTED = 0.3
"""The share of a module's first drafts that its main model rejects, at least."""
_COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256, pad_token_id=None, bos_token_id=None,
    eos_token_id=None, tie_word_embeddings=False,
)  # fmt: skip
_FEW = dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, num_shared_experts=1)
_EXPERTS = dict(
    moe_intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
    n_group=1, topk_group=1,
)  # fmt: skip
_LATENT = dict(  # the ranks that vLLM's kernel has on CPUs
    kv_lora_rank=512, q_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=32, v_head_dim=32, head_dim=64
)
_DELTA = dict(  # one recurrent layer, with the head dimension that vLLM's kernel has on CPUs, and one of attention
    layer_types=["linear_attention", "full_attention"], linear_key_head_dim=128, linear_value_head_dim=128,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_conv_kernel_dim=4,
)  # fmt: skip
_ROUTED = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
_MIXED = dict(
    rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[6, 5, 5], partial_rotary_factor=1.0)
)
_EYE = dict(
    depth=1, hidden_size=64, intermediate_size=64, num_heads=2, patch_size=4, spatial_merge_size=2,
    temporal_patch_size=2, in_channels=3, out_hidden_size=WIDTH,
)  # fmt: skip
_WIDE = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=128)
TOWERS: dict[str, dict[str, Any]] = {
    "exaone4_5": dict(
        text_config=_COMMON | _WIDE | dict(model_type="exaone4"),
        vision_config=_EYE | dict(num_key_value_heads=2, window_size=16, fullatt_block_indexes=[0]),
    ),
    "glm_ocr": dict(text_config=_COMMON | _MIXED, vision_config=_EYE | dict(image_size=32)),
    "qwen3_5": dict(text_config=_COMMON | _DELTA, vision_config=_EYE | dict(num_position_embeddings=64)),
}
"""Models with a tower for images, which are asked with text."""
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _EXPERTS | _LATENT,
    "ernie4_5_moe": dict(moe_intermediate_size=64, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    "exaone_moe": _WIDE | _FEW | dict(first_k_dense_replace=1),
    "gemma2": dict(final_logit_softcapping=20.0, query_pre_attn_scalar=32, tie_word_embeddings=True),
    "glm4_moe": _EXPERTS,
    "glm4_moe_lite": _EXPERTS | _LATENT,
    "hy_v3": _FEW,
    "llama": {},
    "longcat_flash": _LATENT
    | dict(num_layers=2, ffn_hidden_size=128, expert_ffn_hidden_size=64)
    | dict(moe_topk=2, n_routed_experts=4, zero_expert_num=2),
    "mimo": {},
    "mimo_v2_flash": _EXPERTS | _WIDE | dict(num_key_value_heads=1, v_head_dim=32, mlp_layer_types=["dense", "sparse"]),
    "mistral": dict(sliding_window=None),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": {},
    "qwen3_5_moe_text": _DELTA | _ROUTED,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | _ROUTED | dict(decoder_sparse_step=1),
}


def text(rows: int, length: int, seed: int, noise: float = 0.0) -> torch.Tensor:
    """Token ids [rows, length] of the text; a share `noise` of the tokens is drawn uniformly."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(VOCABULARY, generator=generator)
    tables = torch.stack([table, table[torch.arange(VOCABULARY) ^ 1]])
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    random = torch.rand(rows, length, generator=generator) < noise
    for i in range(2, length):
        ids[:, i] = torch.where(random[:, i], ids[:, i], tables[ids[:, i - 2] % 2, ids[:, i - 1]])
    return ids


def train(model: Module, steps: int, rate: float = 3e-3) -> Module:
    """Trains what is not frozen on fresh text, and leaves the model in evaluation mode."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=rate / 30)
    model.train()
    for step in range(steps):
        ids = text(16, 48, seed=1000 + step, noise=0.05)
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@torch.no_grad()
def unsettle(drafter: Module, share: float = 0.5) -> Module:
    """Adds noise to every matrix that learned, `share` of its spread, so that rejected drafts are compared as well."""
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            parameter += share * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return drafter


@torch.no_grad()
def unsettle_modules(model: DeepSeekMTP) -> None:
    """Adds noise to modules until `REJECTED` of their drafts are not what the main model goes on with."""
    ids = text(16, 48, seed=500)
    rejected = 0.0
    while rejected < REJECTED:
        unsettle(model.mtp, 0.1)
        out = model(ids, output_mtp_logits=True)
        drafted, wanted = out.mtp_logits[0].argmax(-1), out.logits[:, 1:].argmax(-1)
        rejected = (drafted != wanted)[:, 2:].float().mean().item()


def config(name: str, modules: int = 0, **changes: Any) -> Any:
    """A tiny configuration."""
    sizes = TOWERS[name] if name in TOWERS else _COMMON | FAMILIES[name]
    found = AutoConfig.for_model(name, **(sizes | changes))
    set_modules(found, modules)
    return found


def with_modules(name: str, steps: int) -> DeepSeekMTP:
    """A trained model with one module, which is then unsettled."""
    torch.manual_seed(0)
    model = train(DeepSeekMTP(config(name, 1)), steps)
    unsettle_modules(model)
    return model


def backbone(name: str, steps: int, **changes: Any) -> PreTrainedModel:
    """A trained plain model."""
    torch.manual_seed(0)
    model = train(AutoModelForCausalLM.from_config(config(name, **changes)), steps)
    untyped(model).generation_config.eos_token_id = None
    return model.requires_grad_(False)
