"""Speculation equals plain decoding in every family of DeepSeekMTP, with any state that its layers keep."""

import pytest
import torch

from tests.families import NAMES, RECURRENT, family_model
from tests.models import left_padded

VOCABULARY, NEW_TOKENS, DRAFTS = 3, 20, 2  # so few tokens that modules with random weights guess right now and then
SEEDS = {"ernie4_5_moe": 1, "exaone_moe": 6, "glm4_moe": 7, "hy_v3": 2, "longcat_flash": 2, "qwen2": 1, "qwen3": 1}
SEEDS |= {"dots3_note_text": 1, "hy_v4": 3, "qwen3_next": 1}
OPTIONS = {"do_sample": False, "return_dict_in_generate": True, "eos_token_id": None, "pad_token_id": 0}


def model_and_prompts(name):
    model = family_model(name, SEEDS.get(name, 0), vocab_size=VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    return model, [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in (9, 5, 1, 12)]


@pytest.mark.by_day("deepseek_v3", "deepseek_v4", "qwen3_next")
@pytest.mark.parametrize("name", NAMES)
def test_greedy_equals_plain_greedy_alone_and_in_ragged_batches(name):
    model, prompts = model_and_prompts(name)
    plain = model.generate(**left_padded(prompts), use_mtp=False, max_new_tokens=NEW_TOKENS, **OPTIONS).sequences
    options = OPTIONS | {"num_assistant_tokens": DRAFTS, "max_new_tokens": NEW_TOKENS}
    ragged = model.generate(**left_padded(prompts), **options)
    assert torch.equal(ragged.sequences, plain)
    assert set().union(*ragged.speculation.rows_accepted) == set(range(DRAFTS + 1))
    row = 3 if name == "deepseek_v4" else 0  # the one without padding, on which transformers' own text depends there
    alone = model.generate(**left_padded(prompts[row : row + 1]), **options)
    assert torch.equal(alone.sequences[0, -NEW_TOKENS:], plain[row, -NEW_TOKENS:])
    assert len(set(alone.speculation.accepted)) > 1


@pytest.mark.by_day("qwen3_next")
@pytest.mark.parametrize("name", [*RECURRENT, "deepseek_v4", "glm_moe_dsa"])
def test_generation_continues_and_the_prompt_may_come_in_chunks(name):
    model, prompts = model_and_prompts(name)
    prompt, options = prompts[3][None], OPTIONS | {"pad_token_id": None}  # 0 is an ordinary token here
    whole = model.generate(prompt, use_mtp=False, max_new_tokens=14, **options).sequences
    options |= {"num_assistant_tokens": 3}
    first = model.generate(prompt, max_new_tokens=6, prefill_chunk_size=5, **options)
    assert torch.equal(first.sequences, whole[:, : first.sequences.shape[1]])
    cache = first.past_key_values
    second = model.generate(first.sequences, max_new_tokens=8, past_key_values=cache, **options)
    assert torch.equal(second.sequences, whole) and cache.get_seq_length() == whole.shape[1] - 1


def test_rows_that_end_early_leave_recurrent_states_of_others_alone():
    model, prompts = model_and_prompts("qwen3_next")
    options = OPTIONS | {"max_new_tokens": NEW_TOKENS, "eos_token_id": 2, "pad_token_id": 0}
    plain = model.generate(**left_padded(prompts), use_mtp=False, **options).sequences
    out = model.generate(**left_padded(prompts), num_assistant_tokens=3, **options)
    assert torch.equal(out.sequences, plain)
    assert len({len(row) for row in out.speculation.rows_accepted}) > 1
