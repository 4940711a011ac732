"""Speculation with sequential modules equals plain decoding: alone, in ragged batches, for any number of drafts."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from tests.models import left_padded
from tokenahead import DeepSeekMTP

CHECKPOINT = Path(__file__).parents[1] / "data" / "deepseek_mtp" / "dsv3_d2_trained"
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def model():
    model = DeepSeekMTP.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(count):
    """Noise of 1 to 40 tokens: the shortest are shorter than D."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 3, *torch.randint(1, 41, (count - 3,), generator=generator).tolist()]
    return [torch.randint(1, 128, (length,), generator=generator) for length in lengths]


@pytest.fixture(scope="module")
def plain(model):
    """Prompts, and what plain decoding appends to each alone."""
    batch = prompts(16)
    return batch, [greedy(model, [p], use_mtp=False).sequences[0, len(p) :] for p in batch]


def greedy(model, batch, **options):
    inputs = left_padded(batch)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True} | options
    return model.generate(**inputs, **options)


@pytest.mark.by_day("3")
@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_greedy_equals_plain_greedy_alone_and_in_ragged_batches(model, plain, drafts):
    (batch, expected), alone, ragged = plain, set(), set()
    for prompt, want in zip(batch, expected):
        out = greedy(model, [prompt], num_assistant_tokens=drafts)
        assert torch.equal(out.sequences[0, len(prompt) :], want)
        alone |= set(out.speculation.accepted)
        assert all(len(draft) <= drafts for draft in out.speculation.drafts)
    for start in range(0, len(batch), 4):
        out = greedy(model, batch[start : start + 4], num_assistant_tokens=drafts)
        assert torch.equal(out.sequences[:, -NEW_TOKENS:], torch.stack(expected[start : start + 4]))
        ragged |= set().union(*out.speculation.accepted)
    assert alone == ragged == set(range(drafts + 1))


@pytest.mark.by_day("0.05", "0.9")
@pytest.mark.parametrize("threshold", [0.05, 0.9, 1.0])
def test_drafts_end_where_they_are_unsure(model, threshold):
    prompt = prompts(10)[9]
    want = greedy(model, [prompt], use_mtp=False).sequences
    out = greedy(model, [prompt], num_assistant_tokens=6, assistant_confidence_threshold=threshold)
    assert torch.equal(out.sequences, want)
    lengths = [len(draft) for draft in out.speculation.drafts]
    assert max(lengths) > 1 if threshold < 0.1 else max(lengths) == 1


@torch.no_grad()
def enumerate_outcomes(model, prompt):
    sequences, distribution = prompt, torch.ones(1, dtype=torch.float64)
    for _ in range(4):
        values, ids = model(sequences, output_mtp_logits=False).logits[:, -1].topk(3)
        distribution = (distribution[:, None] * (values.double() / 2).softmax(-1)).flatten()
        sequences = torch.cat([sequences.repeat_interleave(3, 0), ids.flatten()[:, None]], 1)
    return sequences[:, -4:], distribution


def test_fresh_weights_draft_with_their_own_modules():
    config = AutoConfig.from_pretrained(CHECKPOINT)  # knows the path of another model's modules
    model, prompt, options = DeepSeekMTP(config).eval(), prompts(10)[9], {"eos_token_id": None, "pad_token_id": 0}
    drafts = greedy(model, [prompt], **options).speculation.drafts
    with torch.no_grad():
        for parameter in model.mtp.parameters():
            parameter.mul_(-1)
    assert greedy(model, [prompt], **options).speculation.drafts != drafts
