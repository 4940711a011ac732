"""The figures of training, evaluation and benches: they draw what was logged or measured.

In those of the demo a family of heads has one colour and one marker; ways of decoding differ by fill, not by colour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from ..evaluation.bench import PLAIN
from ..results import DecodingResult, MeasuredResults
from ..utils import needs_extra, replace_picture

with needs_extra("demo", "figures"):
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

LEARNING_CURVE = "learning_curve.png"
"""Name of the figure beside the log."""
_FEW, _IN_A_COLUMN = 6, 20  # lines between which a legend finds room, and which it lists below one another
_OF_DEPTH = re.compile(r"(eval_)?loss_(?:head|step)_(\d+)$")
_ACCEPTANCE = {
    "eval_expected_accepted": "expected, along held-out text, T = 1",
    "eval_generated_accepted": "generated, T = 1",
    "num_correct": "slots right (training)",
    "eval_num_correct": "slots right (held out)",
}
_MARKERS = "osD^vPX*"  # of the families, in turn; colour alone would not reach every eye


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
    """Draw accuracy and loss by depth, and acceptance by position in the draft."""
    depths = figures["depths"]
    figure, axes = _panels(3)
    numbers = [row["depth"] for row in depths]
    for marker, (name, label) in zip(_MARKERS, (("top_1", "the likeliest"), ("top_5", "among the 5 likeliest"))):
        axes[0].plot(numbers, [100 * row[name] for row in depths], marker=marker, label=f"true token is {label}")
    axes[0].set(title="What a draft knows by depth", xlabel="tokens ahead", ylabel="accuracy (%)", ylim=(-4, 104))
    axes[1].plot(numbers, [row["loss"] for row in depths], color="C3", marker="^")
    axes[1].set(title="Loss by depth, tokens between known", xlabel="tokens ahead", ylabel="nats per token")
    _from_zero(axes[1])
    shares = figures["held_out"]["accepted_by_position"]
    axes[2].plot(range(1, len(shares) + 1), [100 * share for share in shares], "k.:")
    axes[2].set(title="Expected along held-out text, T=1", xlabel="drafts", ylim=(-4, 104))
    axes[2].set_ylabel("verifications that accept so many (%)")
    _finish(axes)
    return figure


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of so many panels in a row."""
    figure = Figure(figsize=((6.4 if count < 3 else 5.4) * count, 4.4), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _finish(axes: Sequence[Axes]) -> None:
    """Draw grids and legends, and whole numbers along each horizontal axis, also for a single value."""
    for one in axes:
        left, right = one.dataLim.intervalx
        if left == right:
            one.set_xlim(left - 1, right + 1)
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
        one.grid(alpha=0.3)
        named = len(one.get_legend_handles_labels()[0])
        if named > _FEW:  # many lines leave no room for a legend among them
            one.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), ncols=1 + named // _IN_A_COLUMN)
        elif named:
            one.legend(fontsize=8, loc="best")


def _from_zero(axes: Axes) -> None:
    """Let the vertical axis begin at 0, with room for a marker above the largest value."""
    top = axes.dataLim.intervaly[1]
    axes.set_ylim(0, 1.06 * top if top > 0 else 1)


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
