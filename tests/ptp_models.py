"""Small backbones and students of parallel token prediction that several tests share."""

import torch
from transformers import (
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tokenahead import PTPForCausalLM

VOCABULARY = 11
_SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64, initializer_range=0.4,
    bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
_TABLE = dict(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None)
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SMALL),
    "qwen2": lambda: Qwen2Config(**_SMALL),
    "qwen3": lambda: Qwen3Config(**_SMALL),
    "mistral": lambda: MistralConfig(**(_SMALL | {"sliding_window": None})),
    "gemma": lambda: GemmaConfig(**_SMALL),
    "gpt2": lambda: GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.4, **_TABLE),
    "opt": lambda: OPTConfig(
        hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
        word_embed_proj_dim=16, init_std=0.4, pad_token_id=0, **_TABLE,
    ),
}  # fmt: skip


def backbone(config: PreTrainedConfig | None = None, seed: int = 0) -> torch.nn.Module:
    """A random Llama, or a model of another config."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config or CONFIGS["llama"]()).eval()


def student(variant: str = "one_hot", base: torch.nn.Module | None = None, **options) -> PTPForCausalLM:
    """A student of three slots whose adapters do something."""
    base = backbone() if base is None else base
    small = {"num_slots": 3, "lora_rank": 2, "features": "bits"}
    model = PTPForCausalLM.from_backbone(base, variant, **small | options)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model


def ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random ids."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


class Places:
    """Draws of a training step that depend on columns alone, however rows are batched."""

    def keys(self, documents):
        return torch.linspace(0.9, 0.1, documents.shape[1]).expand(documents.shape)

    def shares(self, starts, length):
        return ((starts[..., None] + torch.arange(length)) * 0.37).frac().double()
