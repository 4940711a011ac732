"""What is read from small folders: block drafters, and a model with the modules of `use_mtp`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from ...modeling import BlockDrafter, DeepSeekMTP


@cache
def _root() -> tuple[Path, TemporaryDirectory[str]]:
    held = TemporaryDirectory(prefix="tokenahead-verify-")  # removed when the process ends
    return Path(held.name), held


@cache
def model_with_modules(seed: int = 0, vocab_size: int = 6) -> PreTrainedModel:
    """Return a random GLM-4 in float64, read from a folder that holds two modules, as `use_mtp` reads them."""
    torch.manual_seed(seed)
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_group": 1}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        "glm4_moe", vocab_size=vocab_size, **sizes, **experts, num_key_value_heads=2, head_dim=8, topk_group=1,
        first_k_dense_replace=2, num_nextn_predict_layers=2, max_position_embeddings=128, initializer_range=0.5,
        pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = _root()[0] / f"modules-{seed}-{vocab_size}"
    DeepSeekMTP(config).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    model.generation_config.eos_token_id = None
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\."]  # by which `use_mtp` finds the modules
    return model.eval()


@cache
def block_folder(model: PreTrainedModel) -> Path:
    """Return a folder with a random DFlash drafter of a model, in z-lab's layout."""
    torch.manual_seed(2)
    drafter = BlockDrafter.from_backbone(
        model, law="independent", sample_from_anchor=False, layers=1, block_size=4, feature_layers=[1], mask_token_id=1
    )
    folder = _root()[0] / f"block-{id(model)}"
    drafter.export(folder, layout="z-lab")
    drafter.detach()
    return folder
