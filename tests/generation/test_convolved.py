"""Short convolutions and distances between columns: each sequence has its own, however many drafts it accepts."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families import family_config, family_model, random_ids, shake
from tests.models import left_padded
from tests.verified_blocks import check_blocks
from tokenahead.generation.backbone import cache as rows_module
from tokenahead.generation.backbone.backbones import ConvolvedBackbone

KINDS = [["hybrid_sliding", "hybrid"], ["hybrid", "hybrid"], ["hybrid_sliding", "hybrid_sliding"]]


@pytest.fixture(autouse=True, params=[64, 1])
def step(request, monkeypatch):
    """Widths are multiples of 64; with 1, rings are as small as they may be, and grow."""
    monkeypatch.setattr(rows_module, "_STEP", request.param)


def model_of(attention="sdpa", **changes):
    torch.manual_seed(3)
    model = shake(AutoModelForCausalLM.from_config(family_config("inkling_text", 0, **changes))).eval()
    model.set_attn_implementation(attention)
    return model


def ragged(lengths, vocabulary):
    """A batch of prompts of some lengths."""
    ids = random_ids(len(lengths), max(lengths)) % vocabulary
    return left_padded([row[:length] for row, length in zip(ids, lengths)])


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("prompt", [1, 4, 13])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kinds", KINDS)
@torch.no_grad()
def test_blocks_give_what_single_tokens_give_and_the_cache_that_they_leave(prompt, attention, kinds):
    model, texts = model_of(attention, layer_types=kinds), random_ids(3, 48)

    def no_hook_is_left():
        assert not any(module._forward_hooks for module in model.modules())

    more = [7, 1, 3], 9  # longer than a ring of short blocks
    cache, expected, last = check_blocks(model, texts, prompt, ConvolvedBackbone, no_hook_is_left, more)
    for got, wanted in zip(cache.layers, expected.layers):
        assert type(got) is type(wanted) and got.get_seq_length() == wanted.get_seq_length()
        pairs = [(got.keys, wanted.keys), (got.values, wanted.values)]
        pairs += [(got.conv_states[index], held) for index, held in wanted.conv_states.items()]
        assert len(pairs) == 6
        for ours, theirs in pairs:
            torch.testing.assert_close(ours[last], theirs[0], atol=2e-5, rtol=0)


@pytest.mark.by_day("1")
def test_padding_is_no_input_of_convolutions_and_counts_as_columns():
    """transformers scales scores by columns, padding among them, so that its own text depends on it; so does ours."""
    model = family_model("inkling_text", 0, 2, vocab_size=3)
    batch = ragged((11, 2, 6), 3)
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0, output_logits=True)
    options |= dict(return_dict_in_generate=True)
    plain = model.generate(**batch, use_mtp=False, **options)
    out = model.generate(**batch, num_assistant_tokens=3, **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert len({tuple(row) for row in out.speculation.rows_accepted}) > 1
    for got, want in zip(out.logits, plain.logits):
        torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    alone = model.generate(batch["input_ids"][1:2, 9:], use_mtp=False, **options)
    assert not torch.allclose(alone.logits[0], plain.logits[0][1:2], atol=1e-3)


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("vocabulary", [3, 96])
@torch.no_grad()
def test_drafts_in_ragged_batches_are_what_modules_say_of_whole_texts(vocabulary):
    """Padding is no input of the modules' convolutions, and what was drafted in vain is none either."""
    model, batch, new = family_model("inkling_text", 0, 2, vocab_size=vocabulary), ragged((9, 2, 6, 1), vocabulary), 14
    for name, weight in model.named_parameters():
        weight.mul_(10 if "sconv" in name else 1)  # or what is left of padding changes no token
    options = dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True)
    out = model.generate(**batch, num_assistant_tokens=2, **options)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, new), value=1)
    says = [logits.argmax(-1) for logits in model(out.sequences, attention_mask=mask).mtp_logits]
    compared = 0
    for row, (drafts, accepted) in enumerate(zip(out.speculation.rows_drafts, out.speculation.rows_accepted)):
        last = batch["input_ids"].shape[1]  # of the text so far
        for draft, count in zip(drafts, accepted):
            for token, at_depth in zip(draft[: count + 1], says):  # the tokens before it are those of the text
                assert token == at_depth[row, last - 1]
                compared += 1
            last += count + 1
    assert compared > 20


@pytest.mark.by_day("64")
def test_sequences_that_have_ended_are_left_out():
    model = family_model("inkling_text", 0, 2, vocab_size=3)
    batch = ragged(range(3, 9), 3)
    options = dict(max_new_tokens=30, do_sample=False, eos_token_id=2, pad_token_id=0, return_dict_in_generate=True)
    plain = model.generate(**batch, use_mtp=False, **options)
    out = model.generate(**batch, num_assistant_tokens=2, **options)
    assert torch.equal(out.sequences, plain.sequences)
    assert len({len(row) for row in out.speculation.rows_accepted}) > 1
