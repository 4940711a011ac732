"""Models in float32 under `torch.autocast`: every drafter and kind of cache, and the plain text up to near-ties."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.backbones import backbone as small_backbone
from tests.families import family_config
from tests.matrix.models import NAMES, entry
from tests.models import left_padded
from tokenahead import NgramDrafter, SuffixDrafter

DTYPES = [torch.bfloat16, torch.float16]
FAMILIES = [
    "deepseek_v3", "deepseek_v4", "qwen3_next", "glm_moe_dsa", "longcat_flash", "inkling_text", "mellum",
    "qwen4_exp_text",
]  # fmt: skip


def near(model, text, plain, dtype, prompts):
    """Whether a text is another one's, or leaves it where the best scores are almost the same."""
    start = prompts["input_ids"].shape[1]
    for row, (own, other) in enumerate(zip(text, plain)):
        differs = (own != other).nonzero()
        if not len(differs):
            continue
        end = int(differs[0])
        mask = torch.cat([prompts["attention_mask"][row : row + 1], torch.ones(1, end - start, dtype=torch.long)], 1)
        with torch.autocast("cpu", dtype), torch.no_grad():
            scores = model(own[None, :end], attention_mask=mask).logits[0, -1].float()
        best = scores.max()
        if min(scores[own[end]], scores[other[end]]) < best - 0.05 * (1 + best.abs()):
            return False
    return True


@pytest.mark.by_day("evabyte-hmm-dtype0", "heads-llama-dtype1", "ptp-categorical-dtype0")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_the_plain_ones_up_to_near_ties(name, dtype):
    made = entry(name)
    inputs = made.inputs(4)
    with torch.autocast("cpu", dtype):
        plain = made.plain(inputs)
        out = made.generate(inputs, return_dict_in_generate=True)
    assert any(map(any, out.speculation.rows_drafts))
    assert near(made.model, out.sequences, plain, dtype, inputs)


@pytest.mark.by_day("deepseek_v4-dtype0", "qwen3_next-dtype1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_caches_of_every_kind(family, dtype):
    model = AutoModelForCausalLM.from_config(family_config(family)).eval()
    drafter = NgramDrafter(longest=1, num_tokens=4).attach(model)
    batch = left_padded([torch.randint(3, 48, (n,)) for n in (9, 4, 13)])
    with torch.autocast("cpu", dtype):
        out = model.generate(
            **batch, assistant_model=drafter, max_new_tokens=24, eos_token_id=None, return_dict_in_generate=True
        )
    assert out.sequences.shape == (3, 37)


def test_a_cache_that_autocast_began_goes_on_in_float32():
    """Values of few bits are in it, which new ones must not be rounded to."""
    model = small_backbone("llama")
    drafter = SuffixDrafter().attach(model)
    ids = torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(1))
    texts = []
    for how in ({}, {"assistant_model": drafter}):
        cache = DynamicCache(config=model.config)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(ids[:, :-1], past_key_values=cache)
        for layer in cache.layers:
            layer.values = layer.values.bfloat16()
        texts.append(model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False, **how))
    assert torch.equal(*texts)
