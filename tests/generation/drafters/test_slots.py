"""Slots of parallel prediction: what each row sees, and how a budget is split."""

import itertools

import pytest
import torch

from tokenahead.modeling.ptp.session import SlotLayout, split_budget


def test_every_row_sees_its_own_prefix_and_nothing_else():
    for sizes in [[3], [2, 0, 1], [1, 4, 2, 3]]:
        layout = SlotLayout.of(sizes, torch.device("cpu"))
        cached = torch.tensor([[True, True, True], [False, True, True]])
        seen = torch.cat([cached[:, None].expand(-1, len(layout.new), -1), layout.new.expand(2, -1, -1)], dim=2)
        block, slots = len(sizes), [(d, k) for d, size in enumerate(sizes) for k in range(size)]
        assert seen.shape == (2, block + len(slots), 3 + block + len(slots))
        for row in range(2):
            assert torch.equal(seen[row, :, :3], cached[row].expand(block + len(slots), 3))
            for query in range(block + len(slots)):
                group, place = (query, None) if query < block else slots[query - block]
                tokens = [column <= group for column in range(block)]
                others = [place is not None and group == d and k <= place for d, k in slots]
                assert seen[row, query, 3:].tolist() == tokens + others


def test_slots_of_a_group_per_row():
    layout = SlotLayout.of([2, 0, 3], torch.device("cpu"))
    index, exists = layout.of_group(torch.tensor([0, 2, 1]))
    assert index[0, 0, :2].tolist() == [0, 1] and index[1, 0].tolist() == [2, 3, 4]
    assert exists.tolist() == [[True, True, False], [True] * 3, [False] * 3]


def test_branches_and_vectors_keep_apart():
    """Two branches of two drafts, three vectors: what a row sees of the forward, by name."""
    sizes, branches, vectors = [2, 0, 3], 2, 3
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
    index, exists = layout.of_group(torch.tensor([2, 0]), torch.tensor([1, 0]))
    assert exists.tolist() == [[True, True, True], [True, True, False]]
    assert [[slots[i] for i in row] for row in index[0].tolist()] == [
        [(1, 2, 0, 0), (1, 2, vector, 1), (1, 2, vector, 2)] for vector in range(vectors)
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
