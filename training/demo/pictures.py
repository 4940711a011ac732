"""Two pictures of what was measured: the heads compared, and how far drafts are accepted. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..evaluation import Comparison
from ..files import replace_picture
from .head_comparison import HeadFigures, cycle_ms

_MARKERS = "osD^vPX*"  # of the families, in turn; colour alone would not reach every eye
_LINES = 5  # of equal throughput, about
_GAP = 0.09  # between labels of these lines, as a share of the axes


def save_picture(figure: Figure, path: Path) -> Path:
    """Writes a PNG file, under a temporary name first; returns `path`."""
    return replace_picture(path, figure)


def heads_figure(figures: list[HeadFigures]) -> Figure:
    """Bytes per call against milliseconds per call, with lines of equal throughput (MtPC paper, Figure 1).

    A family has one colour and one marker: filled for greedy decoding, hollow for sampling.
    """
    figure = Figure(figsize=(7.2, 5.0), layout="constrained")
    axes = figure.add_subplot()
    points = [(cycle_ms(result), result.tokens_per_call) for row in figures for result in (row.greedy, row.sampled)]
    axes.set(xlim=_range([x for x, _ in points]), ylim=_range([y for _, y in points]))
    for index, row in enumerate(figures):
        for result, is_filled in ((row.greedy, True), (row.sampled, False)):
            axes.plot(cycle_ms(result), result.tokens_per_call, **_style(index, is_filled))
    _draw_throughputs(axes, [1000 * y / x for x, y in points])
    axes.set(xlabel="milliseconds per call", ylabel="bytes per call")
    axes.set_title("Heads compared: up and to the left is faster\n(dotted: equal bytes per second)", pad=22)
    _add_legend(figure, [row.name for row in figures])
    return figure


def acceptance_figure(comparisons: list[Comparison]) -> Figure:
    """The share of drafts accepted up to each position, a line for each way of decoding."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for marker, comparison in zip(_MARKERS, comparisons):
        shares = [100 * share for share in comparison.accepted_by_position]
        axes.plot(range(1, len(shares) + 1), shares, marker=marker, label=comparison.mode.name)
    axes.set(title="How far drafts are accepted", xlabel="position in the draft", ylabel="accepted up to here (%)")
    axes.set(ylim=(-4, 104), yticks=range(0, 101, 20))  # room for markers at 0 and 100 %
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _range(values: list[float]) -> tuple[float, float]:
    """Bounds with room for markers on both sides, also where all values are the same."""
    room = 0.12 * (max(values) - min(values)) or 0.1 * max(values)
    return min(values) - room, max(values) + room


def _style(index: int, is_filled: bool) -> dict[str, object]:
    colour = f"C{index}"
    face = colour if is_filled else "white"
    marker = _MARKERS[index % len(_MARKERS)]
    return dict(marker=marker, color=colour, markerfacecolor=face, markeredgewidth=1.8, markersize=9, linestyle="none")


def _draw_throughputs(axes: Axes, measured: list[float]) -> None:
    """Dotted lines through the origin, each labelled where it leaves the axes, so that no label meets a point."""
    for throughput, (x, y), is_right in _exits(axes, measured):
        axes.axline((0, 0), slope=throughput / 1000, linestyle=":", color="grey", linewidth=0.8, zorder=0)
        place = dict(ha="left", va="center") if is_right else dict(ha="center", va="bottom")
        offset = (4, 0) if is_right else (0, 3)
        label = f"{throughput:,.0f}/s"
        axes.annotate(label, (x, y), offset, textcoords="offset points", color="grey", fontsize=8, **place)


def _exits(axes: Axes, measured: list[float]) -> Iterator[tuple[float, tuple[float, float], bool]]:
    """Round throughputs (bytes/s), where their lines leave the axes, and whether that is on the right."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    previous = -1.0
    for throughput in reversed(MaxNLocator(_LINES).tick_values(min(measured), max(measured))):
        slope = throughput / 1000
        if slope <= 0 or slope * right <= low or slope * left >= high:
            continue
        is_right = slope * right <= high
        x, y = (right, slope * right) if is_right else (high / slope, high)
        place = (x - left) / (right - left) + (high - y) / (high - low)  # along the upper and then the right side
        if place - previous > _GAP:
            previous = place
            yield throughput, (x, y), is_right


def _add_legend(figure: Figure, names: list[str]) -> None:
    families = [Line2D([], [], label=name, **_style(index, True)) for index, name in enumerate(names)]
    grey = dict(marker="o", color="grey", markeredgewidth=1.8, markersize=9, linestyle="none")
    ways = [
        Line2D([], [], label="filled: greedy", **grey),
        Line2D([], [], label="hollow: sampled", **(grey | {"markerfacecolor": "white"})),
    ]
    figure.legend(handles=[*families, *ways], loc="outside lower center", ncols=3)
