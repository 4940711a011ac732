"""Rotary frequencies that depend on the longest position of a forward: drafts only where that changes nothing."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from tests.models import left_padded
from tokenahead import AssistantDrafter, EagleHead, MTPHeads, NgramDrafter, PTPForCausalLM

BORDER = 160
_SIZES = dict(
    vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
_LONG = dict(short_factor=[1.0] * 4, long_factor=[1.0, 8.0, 16.0, 32.0])


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=BORDER, rope_parameters=rope, **_SIZES))


def longrope():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BORDER, **_LONG}
    lengths = dict(max_position_embeddings=4 * BORDER, original_max_position_embeddings=BORDER)
    return Phi3ForCausalLM(Phi3Config(rope_parameters=rope, **lengths, **_SIZES))


DRAFTERS = {
    "n-gram": lambda model: NgramDrafter(longest=1).attach(model),
    "n-gram tree": lambda model: NgramDrafter(longest=1, branches=3).attach(model),
    "heads": lambda model: MTPHeads.from_backbone(model, window=4, unembedding="own"),
    "EAGLE": lambda model: EagleHead.from_backbone(model, version=1),
    "assistant": lambda model: AssistantDrafter(LlamaForCausalLM(LlamaConfig(**_SIZES)).eval()).attach(model),
}


def made(kind):
    torch.manual_seed(3)
    model = kind().eval()
    model.generation_config.eos_token_id = None
    return model


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return left_padded([torch.randint(2, 48, (length,), generator=generator) for length in lengths])


@pytest.mark.by_day("ragged-dynamic-heads", "alone-longrope-n-gram")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", [dynamic, longrope])
@pytest.mark.parametrize("lengths", [(BORDER - 20,), (BORDER - 20, 3, BORDER - 60)], ids=["alone", "ragged"])
def test_a_text_across_the_border_is_decoded_plainly(kind, drafter, lengths):
    model, inputs = made(kind), prompts(*lengths)
    want = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    assistant = DRAFTERS[drafter](model)
    found = model.generate(**inputs, max_new_tokens=30, do_sample=False, assistant_model=assistant)
    assert torch.equal(found, want)
    with pytest.raises(
        ValueError, match=f"use_mtp=True cannot be combined with rope_type='{kind.__name__}' of .* {BORDER}"
    ):
        model.generate(**inputs, max_new_tokens=30, assistant_model=assistant, use_mtp=True)


@pytest.mark.by_day("alone-dynamic-n-gram tree", "ragged-longrope-EAGLE")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("kind", [dynamic, longrope])
@pytest.mark.parametrize("lengths", [(9,), (12, 3, 7)], ids=["alone", "ragged"])
def test_a_text_below_the_border_is_drafted(kind, drafter, lengths):
    model, inputs = made(kind), prompts(*lengths)
    want = model.generate(**inputs, max_new_tokens=60, do_sample=False)
    options = dict(do_sample=False, assistant_model=DRAFTERS[drafter](model), use_mtp=True)
    found = model.generate(**inputs, max_new_tokens=60, **options, return_dict_in_generate=True)
    assert torch.equal(found.sequences, want)
    assert any(draft for row in found.speculation.rows_drafts for draft in row)


def test_a_text_behind_the_border_of_longrope_is_drafted():
    for lengths in [(BORDER + 1,), (BORDER + 12, 30, BORDER - 4)]:
        model, inputs = made(longrope), prompts(*lengths)
        want = model.generate(**inputs, max_new_tokens=30, do_sample=False)
        drafter = DRAFTERS["n-gram"](model)
        found = model.generate(**inputs, max_new_tokens=30, do_sample=False, assistant_model=drafter, use_mtp=True)
        assert torch.equal(found, want)


def test_a_source_of_uniforms_is_refused_across_the_border():
    model = PTPForCausalLM.from_backbone(made(dynamic), num_slots=3)
    with pytest.raises(ValueError, match="seed=.*rope_type=.*'dynamic'"):
        model.generate(**prompts(BORDER - 5), max_new_tokens=30, do_sample=True, seed=3)
