"""The figure of a run: losses by depth and acceptance over steps. Draws what was logged, measures nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ..extras import needs_extra
from ..files import replace_picture
from .panels import finish, from_zero, panels

with needs_extra("demo", "pictures"):
    from matplotlib import colormaps
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE = "learning_curve.png"
"""Name of the figure beside the log."""
_FEW = 6  # lines between which a legend finds room
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
    figure, axes = panels(1 + bool(drawn))
    _draw_losses(axes[0], history)
    if drawn:
        for index, name in enumerate(drawn):
            axes[1].plot(*_series(history, name), marker="o", markersize=3, color=f"C{index}", label=_ACCEPTANCE[name])
        axes[1].set(title="Accepted drafts per verification", xlabel="step", ylabel="drafts")
        from_zero(axes[1])
        axes[1].legend(loc="best", fontsize=8)
    finish(axes)
    return figure


def _draw_losses(axes: Axes, history: list[dict[str, Any]]) -> None:
    """A colour per depth: lines in training, dots on held-out data."""
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
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}  # many lines leave no room for it among them
    if axes.lines:  # not where the run ended before its first entry
        axes.legend(fontsize=8, **(beside if depths > _FEW else {"loc": "best"}))


def _color(depth: int, depths: int) -> Any:
    """A colour of its own for every depth; the usual ones come again after ten."""
    return f"C{max(depth - 1, 0)}" if depths <= 10 else colormaps["viridis"]((depth - 1) / (depths - 1))


def _depth(name: str) -> tuple[int, bool]:
    match = _OF_DEPTH.match(name)
    return (int(match[2]) if match else 0), name.startswith("eval_")


def _series(history: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    pairs = [(entry["step"], entry[name]) for entry in history if name in entry]
    return [step for step, _ in pairs], [value for _, value in pairs]


def draw_learning(history: list[dict[str, Any]], folder: Path) -> Path:
    """Writes the figure of a log into a directory."""
    return replace_picture(folder / PICTURE, learning_figure(history))
