"""The two names of a cache: 5.24 of transformers calls it `cache`, older versions `past_key_values`."""

import warnings

import pytest
import torch
from transformers import DynamicCache

from tests.every_model import every_model, llama, prompt_for
from tokenahead import NgramDrafter
from tokenahead.configuration.cache_names import CACHE, given_cache, name_of_cache, renamed

NAMES = ["cache", "past_key_values"]
ONE, OTHER = DynamicCache(), DynamicCache()


def test_either_name_means_the_same():
    assert given_cache(ONE, None) is given_cache(None, ONE) is given_cache(ONE, ONE) is ONE
    assert given_cache(None, None) is None
    for name in NAMES:
        assert renamed({name: ONE, "use_cache": True}) == {CACHE: ONE, "use_cache": True}
    assert renamed({"use_cache": True}) == {"use_cache": True}


def test_two_caches_are_refused():
    with pytest.raises(ValueError, match="cache and past_key_values"):
        given_cache(ONE, OTHER)
    with pytest.raises(ValueError, match="cache and past_key_values"):
        renamed({"cache": ONE, "past_key_values": OTHER})


def test_names_of_layers_and_mixers():
    assert name_of_cache(lambda states, layer_past=None: states) == "layer_past"
    assert name_of_cache(lambda states, cache_params=None: states) == "cache_params"
    assert name_of_cache(lambda states, past_key_values=None: states) == "past_key_values"
    assert name_of_cache(lambda states, cache=None: states) == "cache"
    assert name_of_cache(lambda states: states) is None


@pytest.mark.parametrize("name", ["evabyte_btree", "deepseek_llama", "ptp_one_hot"])
@torch.no_grad()
def test_own_forwards_take_both(name):
    model = every_model(name)
    ids = prompt_for(model)[:1]
    for keyword in NAMES:
        cache = getattr(model(ids[:, :-1], use_cache=True), CACHE)
        again = model(ids[:, -1:], use_cache=True, **{keyword: cache})
        assert getattr(again, CACHE) is cache
        torch.testing.assert_close(again.logits[:, -1], model(ids).logits[:, -1])


@pytest.mark.parametrize("keyword", NAMES)
def test_calls_take_both_and_never_warn(keyword):
    model = llama()
    drafter, ids = NgramDrafter(longest=1).attach(model), prompt_for(model)[:1]
    options = dict(do_sample=False, max_new_tokens=6, pad_token_id=0)
    plain = model.generate(ids, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert torch.equal(model.generate(ids, assistant_model=drafter, **options, **{keyword: DynamicCache()}), plain)
