"""Slots of parallel prediction: what each row sees, and how a budget is split."""

import itertools

import pytest
import torch

from tokenahead.modeling.ptp.session import SlotLayout, split_budget


@pytest.mark.parametrize(("branches", "vectors"), [(1, 1), (2, 3)])
def test_rows_see_their_own_prefix_and_slots_and_nothing_else(branches, vectors):
    """Groups of two slots, none and three behind branches of two drafts: what a row sees of the forward, by name."""
    sizes = [2, 0, 3]
    layout = SlotLayout.of(sizes, torch.device("cpu"), branches, vectors)
    drafts = [(j, d) for j in range(branches) for d in (1, 2)]
    slots = list(zip(*(part.tolist() for part in (layout.branch, layout.group, layout.vector, layout.index_in_group))))
    assert len(slots) == branches * sum(1 + vectors * (size - 1) for size in sizes if size)
    assert layout.order.tolist() == [0, *(d for _, d in drafts), *(d + k for _, d, _, k in slots)]
    for query, row in enumerate(layout.new.tolist()):
        if query == 0:
            want = [(0, 0)], []
        elif query <= len(drafts):
            branch, order = drafts[query - 1]
            want = [(0, 0), *(draft for draft in drafts if draft[0] == branch and draft[1] <= order)], []
        else:
            branch, group, vector, place = slots[query - 1 - len(drafts)]
            tokens = [(0, 0), *(draft for draft in drafts if draft[0] == branch and draft[1] <= group)]
            own = [(branch, group, 0, 0), *((branch, group, vector, k) for k in range(1, place + 1))]
            want = tokens, own
        names = [(0, 0), *drafts, *slots]
        assert [name for name, sees in zip(names, row) if sees] == want[0] + want[1]
    index, exists = layout.of_group(torch.tensor([2, 0]), torch.tensor([branches - 1, 0]))
    assert exists.tolist() == [[True, True, True], [True, True, False]]
    assert [[slots[i] for i in row] for row in index[0].tolist()] == [
        [(branches - 1, 2, vector if step else 0, step) for step in range(3)] for vector in range(vectors)
    ]
    assert [[slots[i] for i in row[:2]] for row in index[1].tolist()] == [
        [(0, 0, 0, 0), (0, 0, vector, 1)] for vector in range(vectors)
    ]


def test_the_split_is_the_best_one():
    """Of all splits; a one-hot group's first slot repeats the target's pick, and drafts nothing."""
    for survival, budget, repeats_pick in itertools.product(
        [(0.9, 0.6, 0.5), (0.3, 0.1, 0.05), (0.99, 0.98, 0.97)], [1, 2, 4, 7, 9], [False, True]
    ):
        longest, drafted = 3, 2
        reach = [1.0, *survival[:drafted], 0.0]

        def expected(sizes):
            worth = [sum(survival[: max(size - repeats_pick, 0)]) for size in sizes]  # noqa: B023
            return sum((reach[d] - reach[d + 1]) * h for d, h in enumerate(worth))  # noqa: B023

        splits = itertools.product(range(longest + 1), repeat=drafted + 1)
        best = max((sizes for sizes in splits if sum(sizes) <= budget), key=expected)
        got = split_budget(budget, drafted, longest, survival, repeats_pick)
        assert sum(got) <= budget and max(got) <= longest
        assert expected(got) == pytest.approx(expected(best))
        assert not (repeats_pick and 1 in got)  # a slot that would draft nothing is not paid for
        assert sum(split_budget(100, drafted, longest, survival, repeats_pick)) == longest * (drafted + 1)
