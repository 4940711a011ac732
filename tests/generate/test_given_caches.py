"""A cache that the caller passes in holds, after the call, what plain decoding would have left: the text goes on."""

import itertools

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from tests.backbones import backbone, prompts
from tests.models import left_padded, trained_model
from tests.ptp_models import VOCABULARY, student
from tokenahead import NgramDrafter

NEW, MORE = 16, 8


def goes_on(model, batch, cache, answer, further, **options):
    """Whether a text goes on behind a new turn from the cache of the last one as it does without any cache."""
    first = model.generate(**batch, max_new_tokens=NEW, do_sample=False, past_key_values=cache, **answer, **options)
    text = first.sequences if answer.get("return_dict_in_generate") else first
    width, rows = batch["input_ids"].shape[1], len(text)
    ids = torch.cat([text, torch.tensor([[5, 6, 7]]).expand(rows, -1)], dim=1)
    written = torch.nn.functional.pad((text[:, width:] != 0).long(), (0, 3), value=1)
    whole = {"input_ids": ids, "attention_mask": torch.cat([batch["attention_mask"], written], dim=1)}
    common = dict(max_new_tokens=MORE, do_sample=False, eos_token_id=None, pad_token_id=0) | further
    again = model.generate(**whole, past_key_values=cache, **common)
    return torch.equal(again, model.generate(**whole, **common))


def test_columns_are_laid_out_as_the_text_is():
    for answer, name in itertools.product([{}, {"return_dict_in_generate": True}], ["llama", "mistral"]):
        model = backbone(name)
        drafter = NgramDrafter(longest=1, num_tokens=4).attach(model)
        cache = DynamicCache(config=model.config)
        assert goes_on(model, left_padded(prompts(4)), cache, answer, {}, assistant_model=drafter)


def test_rows_that_ended_early_are_fed_to_their_end():
    for answer in [{}, {"return_dict_in_generate": True}]:
        model = trained_model()
        texts = [torch.randint(70, 190, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 14)]
        batch = left_padded(texts)
        plain = model.generate(**batch, max_new_tokens=NEW, do_sample=False, use_mtp=False)
        ends = dict(eos_token_id=int(plain[0, 14 + 6]), pad_token_id=0)
        assert goes_on(model, batch, model.own_cache()(), answer, {"use_mtp": False}, **ends)


@pytest.mark.core
def test_columns_of_a_static_cache_are_those_of_the_text():
    """No rollback there: a row that ends early goes on being fed, as in transformers' own loop."""
    model = student()
    batch, common = left_padded(prompts(2, VOCABULARY)), dict(do_sample=True, max_new_tokens=12, pad_token_id=0, seed=0)
    text = model.generate(**batch, **common, use_mtp=False)
    width = batch["input_ids"].shape[1]
    cache = StaticCache(config=model.config, max_cache_len=64)
    common["eos_token_id"] = int(text[0, width + 3])
    out = model.generate(**batch, **common, use_mtp=False, past_key_values=cache)
    assert len({len(row[width:][row[width:] != 0]) for row in out}) == 2, "one row must end earlier"
    assert int(cache.get_seq_length()) == out.shape[1] - 1


def test_a_call_that_fails_leaves_layers_of_transformers():
    model, prompt, cache = backbone(), torch.full((2, 6), 5), DynamicCache()
    drafter = NgramDrafter().attach(model)

    def fail(ids, scores):
        if ids.shape[1] > 8:
            raise RuntimeError("stop")
        return scores

    with pytest.raises(RuntimeError, match="stop"):
        model.generate(
            prompt, past_key_values=cache, max_new_tokens=8, assistant_model=drafter, logits_processor=[fail]
        )
    assert {type(layer) for layer in cache.layers} == {DynamicLayer} and cache.get_seq_length() >= 6
