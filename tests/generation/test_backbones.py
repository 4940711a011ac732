"""Backbones whose attention cannot follow what drafts do to columns: refused by name, or given chains."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    FalconConfig,
    GPTNeoConfig,
    MegatronBertConfig,
    MptConfig,
    OpenAIGPTConfig,
    RoFormerConfig,
    RoFormerForCausalLM,
)

from tests.backbones import backbone, plain_continuations, prompts, train_heads
from tests.models import left_padded
from tokenahead import NgramDrafter
from tokenahead.configuration.cache_names import CACHE

IDS = dict(vocab_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.3)
SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
LOCAL = dict(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=6)
CONFIGS = {
    "falcon": lambda: FalconConfig(alibi=True, **SIZES, **IDS),
    "bloom": lambda: BloomConfig(hidden_size=32, n_layer=2, n_head=4, **IDS),
    "mpt": lambda: MptConfig(use_cache=True, d_model=32, n_layers=2, n_heads=4, expansion_ratio=2, **IDS),
    "gpt_neo": lambda: GPTNeoConfig(max_position_embeddings=256, **LOCAL, **IDS),
}
WHY = {"gpt_neo": "local attention"}


def model_of(name):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.by_day("falcon", "bloom")
@pytest.mark.parametrize("name", CONFIGS)
def test_distances_of_columns_allow_chains_and_no_trees(name):
    model, batch = model_of(name), prompts(4)
    options = dict(max_new_tokens=16, do_sample=False)
    want, drafter = plain_continuations(model, batch, 16), NgramDrafter(longest=1, num_tokens=4).attach(model)
    out = model.generate(**left_padded(batch), assistant_model=drafter, return_dict_in_generate=True, **options)
    assert out.sequences[:, -16:].tolist() == [text.tolist() for text in want]
    assert len({len(row) for row in out.speculation.rows_accepted}) > 1
    wide = NgramDrafter(longest=1, num_tokens=4, branches=3).attach(model)
    message = f"{name}: {WHY.get(name, 'ALiBi')} takes distances from columns.*draft_tree"
    for asked in (dict(assistant_model=wide), dict(assistant_model=drafter, draft_tree={"top_k": 2})):
        with pytest.raises(ValueError, match=message):
            model.generate(**left_padded(batch), **options, **asked)
    assert model.generate(**left_padded(batch), assistant_model=wide, use_mtp=False, **options).shape[0] == 4


def test_a_forward_without_positions_is_refused():
    config = RoFormerConfig(embedding_size=32, intermediate_size=64, is_decoder=True, **SIZES, **IDS)
    with pytest.raises(ValueError, match="RoFormerForCausalLM.*position_ids"):
        NgramDrafter().attach(RoFormerForCausalLM(config))


def test_encoders_are_refused_and_the_same_layers_as_decoders_are_not():
    for kind in [BertConfig, MegatronBertConfig]:
        model = AutoModelForCausalLM.from_config(kind(intermediate_size=64, **SIZES, **IDS))
        with pytest.raises(ValueError, match="is_decoder="):
            NgramDrafter().attach(model)
        model = AutoModelForCausalLM.from_config(kind(intermediate_size=64, is_decoder=True, **SIZES, **IDS))
        NgramDrafter().attach(model)


def test_a_model_without_a_cache_is_refused():
    config = OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=48)
    with pytest.raises(ValueError, match=f"OpenAIGPTLMHeadModel.*{CACHE}"):
        NgramDrafter().attach(AutoModelForCausalLM.from_config(config))


def test_trees_need_attention_with_dense_masks():
    for kind in ["heads", "ngram"]:
        model, prompt = backbone(), prompts(4)[3][None]
        drafter = train_heads(model, steps=1) if kind == "heads" else NgramDrafter(branches=2).attach(model)
        asked = {"draft_tree": {"depth": 1, "top_k": 2, "total_tokens": 4}} if kind == "heads" else {}
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(ValueError, match="flash_attention_2"):
            model.generate(prompt, assistant_model=drafter, max_new_tokens=8, **asked)
