"""Cases in which transformers' own `use_mtp` raises, is silently wrong or drafts nothing: they work, or say why not.

Training, float8 and labels are tested in tests/modeling and tests/training; shorter prompts than D, earlier caches and
ragged batches in test_lossless_modules.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, StaticCache

from tokenahead import DeepSeekMTP

CHECKPOINT = Path(__file__).parents[1] / "data" / "deepseek_mtp" / "dsv3_d2_trained"
PROMPT = torch.arange(20, 34)[None]


def load(**options):
    model = DeepSeekMTP.from_pretrained(CHECKPOINT, dtype=torch.float32, **options).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.fixture(scope="module")
def model():
    return load()


def greedy(model, prompt=PROMPT, **options):
    defaults = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(prompt, **(defaults | options))


@pytest.fixture(scope="module")
def plain(model):
    return greedy(model, use_mtp=False).sequences


def test_given_static_caches_decode_plainly(model, plain):
    cache = StaticCache(config=model.config, max_cache_len=64)
    assert torch.equal(greedy(model, past_key_values=cache).sequences, plain)
    with pytest.raises(ValueError, match="StaticCache"):
        greedy(model, past_key_values=StaticCache(config=model.config, max_cache_len=64), use_mtp=True)


def test_embeddings_instead_of_ids_decode_plainly(model, plain):
    embeds = model.get_input_embeddings()(PROMPT)
    out = model.generate(inputs_embeds=embeds, max_new_tokens=16, do_sample=False)
    assert torch.equal(out, plain[:, PROMPT.shape[1] :])


def test_fresh_weights_draft_with_their_own_modules():
    config = AutoConfig.from_pretrained(CHECKPOINT)  # knows the path of another model's modules
    torch.manual_seed(0)
    model = DeepSeekMTP(config).eval()
    drafts = greedy(model, eos_token_id=None, pad_token_id=0).speculation.drafts
    with torch.no_grad():
        for parameter in model.mtp.parameters():
            parameter.mul_(-1)
    assert greedy(model, eos_token_id=None, pad_token_id=0).speculation.drafts != drafts
