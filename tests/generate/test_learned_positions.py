"""Drafts end with a backbone's table of positions: a text that plain decoding writes to its end is written."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from tests.backbones import plain_continuations
from tests.models import left_padded
from tokenahead import MTPHeads, NgramDrafter, PTPStudent

TABLE = 32
_IDS = dict(vocab_size=48, pad_token_id=0, bos_token_id=1, eos_token_id=None)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=TABLE, initializer_range=0.3, **_IDS))


def opt():
    sizes = dict(hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32)
    return OPTForCausalLM(OPTConfig(max_position_embeddings=TABLE, init_std=0.3, **sizes, **_IDS))


@pytest.fixture(params=[gpt2, opt], ids=["gpt2", "opt"])
def model(request):
    torch.manual_seed(1)
    made = request.param().eval()
    made.generation_config.eos_token_id = None
    return made


def text(length, seed=0):
    return torch.randint(2, 48, (length,), generator=torch.Generator().manual_seed(seed))


DRAFTERS = {
    "chain": lambda model: NgramDrafter(longest=1, num_tokens=8).attach(model),
    "tree": lambda model: NgramDrafter(longest=1, num_tokens=8, branches=3).attach(model),
    "heads": lambda model: MTPHeads.from_backbone(model, window=6, unembedding="own"),
}


@pytest.mark.by_day(each=1)
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("length", [1, 12, TABLE - 1, TABLE])
def test_texts_to_the_last_place(model, kind, length):
    """The last token of a text is never fed: a text may be one longer than the table."""
    drafter, prompt = DRAFTERS[kind](model), text(length)
    new = TABLE + 1 - length
    (expected,) = plain_continuations(model, [prompt], new)
    options = dict(attention_mask=torch.ones(1, length, dtype=torch.long), do_sample=False, assistant_model=drafter)
    out = model.generate(prompt[None], max_new_tokens=new, **options)
    assert torch.equal(out[0, length:], expected)
    end = int(expected[-1])  # wherever it stands first: the call may go beyond the table, the text does not
    out = model.generate(prompt[None], max_new_tokens=100, eos_token_id=end, pad_token_id=0, **options)
    stop = expected.tolist().index(end) + 1
    assert torch.equal(out[0, length:], expected[:stop])


def test_rows_of_different_lengths_reach_it_together(model):
    prompts = [text(20), text(12, seed=1)]
    expected = plain_continuations(model, prompts, TABLE + 1 - 20)
    for drafter in (make(model) for make in DRAFTERS.values()):
        out = model.generate(
            **left_padded(prompts), do_sample=False, max_new_tokens=TABLE + 1 - 20, assistant_model=drafter
        )
        assert [row.tolist() for row in out[:, 20:]] == [row.tolist() for row in expected]


@pytest.mark.by_day("gpt2")
def test_slots_at_the_end(model):
    student = PTPStudent.from_backbone(model, num_slots=3)
    prompt = text(12)
    (expected,) = plain_continuations(model, [prompt], TABLE + 1 - 12)
    end = int(expected[-1])
    out = model.generate(
        prompt[None], attention_mask=torch.ones(1, 12, dtype=torch.long), do_sample=False, max_new_tokens=100,
        eos_token_id=end, pad_token_id=0, assistant_model=student,
    )  # fmt: skip
    assert torch.equal(out[0, 12:], expected[: expected.tolist().index(end) + 1])
