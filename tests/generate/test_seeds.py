"""A seed of parallel token prediction repeats a run; a row's text depends on its seed and its prompt alone."""

import pytest
import torch

from tests.models import left_padded
from tests.ptp_models import VOCABULARY, backbone, ids, student
from tokenahead.experimental import best_of

RULES = [("one_hot", "coupled", 1), ("one_hot", "block", 1), ("one_hot", "coupled", 2), ("categorical", None, 1),
         ("categorical", "token", 1), ("categorical", "coupled", 1), ("categorical", "coupled", 3),
         ("mask", None, 1), ("mask", "coupled", 1)]  # fmt: skip


def model_of(variant, many=1):
    model = student(variant, backbone(seed=2).double()).eval()
    return model if many == 1 else best_of(model, many)


def prompts():
    return [ids(n, seed=n) for n in (5, 2, 9, 4)]


def write(model, batch, new_tokens=14, **options):
    inputs = left_padded(batch)
    how = {"do_sample": True, "top_k": 0, "temperature": 1.3, "pad_token_id": 0} | options
    return model.generate(**inputs, max_new_tokens=new_tokens, **how)[:, inputs["input_ids"].shape[1] :]


def how(rule):
    return {} if rule is None else {"verification": rule}


@pytest.mark.by_day("one_hot-block-1", "categorical-coupled-3", "mask-coupled-1")
@pytest.mark.parametrize(("variant", "rule", "many"), RULES)
def test_a_row_depends_on_its_seed_and_its_prompt_alone(variant, rule, many):
    model, batch, options = model_of(variant, many), prompts(), how(rule)
    seeds = [5, 6, -7, 2**63]
    text = write(model, batch, seed=seeds, **options)
    torch.manual_seed(99)
    assert torch.equal(write(model, batch, seed=seeds, **options), text)
    assert not torch.equal(write(model, batch, seed=[6, 6, -7, 2**63], **options)[0], text[0])
    for row, (prompt, seed) in enumerate(zip(batch, seeds)):
        assert torch.equal(write(model, [prompt], seed=seed, **options)[0], text[row])
    order = [2, 0]
    mixed = write(model, [batch[row] for row in order], seed=torch.tensor([-7, 5]), **options)
    assert torch.equal(mixed, text[order])
    for length in (2, 9):
        assert torch.equal(write(model, batch, length, seed=seeds, **options), text[:, :length])


@pytest.mark.by_day("one_hot-coupled-2", "categorical-token-1")
@pytest.mark.parametrize(("variant", "rule", "many"), RULES)
def test_one_seed_gives_every_row_its_own_stream_and_repeats_without_drafts(variant, rule, many):
    model, options = model_of(variant, many), how(rule)
    batch = [ids(5)] * 3
    text = write(model, batch, seed=3, **options)
    assert len({tuple(row) for row in text.tolist()}) == 3
    assert torch.equal(write(model, batch[:2], seed=3, **options), text[:2])
    plain = [write(model, batch, seed=3, use_mtp=False, **options) for _ in range(2)]
    assert torch.equal(*plain)
    assert torch.equal(write(model, batch[:1], 6, seed=3, use_mtp=False, **options), plain[0][:1, :6])
    if rule == "coupled" and many == 1:
        assert torch.equal(plain[0], text)


def test_rows_that_end_leave_the_others_as_they_are():
    model, batch, seeds = model_of("categorical"), prompts(), [1, 2, 3, 4]
    text = write(model, batch, seed=seeds)
    end = int(text[1, 3])
    ended = write(model, batch, seed=seeds, eos_token_id=end)
    for got, row in zip(ended.tolist(), text.tolist()):
        length = row.index(end) + 1 if end in row else len(row)
        assert got[:length] == row[:length] and not any(got[length:])


def test_without_a_seed_torch_says_what_is_drawn():
    model = model_of("categorical")
    torch.manual_seed(1)
    first = write(model, prompts())
    assert not torch.equal(write(model, prompts()), first)
    torch.manual_seed(1)
    assert torch.equal(write(model, prompts()), first)
    assert int(first.max()) < VOCABULARY
