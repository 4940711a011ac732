"""The figures of training, evaluation and analysis. They draw what was logged or measured, and measure nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..extras import needs_extra
from ..files import replace_picture

with needs_extra("demo", "figures"):
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

LEARNING_CURVE = "learning_curve.png"
"""Name of the figure beside the log."""
_FEW = 6  # lines between which a legend finds room
_OF_DEPTH = re.compile(r"(eval_)?loss_(?:head|step)_(\d+)$")
_ACCEPTANCE = {
    "eval_expected_accepted": "expected, along held-out text",
    "eval_generated_accepted": "generated, T = 1",
    "num_correct": "slots right (training)",
    "eval_num_correct": "slots right (held out)",
}
_MARKERS = "osD^v"
_LINES = {
    "marginal": ("backbone, tokens between summed out", "C0o-"),
    "head": ("drafter, tokens between summed out", "C1s-"),
    "head_given": ("drafter, tokens between known", "C2D--"),
    "backbone_given": ("backbone, tokens between known", "k^:"),
}


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
    if figures["depths"]:
        shares = [100 * row["accepted_block"] for row in figures["depths"]]
        axes.plot(range(1, len(shares) + 1), shares, "k.:", label="expected along text, T=1")
    axes.set(title="How far drafts are accepted", xlabel="position in the draft", ylabel="accepted up to here (%)")
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
