"""Tiny models with a tower for images and modules, and batches of texts with images for them."""

import copy

import torch
from transformers import AutoConfig

from tests.families import _COMMON, _CONVOLVED, _DELTA, _EXPERTS, _POOLED, _QWEN_EXPERTS, _WINDOWS, shake
from tests.models import left_padded
from tokenahead import DeepSeekMTP
from tokenahead.configuration.mtp_families import family_of, set_modules

_ROTARY = dict(
    rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2], partial_rotary_factor=1.0)
)
_QWEN_EYE = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, spatial_merge_size=2,
    temporal_patch_size=2, in_channels=3, out_hidden_size=32, num_position_embeddings=64,
)  # fmt: skip
_GLM_EYE = {key: value for key, value in _QWEN_EYE.items() if key != "num_position_embeddings"} | dict(image_size=32)
_DELTA_TEXT = _DELTA | dict(
    rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2], partial_rotary_factor=0.5)
)
TOWERS = {
    "qwen3_5": dict(text_config=_COMMON | _DELTA_TEXT, vision_config=_QWEN_EYE),
    "exaone4_5": dict(
        text_config=_COMMON | _WINDOWS | dict(model_type="exaone4"),
        vision_config=_QWEN_EYE | dict(num_key_value_heads=2, window_size=16, fullatt_block_indexes=[0]),
    ),
    "glm5_next": dict(
        text_config=_COMMON
        | dict(
            num_hidden_layers=3,
            num_key_value_heads=4,
            layer_types=["linear_attention", "indexed_attention", "linear_attention"],
            indexer_types=["full"] * 3,
            mlp_layer_types=["dense", "sparse", "sparse"],
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            kv_lora_rank=16,
            q_lora_rank=16,
            v_head_dim=8,
            qk_nope_head_dim=8,
            index_topk=8,
            index_kpool=4,
            index_head_dim=16,
            index_n_heads=16,
            linear_head_dim=8,
            linear_num_heads=2,
            linear_conv_kernel_dim=3,
            hc_mult=2,
        ),
        vision_config=_GLM_EYE | dict(projection_intermediate_size=32),
    ),
    "glm4v_moe": dict(text_config=_COMMON | _ROTARY | _EXPERTS | dict(head_dim=8), vision_config=_GLM_EYE),
    "glm_ocr": dict(text_config=_COMMON | _ROTARY | dict(head_dim=8), vision_config=_GLM_EYE),
    "inkling_mm_model": dict(
        text_config=_COMMON
        | _CONVOLVED
        | dict(layer_types=["hybrid", "hybrid_sliding"], mtp_local_layer_ids=[0], unpadded_vocab_size=None),
        vision_config=dict(
            hidden_size=16, num_hidden_layers=4, num_attention_heads=2, patch_size=4, temporal_patch_size=2
        ),
        audio_config=dict(n_mel_bins=4, mel_vocab_size=8),
    ),
    "qwen4_exp": dict(
        text_config=_COMMON | _DELTA | _QWEN_EXPERTS | _POOLED | dict(ple_layer_ids=[3]), vision_config=_QWEN_EYE
    ),
    "minimax_m3_vl": dict(
        text_config=_COMMON
        | dict(
            head_dim=8,
            rotary_dim=4,
            dense_intermediate_size=48,
            shared_intermediate_size=16,
            intermediate_size=16,
            num_experts_per_tok=2,
            num_local_experts=4,
            layer_types=["full_attention", "minimax_m3_sparse"],
            mlp_layer_types=["dense", "sparse"],
            index_n_heads=2,
            index_head_dim=8,
            index_block_size=4,
            index_topk_blocks=3,
        ),
        vision_config=dict(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            patch_size=4,
            image_size=32,
        ),  # fmt: skip
        projector_hidden_size=32,
    ),
    "qwen3_5_moe": dict(text_config=_COMMON | _DELTA_TEXT | _QWEN_EXPERTS, vision_config=_QWEN_EYE),
    "step3p7": dict(
        text_config=_COMMON
        | dict(
            head_dim=8,
            pad_token_id=0,
            num_sliding_attention_heads=2,
            sliding_window=6,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            share_expert_dim=16,
            swiglu_limits=[0.0, 1.0],
            swiglu_limits_shared=[1.0, 1.0],
            layer_types=["sliding_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse"],
            mtp_layer_types=["sliding_attention", "full_attention"],
            mtp_mlp_layer_types=["dense", "sparse"],
        ),
        vision_config=dict(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=64, patch_size=4, mlp_ratio=2.0
        ),
    ),
}

FLAT = ("exaone4_5", "glm5_next", "inkling_mm_model", "minimax_m3_vl", "step3p7")
"""Those whose positions are the text's, images or not."""
EVEN = ("minimax_m3_vl",)
"""Those that transformers decodes otherwise with padding: what attention chooses depends on columns."""


def tower_model(name: str, vocab_size: int = 96, seed: int = 0) -> DeepSeekMTP:
    """A random model with a tower and two modules, or as many as the family can have, in evaluation mode."""
    parts = copy.deepcopy(TOWERS[name])
    parts["text_config"]["vocab_size"] = vocab_size
    config = AutoConfig.for_model(name, **parts, image_token_id=vocab_size - 1)
    set_modules(config, min(2, family_of(config).most_modules or 2))
    torch.manual_seed(seed)
    return shake(DeepSeekMTP(config), seed).eval()


def image_batch(name: str, texts: int = 2, images: int = 1, vocab_size: int = 96, seed: int = 3) -> dict:
    """Texts of several lengths, or of one (`EVEN`); the first `images` hold an image of 4 x 4 merged patches each."""
    generator, image, rows = torch.Generator().manual_seed(seed), vocab_size - 1, []
    for index in range(texts):
        count = 21 - 16 * (index < images) if name in EVEN else 5 + 3 * index
        words = torch.randint(0, image, (count,), generator=generator)
        rows.append(torch.cat([words[:2], torch.full((16 * (index < images),), image), words[2:]]))
    batch = left_padded(rows)
    if name == "step3p7":
        return batch | {"pixel_values": torch.randn(images, 3, 64, 64, generator=generator)}
    if name == "inkling_mm_model":
        return batch | {"pixel_values": torch.randn(16 * images, 2, 4, 4, 3, generator=generator)}
    pixels = torch.randn(64 * images, 3 * 2 * 4 * 4, generator=generator)
    batch |= dict(pixel_values=pixels, image_grid_thw=torch.tensor([[1, 8, 8]] * images))
    kinds = (batch["input_ids"] == image).int() * batch["attention_mask"].int()
    return batch if name in FLAT else batch | {"mm_token_type_ids": kinds}
