"""Rollback of recurrent states: equal to never having seen the rejected tokens, row by row."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.families import RECURRENT, family_config, random_ids, shake
from tokenahead.generation.replay import Replay, is_recurrent


def recurrent_model(name):
    torch.manual_seed(0)
    return shake(AutoModelForCausalLM.from_config(family_config(name, 0))).eval()


def states(cache):
    return [
        state
        for layer in cache.layers
        for name in ("conv_states", "recurrent_states")
        for state in getattr(layer, name, {}).values()
        if state is not None
    ]


@pytest.mark.parametrize("name", RECURRENT)
@torch.no_grad()
def test_every_row_keeps_its_own_number_of_tokens(name):
    model, prompt, block, counts = recurrent_model(name), random_ids(4, 7), random_ids(4, 4, seed=1), [4, 0, 2, 1]
    cache = DynamicCache(config=model.config)
    model(prompt, past_key_values=cache, use_cache=True)
    replay = Replay(model.get_decoder(), cache)
    with replay.record():
        model(block, past_key_values=cache, use_cache=True)
    replay.keep(counts)
    for row, count in enumerate(counts):
        alone = DynamicCache(config=model.config)
        model(prompt[row : row + 1], past_key_values=alone, use_cache=True)
        for token in block[row, :count]:
            model(token[None, None], past_key_values=alone, use_cache=True)
        for got, want in zip(states(cache), states(alone)):
            torch.testing.assert_close(got[row], want[0], atol=2e-5, rtol=1e-4)
    assert len(states(cache)) == len(states(alone)) > 0


@torch.no_grad()
def test_states_stay_where_they_are_and_hooks_go():
    model = recurrent_model("qwen3_next")
    cache = DynamicCache(config=model.config)
    model(random_ids(1, 7), past_key_values=cache, use_cache=True)
    addresses = [state.data_ptr() for state in states(cache)]
    replay = Replay(model.get_decoder(), cache)
    with pytest.raises(RuntimeError, match="stopped"), replay.record():
        raise RuntimeError("stopped")
    with replay.record():
        model(random_ids(1, 3), past_key_values=cache, use_cache=True)
    replay.keep([1])
    assert [state.data_ptr() for state in states(cache)] == addresses
    assert not any(module._forward_pre_hooks for module in model.modules()) and not replay.inputs
    assert sorted(replay.mixers) == [0, 2]


def test_a_cache_of_attention_is_not_recurrent():
    assert not is_recurrent(DynamicCache())
    assert is_recurrent(DynamicCache(config=family_config("qwen3_next")))
