"""Masked prediction writes the backbone's own text, by linear and by quadratic decoding."""

import pytest
import torch

from tests.models import left_padded
from tests.ptp_models import backbone, ids, student

BUDGETS = ["quadratic", "linear", 2, None]


def masked(**options):
    """A model of three masks in float64."""
    return student("mask", backbone(seed=2).double(), **options).eval()


def write(model, lengths=(5, 1, 9, 2), **options):
    batch = left_padded([ids(n, seed=n) for n in lengths])
    how = {"max_new_tokens": 18, "pad_token_id": 0, "return_dict_in_generate": True} | options
    how = {name: value for name, value in how.items() if value is not None}
    return model.generate(**batch, **how)


@pytest.mark.by_day("linear-mlp", "2-none")
@pytest.mark.parametrize("sampler", ["mlp", "none"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_greedy_text_is_plain_greedy_text(budget, sampler):
    model = masked(sampler=sampler)
    want = write(model, use_mtp=False).sequences
    out = write(model, slot_budget=budget)
    assert torch.equal(out.sequences, want)
    assert {0, 1} <= set().union(*out.speculation.rows_accepted)
    for row, length in enumerate((5, 1, 9, 2)):
        alone = write(model, (length,), slot_budget=budget)
        assert torch.equal(alone.sequences[0, length:], want[row, 9:])
    assert torch.equal(write(model, slot_budget=budget, num_assistant_tokens_schedule="adaptive").sequences, want)


def drafts(model, **options):
    """Cycles of one row: tokens drafted, and how many of them were accepted."""
    how = {"do_sample": True, "temperature": 3.0, "top_k": 3, "verification": "coupled", "seed": 1}
    said = write(model, (5,), max_new_tokens=60, **how, **options).speculation
    return [(len(draft), count) for draft, count in zip(said.rows_drafts[0], said.rows_accepted[0])]


def test_quadratic_decoding_always_has_a_whole_draft():
    cycles = drafts(masked(), slot_budget="quadratic")
    assert cycles[0] == (0, 0) and {count for _, count in cycles} >= {0, 1, 2}
    assert {drafted for drafted, _ in cycles[1:-4]} == {3}


def test_linear_decoding_takes_a_plain_step_after_a_rejection():
    for size in (1, 3):
        cycles = drafts(masked(num_slots=size), slot_budget="linear")[:-4]  # the last ones are cut to the text's end
        for (drafted, accepted), (following, _) in zip(cycles, cycles[1:]):
            assert following == (size if accepted == drafted else 0)
        assert set(cycles) >= {(0, 0), (size, 0), (size, 1)}
