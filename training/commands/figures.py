"""The figures of training, evaluation, analysis and the demo: they draw what was logged or measured.

In those of the demo a family of heads has one colour and one marker; ways of decoding differ by fill, not by colour,
and a hollow marker stands for a figure that no table claims.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..evaluation import HeadReport
from ..results import DecodingResult
from ..utils import needs_extra, replace_picture

with needs_extra("demo", "figures"):
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

LEARNING_CURVE = "learning_curve.png"
"""Name of the figure beside the log."""
_FEW = 6  # lines between which a legend finds room
_OF_DEPTH = re.compile(r"(eval_)?loss_(?:head|step)_(\d+)$")
_ACCEPTANCE = {
    "eval_expected_accepted": "expected, along held-out text, T = 1",
    "eval_generated_accepted": "generated, T = 1",
    "num_correct": "slots right (training)",
    "eval_num_correct": "slots right (held out)",
}
_MARKERS = "osD^vPX*"  # of the families, in turn; colour alone would not reach every eye
_LINES = {
    "marginal": ("backbone, tokens between summed out", "C0o-"),
    "head": ("drafter, tokens between summed out", "C1s-"),
    "head_given": ("drafter, tokens between known", "C2D--"),
    "backbone_given": ("backbone, tokens between known", "k^:"),
}
_MISSING = 0.1  # of the mass of continuations, beyond which a marginal is hollow


def learning_figure(history: list[dict[str, Any]]) -> Figure:
    """Draw losses by depth, and accepted drafts where they were measured."""
    drawn = [name for name in _ACCEPTANCE if any(name in entry for entry in history)]
    figure, axes = _panels(1 + bool(drawn))
    _draw_losses(axes[0], history)
    if drawn:
        for index, name in enumerate(drawn):
            axes[1].plot(*_series(history, name), marker="o", markersize=3, color=f"C{index}", label=_ACCEPTANCE[name])
        axes[1].set(title="Accepted drafts per verification", xlabel="step", ylabel="drafts")
        _from_zero(axes[1])
        axes[1].legend(loc="best", fontsize=8)
    _finish(axes)
    return figure


def _draw_losses(axes: Axes, history: list[dict[str, Any]]) -> None:
    """Draw a colour per depth: lines in training, dots on held-out data."""
    names = sorted({name for entry in history for name in entry if _OF_DEPTH.match(name)}, key=_depth)
    depths = len({_depth(name)[0] for name in names})
    for name in names or ["loss", "eval_loss"]:
        steps, values = _series(history, name)
        depth, is_held_out = _depth(name)
        if not steps:
            continue
        word = f"depth {depth}" if names else "loss"
        style = {"marker": "o", "markersize": 4, "linestyle": "none"} if is_held_out else {}
        label = None if is_held_out and names else f"{word}{', held out' if is_held_out else ''}"
        axes.plot(steps, values, color=_color(depth, depths), label=label, **style)
    has_dots = any(_depth(name)[1] for name in names)
    title = "Loss by depth" if names else "Loss"
    axes.set(title=title + (" (dots: held out)" if has_dots else ""), xlabel="step", ylabel="nats per token")
    if axes.lines and depths > _FEW:  # many lines leave no room for a legend among them
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif axes.lines:  # there are none where the run ended before its first entry
        axes.legend(fontsize=8, loc="best")


def _color(depth: int, depths: int) -> Any:
    """Return a colour of its own for every depth; the usual ones repeat after ten."""
    return f"C{max(depth - 1, 0)}" if depths <= 10 else colormaps["viridis"]((depth - 1) / (depths - 1))


def _depth(name: str) -> tuple[int, bool]:
    match = _OF_DEPTH.match(name)
    return (int(match[2]) if match else 0), name.startswith("eval_")


def _series(history: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [(entry["step"], entry[name]) for entry in history if name in entry]
    return [step for step, _ in pairs], [value for _, value in pairs]


def draw_learning(history: list[dict[str, Any]], folder: Path) -> Path:
    """Write the figure of a log into a directory."""
    return replace_picture(folder / LEARNING_CURVE, learning_figure(history))


def evaluation_figure(figures: dict[str, Any]) -> Figure:
    """Draw accuracy and loss by depth, where distributions are known, and acceptance by position in the draft."""
    depths = figures["depths"]
    figure, axes = _panels(3 if depths else 1)
    if depths:
        _draw_accuracies(axes[0], depths)
        _draw_losses_by_depth(axes[1], depths)
    _draw_acceptance(axes[-1], figures)
    _finish(axes)
    return figure


def _draw_accuracies(axes: Axes, depths: list[dict[str, float]]) -> None:
    numbers = [row["depth"] for row in depths]
    for marker, (name, label) in zip(_MARKERS, (("top_1", "the likeliest"), ("top_5", "among the 5 likeliest"))):
        axes.plot(numbers, [100 * row[name] for row in depths], marker=marker, label=f"true token is {label}")
    axes.set(title="What a draft knows by depth", xlabel="tokens ahead", ylabel="accuracy (%)", ylim=(-4, 104))
    axes.legend(loc="best", fontsize=8)


def _draw_losses_by_depth(axes: Axes, depths: list[dict[str, float]]) -> None:
    axes.plot([row["depth"] for row in depths], [row["loss"] for row in depths], color="C3", marker="^")
    axes.set(title="Loss by depth, tokens between known", xlabel="tokens ahead", ylabel="nats per token")
    _from_zero(axes)


def _draw_acceptance(axes: Axes, figures: dict[str, Any]) -> None:
    for marker, row in zip(_MARKERS, figures["decoding"]):
        shares = [100 * share for share in row["accepted_by_position"]]
        axes.plot(range(1, len(shares) + 1), shares, marker=marker, label=f"generated, {row['name']}")
    if held_out := figures["held_out"]:
        shares = [100 * share for share in held_out["accepted_by_position"]]
        axes.plot(range(1, len(shares) + 1), shares, "k.:", label="expected along held-out text, T=1")
    axes.set(title="How many drafts are accepted", xlabel="drafts", ylabel="verifications that accept so many (%)")
    axes.set(ylim=(-4, 104))
    axes.legend(loc="best", fontsize=8)


def analysis_figure(found: dict[str, Any]) -> Figure:
    """Draw losses by depth on the left; on the right, where it is known, the divergence of each layer."""
    has_layers = bool(found["layers"])
    figure, axes = _panels(1 + has_layers)
    for name, (label, style) in _LINES.items():
        rows = [(row["depth"], row[name]) for row in found["depths"] if name in row]
        if rows:
            axes[0].plot(*zip(*rows), style, label=label)
    beyond = [row for row in found["depths"] if row.get("missing_mass", 0) > _MISSING]
    if beyond:
        label = f"hollow: more than {_MISSING:.0%} of the continuations left out"
        points = [row["depth"] for row in beyond], [row["marginal"] for row in beyond]
        axes[0].plot(*points, "C0o", markerfacecolor="white", zorder=3, label=label)
    axes[0].set(title="Loss of the token so far ahead", xlabel="tokens ahead", ylabel="nats")
    axes[0].legend(loc="best", fontsize=8)
    if has_layers:
        axes[1].plot(range(1, len(found["layers"]) + 1), found["layers"], "C4o-")
        axes[1].set(title="Divergence of a layer's distribution from the last", xlabel="layer", ylabel="nats")
    for one in axes:
        _from_zero(one)
    _finish(axes)
    return figure


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of so many panels in a row."""
    figure = Figure(figsize=((6.4 if count < 3 else 5.4) * count, 4.4), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _finish(axes: Sequence[Axes]) -> None:
    """Draw grids, and whole numbers along each horizontal axis, also for a single value."""
    for one in axes:
        left, right = one.dataLim.intervalx
        if left == right:
            one.set_xlim(left - 1, right + 1)
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
        one.grid(alpha=0.3)


def _from_zero(axes: Axes) -> None:
    """Let the vertical axis begin at 0, with room for a marker above the largest value."""
    top = axes.dataLim.intervaly[1]
    axes.set_ylim(0, 1.06 * top if top > 0 else 1)


SPEED_FIGURE, ACCEPTANCE_FIGURE = "speed.png", "acceptance.png"
"""Names of the files."""
_FILLS = ("full", "left", "bottom")  # of the ways of decoding, in turn
_THROUGHPUTS = 5  # of equal throughput, about
_GAP = 0.09  # between labels of these lines, as a share of the axes


def cycle_ms(result: DecodingResult) -> float:
    """Return the milliseconds per call of the backbone, drafting and verification included."""
    return 1000 * result.seconds / result.backbone_calls


def save_figures(folder: Path, reports: Sequence[HeadReport]) -> None:
    """Write both figures as PNG files into a directory."""
    replace_picture(folder / SPEED_FIGURE, speed_figure(reports))
    replace_picture(folder / ACCEPTANCE_FIGURE, acceptance_figure(reports))


def speed_figure(reports: Sequence[HeadReport]) -> Figure:
    """Draw bytes per call against milliseconds per call, with lines of equal throughput (MtPC paper, Figure 1).

    A cross marks plain decoding. A family has one colour and one marker, filled whole for greedy decoding and in part
    for samples; results whose text repeats itself are hollow.
    """
    figure = Figure(figsize=(7.6, 5.8), layout="constrained")
    axes = figure.add_subplot()
    rows = [(index, turn, row) for index, report in enumerate(reports) for turn, row in enumerate(report.single)]
    plain = _plain([row for _, _, row in rows])
    points = [(cycle_ms(row), row.tokens_per_call) for *_, row in rows] + [(plain, 1.0)]
    axes.set(xlim=_range([x for x, _ in points]), ylim=_range([y for _, y in points]))
    for index, turn, row in rows:
        fill = "none" if row.is_degenerate else _FILLS[turn % len(_FILLS)]
        style = f"C{index}", _MARKERS[index % len(_MARKERS)], fill
        axes.add_line(_marker(*style, [cycle_ms(row)], [row.tokens_per_call]))
    axes.add_line(_cross([plain], [1.0]))
    _draw_throughputs(axes, [1000 * y / x for x, y in points])
    axes.set(xlabel="milliseconds per call", ylabel="bytes per call")
    axes.set_title("Up and to the left is faster\n(dotted: equal bytes per second)", pad=22)
    ways = [row.name for row in reports[0].single] if reports else []
    loops = list(dict.fromkeys(row.name for _, _, row in rows if row.is_degenerate))
    _add_legend(figure, [report.name for report in reports], ways, loops)
    return figure


def acceptance_figure(reports: Sequence[HeadReport]) -> Figure:
    """Draw the share of verifications that accept so many drafts: a panel per way of decoding, a line per head.

    Lines with markers are what was generated, hollow where the text repeats itself; thin lines without are what is
    expected along plain texts.
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
            face = "white" if row.is_degenerate else colour
            style = {"color": colour, "marker": marker, "markersize": 5, "markerfacecolor": face}
            axes.plot(range(1, len(generated) + 1), generated, **style)
            axes.plot(range(1, len(expected) + 1), expected, color=colour, linewidth=0.9, alpha=0.7)
            longest = max(longest, len(generated), len(expected))
        axes.set(title=way, xlabel="drafts", ylim=(-4, 104), yticks=range(0, 101, 20))
        axes.grid(alpha=0.3)
    for axes in panels:
        axes.set_xlim(1 - 0.06 * longest, longest + 0.06 * longest)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    panels[0].set_ylabel("verifications that accept so many (%)")
    heads = [Line2D([], [], color=f"C{i}", marker=_MARKERS[i], label=report.name) for i, report in enumerate(reports)]
    rows = [row for report in reports for row in report.single]
    if any(row.expected_by_position for row in rows):
        heads.append(Line2D([], [], color="grey", linewidth=0.9, label="thin: expected along plain texts"))
    if any(row.is_degenerate for row in rows):
        heads.append(_marker("grey", "o", "none", label="hollow: the text repeats itself"))
    figure.legend(handles=heads, loc="outside lower center", ncols=3)
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
        fillstyle="full" if fill == "none" else fill,
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
    for throughput in reversed(MaxNLocator(_THROUGHPUTS).tick_values(min(measured), max(measured))):
        slope = throughput / 1000
        if slope <= 0 or slope * right <= low or slope * left >= high:
            continue
        is_right = slope * right <= high
        x, y = (right, slope * right) if is_right else (high / slope, high)
        position = (x - left) / (right - left) + (high - y) / (high - low)  # along the upper and then the right side
        if position - previous > _GAP:
            previous = position
            yield throughput, (x, y), is_right


def _add_legend(figure: Figure, names: list[str], ways: list[str], loops: list[str]) -> None:
    families = [_marker(f"C{i}", _MARKERS[i % len(_MARKERS)], "full", label=name) for i, name in enumerate(names)]
    words = {"full": "filled", "left": "left half", "bottom": "lower half"}
    used = [(_FILLS[turn % len(_FILLS)], way) for turn, way in enumerate(ways)]
    fills = [_marker("grey", "o", fill, label=f"{words[fill]}: {way}") for fill, way in used]
    plain = _cross(label="one byte at a time")
    hollow = [_marker("grey", "o", "none", label=f"hollow: {way}, repeats itself: no claim") for way in loops]
    figure.legend(handles=[*families, *fills, plain, *hollow], loc="outside lower center", ncols=3)
