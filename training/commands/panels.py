"""Panels side by side, as all figures of the commands have them. Knows no figures."""

from __future__ import annotations

from collections.abc import Sequence

from ..extras import needs_extra

with needs_extra("demo", "pictures"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator


def panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    """A figure of so many panels in a row."""
    figure = Figure(figsize=((6.4 if count < 3 else 5.4) * count, 4.4), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def finish(axes: Sequence[Axes]) -> None:
    """Grids, and whole numbers along each horizontal axis, also where there is one value alone."""
    for one in axes:
        left, right = one.dataLim.intervalx
        if left == right:
            one.set_xlim(left - 1, right + 1)
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
        one.grid(alpha=0.3)


def from_zero(axes: Axes) -> None:
    """Lets the vertical axis begin at 0, with room for a marker above the largest value."""
    top = axes.dataLim.intervaly[1]
    axes.set_ylim(0, 1.06 * top if top > 0 else 1)
