"""Fewer cases of the same power: of a product of parameters, cases that hold all that few values do together."""

from __future__ import annotations

from itertools import combinations


def few(cases, size):
    """Return which of `cases`, dicts of parameters, hold every `size` values that any one of them holds.

    Greedy: of all cases, the next one holds the most that none holds yet. A value is the same in two cases where it is
    one object.
    """
    held = [
        set(combinations(sorted((name, id(value)) for name, value in case.items()), min(size, len(case))))
        for case in cases
    ]
    left, chosen = set().union(*held), set()
    while left:
        best = max(range(len(held)), key=lambda place: len(held[place] & left))
        left -= held[best]
        chosen.add(best)
    return chosen
