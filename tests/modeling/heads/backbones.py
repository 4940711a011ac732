"""Tiny backbones for heads that live apart, one of each kind of head, and goldens."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

GOLDENS = Path(__file__).parents[2] / "data" / "heads"
KINDS = {
    "medusa": {"head_type": "medusa"},
    "medusa-own": {"head_type": "medusa", "unembedding": "own", "num_blocks": 2, "tied_blocks": True},
    "blockwise": {"head_type": "medusa", "block": "ffn", "block_size": 24},
    "hydra": {"head_type": "hydra", "num_blocks": 2},
    "hydra-ungrounded": {"head_type": "hydra", "grounded": False, "state_offset": 1},
    "hydra++": {"head_type": "hydra", "arch": "prefix-mlp", "unembedding": "own"},
    "layer": {"head_type": "layer"},
    "layer-weighted": {"head_type": "layer", "mix": "weighted", "mix_init": "uniform", "first": "own"},
}


def backbone(config_class=LlamaConfig, **changes):
    """A model of three layers, width 32 and 64 tokens, without an end of text."""
    torch.manual_seed(1)
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config_class(**(sizes | changes))).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def shaken(heads, by: float = 0.15):
    """The heads with noise on every weight, so that no two of them agree."""
    generator = torch.Generator().manual_seed(3)
    for parameter in heads.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * by)
    return heads
