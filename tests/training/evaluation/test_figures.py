"""The arithmetic of figures against sums by hand."""

import pytest

from tokenahead.training.evaluation.decoding import acceptance_by_position, repeated_share


def test_acceptance_by_position_falls_whatever_the_lengths_of_drafts():
    assert acceptance_by_position([2, 0, 1], 3) == [2 / 3, 1 / 3, 0.0]
    assert acceptance_by_position([], 0) == []


def test_repeated_text_is_found():
    assert repeated_share(list(range(100))) == 0.0
    assert repeated_share([1, 2, 3, 4] * 20) == 1.0
    assert repeated_share(list(range(50)) + list(range(20)), gram=16) == pytest.approx(40 / 70)
    assert repeated_share([]) == 0.0


@pytest.mark.parametrize("loop", [[7], [1, 2], [1, 2, 3, 4, 5, 6, 7, 8]])
def test_a_loop_is_found_that_is_shorter_than_a_passage(loop):
    assert repeated_share((loop * 16)[:16]) == 1.0
    assert repeated_share([*range(20, 52), *(loop * 16)[:16]]) == pytest.approx(16 / 48)
    assert repeated_share([*range(20, 52), *loop, *loop]) == (16 / 48 if len(loop) == 8 else 0.0)
