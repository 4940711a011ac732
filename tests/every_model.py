"""A small random model of every class that generates, for tests of what they all must do."""

import torch
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.families import family_model
from tests.models import tiny_model
from tests.ptp_models import student
from tokenahead import MTPHeads

MODELS = {
    "evabyte_ff": lambda: tiny_model(),
    "evabyte_btree": lambda: tiny_model(mtp_head={"head_type": "btree", "window": 4, "rank": 2}),
    "evabyte_shared": lambda: tiny_model(
        mtp_head={"head_type": "hmm", "window": 4, "rank": 2, "unembedding": "shared"}
    ),
    "deepseek": lambda: family_model("deepseek_v3", num_nextn_predict_layers=2),
    "deepseek_llama": lambda: family_model("llama"),
    "ptp_one_hot": lambda: student(),
    "ptp_categorical": lambda: student("categorical"),
}
NAMES = list(MODELS)


def every_model(name: str) -> torch.nn.Module:
    """The model of that name, in evaluation mode."""
    return MODELS[name]().eval()


def prompt_for(model: torch.nn.Module, length: int = 7) -> torch.Tensor:
    """Token ids [2, length] of its vocabulary."""
    size = model.config.get_text_config().vocab_size
    return torch.randint(3, size, (2, length), generator=torch.Generator().manual_seed(5))


def texts(model: torch.nn.Module, **options) -> list[torch.Tensor]:
    """What it generates greedily, and sampled from one seed."""
    options = {"max_new_tokens": 9, "pad_token_id": 0} | options
    greedy = model.generate(prompt_for(model), do_sample=False, **options)
    torch.manual_seed(3)
    return [greedy, model.generate(prompt_for(model), do_sample=True, top_k=0, **options)]


def same_texts(model: torch.nn.Module, expected: list[torch.Tensor], **options) -> bool:
    """Whether it generates these."""
    return all(torch.equal(*pair) for pair in zip(texts(model, **options), expected))


def llama(**changes) -> torch.nn.Module:
    """A plain backbone for heads that stand apart."""
    sizes = dict(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(LlamaConfig(**(sizes | changes))).eval()


def moved_heads(base: torch.nn.Module, unembedding: str = "shared", **options) -> MTPHeads:
    """Attached heads that have left their start."""
    heads = MTPHeads.from_backbone(base, window=4, unembedding=unembedding, **options)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return heads
