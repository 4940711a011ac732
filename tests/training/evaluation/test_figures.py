"""The arithmetic of figures against sums by hand."""

import pytest

from tests.internals import acceptance_by_position, repeated_share


def test_short_drafts_do_not_count_where_they_do_not_reach():
    assert acceptance_by_position([2, 0, 1], [3, 3, 1]) == [2 / 3, 1 / 2, 0.0]
    assert acceptance_by_position([], []) == []


def test_repeated_text_is_found():
    assert repeated_share(list(range(100))) == 0.0
    assert repeated_share([1, 2, 3, 4] * 20) == 1.0
    assert repeated_share(list(range(50)) + list(range(20)), gram=16) == pytest.approx(40 / 70)
    assert repeated_share([]) == 0.0
