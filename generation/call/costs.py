"""What a cycle costs beside plain decoding, by sizes alone: no clock is read, so that a seed repeats a call."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from math import log

import torch

POSITIONS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96
COSTS: dict[str, dict[tuple[int, int], dict[int, tuple[float, ...]]]] = {
    "bfloat16": {
        (2, 134515008): {
            1: (1.0, 1.01, 1.03, 1.04, 1.07, 1.11, 1.18, 1.25, 1.59, 1.93, 2.6, 3.27, 4.62),
            8: (1.0, 1.25, 1.44, 1.5, 1.94, 2.2, 2.73, 3.26, 4.3, 5.4, 7.5, 9.6, 13.8),
        },
    },
    "bfloat16 without units": {
        (1, 134515008): {
            1: (1.0, 1.37, 1.97, 2.45, 3.3, 4.2, 6.06, 7.86, 11.14, 14.76, 21.72, 28.6, 42.28),
            8: (1.0, 1.64, 2.46, 3.03, 4.96, 6.3, 8.65, 11.24, 16.6, 22.5, 35.14, 44.92, 66.75),
        },
    },
    "float32": {
        (1, 134515008): {
            1: (1.0, 1.68, 2.05, 1.71, 1.89, 1.96, 2.1, 2.42, 2.97, 3.7, 4.28, 4.83, 6.57),
            2: (1.0, 1.04, 1.16, 1.14, 1.32, 1.45, 1.64, 2.0, 2.45, 3.05, 4.17, 5.17, 7.61),
            4: (1.0, 1.3, 1.47, 1.57, 1.83, 1.98, 2.44, 2.87, 3.85, 4.99, 7.87, 9.67, 14.4),
            8: (1.0, 1.36, 1.56, 1.68, 2.14, 2.45, 3.22, 3.9, 5.44, 7.29, 10.82, 14.8, 22.84),
            16: (1.0, 1.44, 1.61, 1.91, 2.26, 2.67, 3.7, 4.76, 6.47, 8.61, 14.13, 18.36, 26.55),
        },
    },
}
"""By `kind_of` processors, threads and weights, and sequences: seconds of blocks of `POSITIONS`, in those of one
position. Rows of bfloat16 lie between the blocks that were measured (docs/draft_length.md)."""


def kind_of(dtype: torch.dtype) -> str:
    """Return a dtype, and whether the processor has units for it: it multiplies bfloat16 slowly without."""
    name = str(dtype).removeprefix("torch.")
    has_units = name != "bfloat16" or getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16")
    return name if has_units else f"{name} without units"


class BlockCosts:
    """What the backbone's forward on several positions of every sequence costs, in forwards on one position.

    The entry of the table that is nearest to a backbone's weights, to the threads, and then to the batch is taken, in
    ratios; between measured numbers of positions lies a straight line.
    """

    def __init__(self, measured: tuple[float, ...]) -> None:
        self.measured = measured

    @classmethod
    def of(cls, dtype: torch.dtype, device: torch.device, weights: int, batch: int) -> BlockCosts | None:
        """Return the costs for a batch; None where nothing is known of a device and dtype."""
        known = COSTS.get(kind_of(dtype)) if device.type == "cpu" else None
        if known is None:
            return None
        threads = torch.get_num_threads()
        of_size = known[min(known, key=lambda key: abs(log(key[1] / weights)) + abs(log(key[0] / threads)))]
        return cls(of_size[min(of_size, key=lambda size: abs(log(size / batch)))])

    def best(self, gains: Sequence[float]) -> int:
        """Return how many nodes of a tree pay, the first of which yield so many tokens each."""
        rates = [gain / self(1 + count) for count, gain in enumerate(accumulate(gains, initial=1.0))]
        return max(range(len(rates)), key=rates.__getitem__)

    def __call__(self, positions: int) -> float:
        """Return the cost of so many positions, at least 1."""
        index = min(max(bisect_left(POSITIONS, positions), 1), len(POSITIONS) - 1)
        left, right = POSITIONS[index - 1 : index + 1]
        before, after = self.measured[index - 1 : index + 1]
        return before + (after - before) * (positions - left) / (right - left)
