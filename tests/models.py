"""Small models and prompts that several tests share."""

from pathlib import Path

import torch

from tokenahead import EvaByteConfig, EvaByteForMTPC

GOLDENS = Path(__file__).parent / "data" / "evabyte"
TRAINED = GOLDENS / "vis_c_w32c4h8_trained"


def tiny_config(**changes) -> EvaByteConfig:
    """EvaByte with a window of 32, chunks of 4 and 8 heads."""
    options = dict(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        window_size=32,
        chunk_size=4,
        num_pred_heads=8,
        max_position_embeddings=1024,
        initializer_range=0.2,
    )
    return EvaByteConfig(**(options | changes))


def tiny_model(seed: int = 0, **changes) -> EvaByteForMTPC:
    """A random model of `tiny_config` that never ends a text by itself."""
    torch.manual_seed(seed)
    model = EvaByteForMTPC(tiny_config(**changes)).eval()
    model.generation_config.eos_token_id = None
    return model


def trained_model() -> EvaByteForMTPC:
    """The briefly trained golden model, without eos."""
    model = EvaByteForMTPC.from_pretrained(TRAINED, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def left_padded(prompts: list[torch.Tensor], pad: int = 0) -> dict[str, torch.Tensor]:
    """A batch for `generate` from prompts of different lengths."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0), value=pad) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": (torch.arange(width) >= width - lengths[:, None]).long()}


def checkpoint_activations(model: torch.nn.Module) -> None:
    """Let a model checkpoint its activations, under the name of the installed transformers (5.23 changed it)."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
