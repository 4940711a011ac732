"""Rollback of recurrent states: equal to never having seen the rejected tokens, row by row."""

import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, JambaConfig, JambaForCausalLM

from tests.families import RECURRENT, family_config, random_ids, shake
from tests.models import left_padded
from tokenahead import NgramDrafter
from tokenahead.generation.backbone.target import Replay


def recurrent_model(name, **changes):
    torch.manual_seed(0)
    return shake(AutoModelForCausalLM.from_config(family_config(name, 0, **changes))).eval()


def states(cache):
    return [
        state
        for layer in cache.layers
        for name in ("conv_states", "recurrent_states")
        for state in getattr(layer, name, {}).values()
        if state is not None
    ]


@pytest.mark.by_day("kimi_linear", "qwen3_next")
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


@torch.no_grad()
def test_another_thread_on_the_same_model_is_not_recorded():
    model, prompt, block = recurrent_model("qwen3_next"), random_ids(2, 7), random_ids(2, 4, seed=1)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    for cache in caches:
        model(prompt, past_key_values=cache, use_cache=True)
    replays = [Replay(model.get_decoder(), cache) for cache in caches]
    with replays[0].record():
        model(block, past_key_values=caches[0], use_cache=True)

    def meanwhile():
        cache = DynamicCache(config=model.config)
        model(random_ids(1, 9, seed=2), past_key_values=cache, use_cache=True)
        handles = [next(iter(mixer._forward_pre_hooks.values())) for (mixer,) in replays[1].mixers.values()]
        for hook in handles:  # torch forgets that a hook takes keyword arguments when another thread removes it
            hook(None, (random_ids(1, 9),))

    with replays[1].record():
        model(block, past_key_values=caches[1], use_cache=True)
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
    for replay in replays:
        replay.keep([3, 1])
    for got, want in zip(states(caches[1]), states(caches[0])):
        assert torch.equal(got, want)


OTHERS = {  # backbones that have no modules: a layer that also attends, convolutions alone, states alone
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    "lfm2": {"full_attn_idxs": [1]},
    "mamba": {},
}


def other_backbone(name):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(name, vocab_size=5, num_key_value_heads=2, **sizes, **OTHERS[name])
    return shake(AutoModelForCausalLM.from_config(config)).eval()


@pytest.mark.core
def test_drafters_of_any_kind_speculate_on_recurrent_backbones(caplog):
    for name in ["nemotron_h", "falcon_h1", "lfm2", "mamba"]:
        model = other_backbone(name) if name in OTHERS else recurrent_model(name, vocab_size=5)
        batch = left_padded(
            [torch.randint(0, 5, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 5, 7, 12)]
        )
        options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        plain = model.generate(**batch, **options)
        drafter = NgramDrafter().attach(model)
        out = model.generate(**batch, assistant_model=drafter, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, plain)
        if name == "mamba":  # no column tells how long its cache is
            assert getattr(out, "speculation", None) is None
        else:
            assert max(set().union(*out.speculation.rows_accepted)) > 0


@pytest.mark.core
def test_mixers_that_begin_a_block_without_its_state_decode_plainly():
    """Jamba's do: a block behind a cache would be read as if nothing stood before it."""
    config = JambaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_experts=1,
        num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False, mamba_d_state=4,
        mamba_dt_rank=4, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = shake(JambaForCausalLM(config)).eval()
    prompt, drafter = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]]), NgramDrafter().attach(model)
    want = model.generate(prompt, max_new_tokens=12, do_sample=False, use_mtp=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=12, do_sample=False, assistant_model=drafter), want)
    with pytest.raises(ValueError, match="JambaForCausalLM"):
        model.generate(prompt, max_new_tokens=12, assistant_model=drafter, use_mtp=True)


def test_adapters_named_for_every_row_are_those_of_the_row_in_replay():
    """peft gives each sequence of a batch another adapter, by its index in the batch."""
    model = recurrent_model("qwen3_next")
    targets = ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    adapted.add_adapter("other", LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    adapted.eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    drafter = NgramDrafter(longest=1, num_tokens=4).attach(adapted)
    batch = left_padded([torch.arange(5, 9).repeat(2), torch.arange(7, 11), torch.arange(4, 10), torch.arange(8, 14)])
    options = batch | dict(max_new_tokens=16, do_sample=False, adapter_names=["default", "other", "__base__", "other"])
    plain = adapted.generate(**options)
    out = adapted.generate(**options, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert len({len(row) for row in out.speculation.rows_accepted}) > 1
