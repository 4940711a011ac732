"""The picture of a run: losses by depth and acceptance over steps. Draws what was logged, measures nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..extras import needs_extra
from ..files import replace_picture

with needs_extra("demo", "pictures"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

PICTURE = "learning_curve.png"
"""Name of the picture beside the log."""
_OF_DEPTH = re.compile(r"(eval_)?loss_(?:head|step)_(\d+)$")
_ACCEPTANCE = {
    "eval_expected_accepted": "expected, along held-out text",
    "eval_generated_accepted": "generated, T = 1",
    "num_correct": "slots right (training)",
    "eval_num_correct": "slots right (held out)",
}


def learning_figure(history: list[dict[str, Any]]) -> Figure:
    """Losses by depth, and accepted drafts where they were measured.

    Args:
        history: The Trainer's log: dictionaries with `step`.
    """
    drawn = [name for name in _ACCEPTANCE if any(name in entry for entry in history)]
    figure = Figure(figsize=(6.4 * (1 + bool(drawn)), 4.4), layout="constrained")
    axes = figure.subplots(1, 1 + bool(drawn), squeeze=False)[0]
    _draw_losses(axes[0], history)
    if drawn:
        for index, name in enumerate(drawn):
            axes[1].plot(*_series(history, name), marker="o", markersize=3, color=f"C{index}", label=_ACCEPTANCE[name])
        axes[1].set(title="Accepted drafts per verification", xlabel="step", ylim=(0, None))
        axes[1].legend(loc="best", fontsize=8)
    for one in axes:
        one.grid(alpha=0.3)
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _draw_losses(axes: Axes, history: list[dict[str, Any]]) -> None:
    """A colour per depth: lines in training, dots on held-out data."""
    names = sorted({name for entry in history for name in entry if _OF_DEPTH.match(name)}, key=_depth)
    for name in names or ["loss", "eval_loss"]:
        steps, values = _series(history, name)
        depth, is_held_out = _depth(name)
        if not steps:
            continue
        word = f"depth {depth}" if names else "loss"
        style = {"marker": "o", "markersize": 4, "linestyle": "none"} if is_held_out else {}
        label = None if is_held_out and names else f"{word}{', held out' if is_held_out else ''}"
        axes.plot(steps, values, color=f"C{max(depth - 1, 0) % 10}", label=label, **style)
    has_dots = any(_depth(name)[1] for name in names)
    axes.set(title="Loss by depth" + (" (dots: held out)" if has_dots else ""), xlabel="step", ylabel="nats per token")
    axes.legend(loc="best", fontsize=8, ncols=2 if len(names) > 8 else 1)


def _depth(name: str) -> tuple[int, bool]:
    match = _OF_DEPTH.match(name)
    return (int(match[2]) if match else 0), name.startswith("eval_")


def _series(history: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [(entry["step"], entry[name]) for entry in history if name in entry]
    return [step for step, _ in pairs], [value for _, value in pairs]


def draw_learning(history: list[dict[str, Any]], folder: Path) -> Path:
    """Writes the picture of a log into a folder."""
    return replace_picture(folder / PICTURE, learning_figure(history))
