"""The figures of benches and of the demo: a method has one colour and one marker, and what repeats itself is hollow."""

from __future__ import annotations

from itertools import product
from typing import Any

from ..evaluation.bench import PLAIN
from ..results import DecodingResult, MeasuredResults
from ..utils import needs_extra

with needs_extra("demo", "figures"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

_MARKERS = "osD^vPX*"  # of the families, in turn; colour alone would not reach every eye


_HOLLOW: dict[str, Any] = {"fillstyle": "full", "markerfacecolor": "white"}
"""Markers of text that repeats itself."""
_POINT: dict[str, Any] = {"linestyle": "none", "markersize": 9, "markeredgewidth": 1.8}
_PLAIN: dict[str, Any] = _POINT | {"marker": "x", "color": "black"}


def _family(index: int) -> dict[str, Any]:
    """Return the colour and the marker of a family of heads."""
    return {"color": f"C{index}", "marker": _MARKERS[index % len(_MARKERS)]}


def bench_figure(measured: MeasuredResults) -> Figure:
    """Draw speed-ups by category: a panel per way of decoding and batch size, a colour per method."""
    methods = _methods(measured)
    categories = list(dict.fromkeys(name for row in measured.results for name in row.category_speed_ups))
    figure, panels = _grid(measured, max(3.6, 0.7 * len(categories) + 1.2), 3.4)
    width = 0.8 / max(1, len(methods))
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if len(categories) > 4 else {}
    for title, rows, axes in panels:
        for row in (row for row in rows if row.method in methods):
            place, style = methods[row.method]
            for index, name in enumerate(categories):
                if name in row.category_speed_ups:
                    left = index + (place + 0.5) * width - 0.4
                    axes.bar(left, row.category_speed_ups[name], width, color=style["color"])
        if not any(row.category_speed_ups for row in rows if row.method in methods):
            axes.text(0.5, 0.5, "texts loop: no claim", transform=axes.transAxes, ha="center")
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.set(title=title, ylabel="speed-up over plain", xlim=(-0.6, len(categories) - 0.4))
        axes.set_xticks(range(len(categories)), categories, **turned)
        axes.grid(axis="y", alpha=0.3)
    named = [Line2D([], [], label=name, color=style["color"], linewidth=6) for name, (_, style) in methods.items()]
    figure.legend(handles=named, loc="outside lower center", ncols=3)
    return figure


def frontier_figure(measured: MeasuredResults) -> Figure:
    """Draw tokens per call against milliseconds per call, with lines of equal speed; what repeats itself is hollow."""
    methods = _methods(measured)
    figure, panels = _grid(measured, 4.6, 4.2)
    for title, rows, axes in panels:
        points = {row.method: (row.call_ms, _per_call(row)) for row in rows if row.call_ms is not None}
        for row in (row for row in rows if row.method in points and row.method in methods):
            style = _POINT | methods[row.method][1] | (_HOLLOW if row.is_degenerate else {})
            axes.plot(*([value] for value in points[row.method]), **style)
        if PLAIN in points:
            axes.plot(*([value] for value in points[PLAIN]), **_PLAIN)
        if points:
            _draw_equal_speeds(axes, points)
        axes.set(title=title, xlabel="milliseconds per call", ylabel=f"{measured.unit}s per call")
    named = [Line2D([], [], label=name, **_POINT | style) for name, (_, style) in methods.items()]
    named.append(Line2D([], [], label=f"one {measured.unit} at a time", **_PLAIN))
    if any(row.is_degenerate for row in measured.results):
        point: dict[str, Any] = _POINT | {"marker": "o", "color": "grey"} | _HOLLOW
        named.append(Line2D([], [], label="hollow: repeats itself, no claim", **point))
    figure.legend(handles=named, loc="outside lower center", ncols=3)
    return figure


def _draw_equal_speeds(axes: Axes, points: dict[Any, tuple[Any, float]]) -> None:
    """Draw lines of equal speed through the origin, named by their ratio to plain decoding's."""
    right = 1.25 * max(ms for ms, _ in points.values())
    top = 1.15 * max(2.0, *(per_call for _, per_call in points.values()))
    axes.set(xlim=(0, right), ylim=(0, top))
    if PLAIN not in points:
        return
    ms, per_call = points[PLAIN]
    for ratio in (0.5, 1, 1.5, 2, 3, 4):
        x = min(right, top * ms / (ratio * per_call))
        axes.plot([0, x], [0, ratio * per_call * x / ms], color="grey", linewidth=0.7, linestyle=":")
        axes.annotate(f"{ratio:g}x", (x, ratio * per_call * x / ms), color="grey", fontsize=8, ha="right", va="top")


def _grid(
    measured: MeasuredResults, width: float, height: float
) -> tuple[Figure, list[tuple[str, list[DecodingResult], Axes]]]:
    """Return a figure with a row of panels per batch size and a column per way of decoding: titles, rows, axes."""
    modes = list(dict.fromkeys(row.decoding or row.name for row in measured.results))
    sizes = list(dict.fromkeys(row.batch_size for row in measured.results))
    figure = Figure(figsize=(max(7.2, width * len(modes)), height * len(sizes) + 0.8), layout="constrained")
    panels = figure.subplots(len(sizes), len(modes), squeeze=False)
    found = []
    for (i, size), (j, mode) in product(enumerate(sizes), enumerate(modes)):
        rows = [row for row in measured.results if (row.decoding or row.name, row.batch_size) == (mode, size)]
        found.append((f"{mode}, batch {size}", rows, panels[i, j]))
    return figure, found


def _methods(measured: MeasuredResults) -> dict[str | None, tuple[int, dict[str, Any]]]:
    """Return the place and the style of every method that drafts."""
    names = dict.fromkeys(row.method for row in measured.results if row.draft_length or _per_call(row) > 1)
    return {name: (index, _family(index)) for index, name in enumerate(names)}


def _per_call(row: DecodingResult) -> float:
    return row.tokens_per_verification or row.tokens_per_call
