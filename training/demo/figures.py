"""Two figures of what was measured: bytes per call against latency, and how far drafts are accepted.

A family of heads has one colour and one marker in both; the ways of decoding differ by fill, not by colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ..evaluation import HeadReport
from ..files import replace_picture
from ..results import DecodingResult
from .report import cycle_ms

SPEED_FIGURE, ACCEPTANCE_FIGURE = "speed.png", "acceptance.png"
"""Names of the files."""
_MARKERS = "osD^vPX*"  # of the families, in turn; colour alone would not reach every eye
_FILLS = ("full", "left", "none")  # of the ways of decoding, in turn
_LINES = 5  # of equal throughput, about
_GAP = 0.09  # between labels of these lines, as a share of the axes


def save_figures(folder: Path, reports: Sequence[HeadReport]) -> None:
    """Write both figures as PNG files into a directory."""
    replace_picture(folder / SPEED_FIGURE, speed_figure(reports))
    replace_picture(folder / ACCEPTANCE_FIGURE, acceptance_figure(reports))


def speed_figure(reports: Sequence[HeadReport]) -> Figure:
    """Draw bytes per call against milliseconds per call, with lines of equal throughput (MtPC paper, Figure 1).

    A cross marks plain decoding. A family has one colour and one marker: filled for greedy decoding, hollow for T = 1.
    """
    figure = Figure(figsize=(7.6, 5.6), layout="constrained")
    axes = figure.add_subplot()
    rows = [(index, turn, row) for index, report in enumerate(reports) for turn, row in enumerate(report.single)]
    plain = _plain([row for _, _, row in rows])
    points = [(cycle_ms(row), row.tokens_per_call) for *_, row in rows] + [(plain, 1.0)]
    axes.set(xlim=_range([x for x, _ in points]), ylim=_range([y for _, y in points]))
    for index, turn, row in rows:
        style = f"C{index}", _MARKERS[index % len(_MARKERS)], _FILLS[turn % len(_FILLS)]
        axes.add_line(_marker(*style, [cycle_ms(row)], [row.tokens_per_call]))
    axes.add_line(_cross([plain], [1.0]))
    _draw_throughputs(axes, [1000 * y / x for x, y in points])
    axes.set(xlabel="milliseconds per call", ylabel="bytes per call")
    axes.set_title("Up and to the left is faster\n(dotted: equal bytes per second)", pad=22)
    ways = [row.name for row in reports[0].single] if reports else []
    _add_legend(figure, [report.name for report in reports], ways)
    return figure


def acceptance_figure(reports: Sequence[HeadReport]) -> Figure:
    """Draw the share of drafts accepted up to each position: a panel for each way of decoding, a line for each head.

    Lines with markers are what was generated; thin lines without are what is expected along held-out text.
    """
    ways = [row.name for row in reports[0].single]
    figure = Figure(figsize=(3.6 * len(ways) + 0.6, 4.6), layout="constrained")
    panels = figure.subplots(1, len(ways), sharey=True, squeeze=False)[0]
    longest = 1
    for axes, (turn, way) in zip(panels, enumerate(ways)):
        for index, report in enumerate(reports):
            row = report.single[turn]
            generated = [100 * share for share in row.accepted_by_position]
            expected = [100 * share for share in row.expected_by_position]
            colour, marker = f"C{index}", _MARKERS[index % len(_MARKERS)]
            axes.plot(range(1, len(generated) + 1), generated, color=colour, marker=marker, markersize=5)
            axes.plot(range(1, len(expected) + 1), expected, color=colour, linewidth=0.9, alpha=0.7)
            longest = max(longest, len(generated), len(expected))
        axes.set(title=way, xlabel="position in the draft", ylim=(-4, 104), yticks=range(0, 101, 20))
        axes.grid(alpha=0.3)
    for axes in panels:
        axes.set_xlim(1 - 0.06 * longest, longest + 0.06 * longest)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panels[0].set_ylabel("accepted up to here (%)")
    heads = [Line2D([], [], color=f"C{i}", marker=_MARKERS[i], label=report.name) for i, report in enumerate(reports)]
    thin = [Line2D([], [], color="grey", linewidth=0.9, label="thin: expected along held-out text")]
    has_expected = any(row.expected_by_position for report in reports for row in report.single)
    figure.legend(handles=heads + thin * has_expected, loc="outside lower center", ncols=5)
    return figure


def _plain(rows: Sequence[DecodingResult]) -> float:
    """Return the milliseconds per plain call, mean over all runs."""
    times = [1000 / row.plain_tokens_per_second for row in rows]
    return sum(times) / len(times)


def _range(values: list[float]) -> tuple[float, float]:
    """Return bounds with room for markers on both sides, also where all values are the same."""
    room = 0.12 * (max(values) - min(values)) or 0.1 * max(values)
    return min(values) - room, max(values) + room


def _marker(
    colour: str, marker: str, fill: str, x: Sequence[float] = (), y: Sequence[float] = (), label: str = ""
) -> Line2D:
    """Return a marker of a family, filled as the way of decoding says."""
    return Line2D(
        x,
        y,
        marker=marker,
        color=colour,
        fillstyle="left" if fill == "left" else "full",
        markerfacecolor="white" if fill == "none" else colour,
        markerfacecoloralt="white",
        markeredgewidth=1.8,
        markersize=9,
        linestyle="none",
        label=label,
    )


def _cross(x: Sequence[float] = (), y: Sequence[float] = (), label: str = "") -> Line2D:
    """Return the cross of plain decoding."""
    return Line2D(x, y, marker="x", color="black", markersize=9, markeredgewidth=1.8, linestyle="none", label=label)


def _draw_throughputs(axes: Axes, measured: list[float]) -> None:
    """Draw dotted lines through the origin, each labelled where it leaves the axes, so that no label meets a point."""
    for throughput, (x, y), is_right in _exits(axes, measured):
        axes.axline((0, 0), slope=throughput / 1000, linestyle=":", color="grey", linewidth=0.8, zorder=0)
        offset, ha, va = ((4, 0), "left", "center") if is_right else ((0, 3), "center", "bottom")
        label = f"{throughput:,.0f}/s"
        axes.annotate(label, (x, y), offset, textcoords="offset points", color="grey", fontsize=8, ha=ha, va=va)


def _exits(axes: Axes, measured: list[float]) -> Iterator[tuple[float, tuple[float, float], bool]]:
    """Yield round throughputs (bytes/s), where their lines leave the axes, and whether that is on the right."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    previous = -1.0
    for throughput in reversed(MaxNLocator(_LINES).tick_values(min(measured), max(measured))):
        slope = throughput / 1000
        if slope <= 0 or slope * right <= low or slope * left >= high:
            continue
        is_right = slope * right <= high
        x, y = (right, slope * right) if is_right else (high / slope, high)
        position = (x - left) / (right - left) + (high - y) / (high - low)  # along the upper and then the right side
        if position - previous > _GAP:
            previous = position
            yield throughput, (x, y), is_right


def _add_legend(figure: Figure, names: list[str], ways: list[str]) -> None:
    families = [_marker(f"C{i}", _MARKERS[i % len(_MARKERS)], "full", label=name) for i, name in enumerate(names)]
    words = {"full": "filled", "left": "half", "none": "hollow"}
    used = [(_FILLS[turn % len(_FILLS)], way) for turn, way in enumerate(ways)]
    fills = [_marker("grey", "o", fill, label=f"{words[fill]}: {way}") for fill, way in used]
    plain = _cross(label="one byte at a time")
    figure.legend(handles=[*families, *fills, plain], loc="outside lower center", ncols=4)
