"""Windows that are compressed once they are full: each sequence has its own, however many drafts it accepts."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.families import family_config, family_model, random_ids, shake
from tests.models import left_padded
from tests.verified_blocks import check_blocks
from tokenahead.generation.backbone.backbones import CompressedBackbone, target_of
from tokenahead.generation.call.sequences import NewTokens
from tokenahead.generation.contract import DraftTree


def model_of(**changes):
    torch.manual_seed(3)
    return shake(AutoModelForCausalLM.from_config(family_config("deepseek_v4", 0, **changes))).eval()


@pytest.mark.by_day("rates1-4", "rates2-13")
@pytest.mark.parametrize("prompt", [1, 4, 13])
@pytest.mark.parametrize("rates", [(5, 2), (9, 4), (2, 1)])
@torch.no_grad()
def test_blocks_give_what_single_tokens_give_and_the_cache_that_they_leave(prompt, rates):
    names = ("heavily_compressed_attention", "compressed_sparse_attention")
    model, texts = model_of(compress_rates=dict(zip(names, rates))), random_ids(3, 48)
    cache, expected, last = check_blocks(model, texts, prompt, CompressedBackbone)
    for got, wanted in zip(cache.layers, expected.layers):
        assert type(got) is type(wanted) and got.cumulative_length == wanted.cumulative_length
        pairs = [(got.keys, wanted.keys), (got.values, wanted.values)]
        for part in ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate"):
            pairs += [(vars(got)[part][name], held) for name, held in vars(wanted).get(part, {}).items()]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours[last], theirs[0], atol=2e-5, rtol=0)
        assert vars(got).get("entry_count") == vars(wanted).get("entry_count")


@torch.no_grad()
def test_single_tokens_in_a_row_behind_uneven_texts():
    model, texts = model_of(), random_ids(2, 32)
    cache = DynamicCache(config=model.config)
    model(texts[:, :9], past_key_values=cache)
    target = target_of(model, cache, texts[:, 0], None)
    target.forward(texts[:, 9:14], DraftTree.chain(texts[:, 10:14]), None)
    target.keep(NewTokens([5, 1], texts.device))
    wholes = [model(texts[:1, :20]).logits[0, 14:], model(texts[1:, :16]).logits[0, 10:]]
    for step in range(6):
        block = torch.stack([texts[0, 14 + step], texts[1, 10 + step]])[:, None]
        logits = target.extend(block, logits_to_keep=1).logits
        for row, whole in enumerate(wholes):
            torch.testing.assert_close(logits[row, 0], whole[step], atol=2e-5, rtol=0)


@pytest.mark.by_day("3")
@pytest.mark.parametrize("drafts", [1, 3])
def test_beside_padding_scores_are_those_of_transformers_which_depend_on_it(drafts):
    """Windows count columns, and masks of blocks count tokens: a single token sees more entries than one in a block."""
    model = family_model("deepseek_v4", 1, vocab_size=4)
    padded = left_padded([ids[:length] % 4 for ids, length in zip(random_ids(3, 11), (11, 4, 7))])
    options = dict(max_new_tokens=30, do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=0)
    plain = model.generate(**padded, use_mtp=False, **options)
    out = model.generate(**padded, num_assistant_tokens=drafts, **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert len(set(map(len, out.speculation.rows_accepted))) > 1
    for got, want in zip(out.logits, plain.logits):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    assert not any(module._forward_pre_hooks for module in model.modules())
    alone = model.generate(padded["input_ids"][1:2, 7:], use_mtp=False, **options)
    assert not torch.allclose(alone.logits[0], plain.logits[0][1:2], atol=1e-3)
