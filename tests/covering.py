"""Fewer cases of the same power: of lists of parameters, cases that hold every pair of values."""

from __future__ import annotations

from itertools import combinations, product


def pairs(*lists):
    """Return tuples, one value of each list, so that any two values of two lists stand in one of them.

    Greedy: of all tuples, the next one holds the most pairs that none holds yet. For products of up to some 10,000.
    """
    options = [range(len(values)) for values in lists]
    left = {pair for a, b in combinations(range(len(lists)), 2) for pair in product([a], options[a], [b], options[b])}
    chosen = []
    while left:
        best = max(product(*options), key=lambda case: len(_pairs_of(case) & left))
        left -= _pairs_of(best)
        chosen.append(tuple(values[i] for values, i in zip(lists, best, strict=True)))
    return chosen


def _pairs_of(case):
    return {(a, i, b, j) for (a, i), (b, j) in combinations(enumerate(case), 2)}


def few(cases, size):
    """Return which of `cases`, dicts of parameters, hold every `size` values that any one of them holds.

    Greedy, as `pairs`. A value is the same in two cases where it is one object.
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
