"""Families of this year with modules that learned the model's own text: greedy and sampled drafts, in every family."""

from functools import cache

import pytest
import torch
from torch.nn.functional import pad

from tests.families import THIS_YEAR, family_model, most_modules
from tests.models import left_padded
from tests.towers import TOWERS, image_batch, tower_model
from tokenahead.testing import continuation_distribution, continuation_p_value

VOCABULARY, NEW_TOKENS, DRAFTS = 4, 24, 2
GREEDY = {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 0}
GREEDY |= {"max_new_tokens": NEW_TOKENS, "suppress_tokens": [VOCABULARY - 1]}  # an image's placeholder
NAMES = [*THIS_YEAR, *TOWERS]


def model_and_prompts(name):
    if name in TOWERS:
        return tower_model(name, VOCABULARY, seed=1), image_batch(name, 3, 2, VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in (9, 5, 12)]
    model = family_model(name, 1, most_modules(name), vocab_size=VOCABULARY)
    return model, left_padded(prompts)


@cache
def trained(name):
    """A model whose modules were trained until every number of drafts was accepted, and what was found meanwhile."""
    model, batch = model_and_prompts(name)
    plain = model.generate(**batch, use_mtp=False, **GREEDY).sequences
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.train_only("drafter")
    optimizer = torch.optim.AdamW(model.mtp.parameters(), 1e-2)
    more = {"attention_mask": 1, "mm_token_type_ids": 0}
    whole = batch | {key: pad(batch[key], (0, NEW_TOKENS), value=new) for key, new in more.items() if key in batch}
    whole |= {"input_ids": plain, "labels": plain.masked_fill(whole["attention_mask"] == 0, -100)}
    counts, equal = set(), True
    for step in range(61):
        if step % 5 == 0:
            out = model.eval().generate(**batch, num_assistant_tokens=DRAFTS, **GREEDY)
            counts |= set().union(*out.speculation.rows_accepted)
            equal &= torch.equal(out.sequences, plain)
            if step and counts == set(range(DRAFTS + 1)):
                break
        optimizer.zero_grad()
        model.train()(**whole).loss.backward()
        optimizer.step()
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    return model, counts, equal, moved


@pytest.mark.by_day("qwen3_5")
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_the_model_s_own_for_every_number_of_accepted_drafts(name):
    _, counts, equal, moved = trained(name)
    assert equal and counts == set(range(DRAFTS + 1))
    assert moved and all(key.startswith("mtp.") for key in moved)


@pytest.mark.by_day("qwen3_5")
@pytest.mark.parametrize("name", NAMES)
def test_sampled_text_follows_the_model(name):
    model, *_ = trained(name)
    prompt, length = torch.tensor([[0, 2, 1, 1, 0]]), 4
    rows, warp = prompt.expand(300, -1), {"temperature": 0.5, "suppress_tokens": GREEDY["suppress_tokens"]}
    torch.manual_seed(5)
    out = model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        num_assistant_tokens=DRAFTS,
        **GREEDY | {"do_sample": True, "max_new_tokens": length} | warp,
    )
    distribution = continuation_distribution(model.main, prompt, length, **warp)
    assert continuation_p_value(out.sequences[:, -length:], distribution) > 0.001
    assert {0, 1, 2} <= set().union(*out.speculation.rows_accepted)


@pytest.mark.by_day("qwen3_5")
@pytest.mark.parametrize("name", NAMES)
def test_generation_continues_and_the_prompt_may_come_in_chunks(name):
    model, *_ = trained(name)
    prompt = torch.tensor([[0, 2, 1, 1, 0, 2, 2, 0, 1, 2, 1]])
    options = GREEDY | {"num_assistant_tokens": DRAFTS, "pad_token_id": None}  # 0 is an ordinary token here
    whole = model.generate(prompt, **options | {"max_new_tokens": 14}, use_mtp=False).sequences
    first = model.generate(prompt, **options | {"max_new_tokens": 6}, prefill_chunk_size=5)
    held = first.past_key_values
    second = model.generate(first.sequences, **options | {"max_new_tokens": 8}, past_key_values=held)
    assert torch.equal(second.sequences, whole) and held.get_seq_length() == whole.shape[1] - 1
