"""The figure of an evaluation: what drafts know by depth, and how far they are kept. Measures nothing."""

from __future__ import annotations

from typing import Any

from ..extras import needs_extra

with needs_extra("demo", "pictures"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from .panels import finish, from_zero, panels

_MARKERS = "osD^v"


def evaluation_figure(figures: dict[str, Any]) -> Figure:
    """Accuracy and loss by depth, where distributions are known, each in a panel; acceptance by position in the draft
    at last.

    Args:
        figures: What `evaluate` found.
    """
    depths = figures["depths"]
    figure, axes = panels(3 if depths else 1)
    if depths:
        _draw_accuracies(axes[0], depths)
        _draw_losses(axes[1], depths)
    _draw_acceptance(axes[-1], figures)
    finish(axes)
    return figure


def _draw_accuracies(axes: Axes, depths: list[dict[str, float]]) -> None:
    numbers = [row["depth"] for row in depths]
    for marker, (name, label) in zip(_MARKERS, (("top_1", "the likeliest"), ("top_5", "among the 5 likeliest"))):
        axes.plot(numbers, [100 * row[name] for row in depths], marker=marker, label=f"true token is {label}")
    axes.set(title="What a draft knows by depth", xlabel="tokens ahead", ylabel="accuracy (%)", ylim=(-4, 104))
    axes.legend(loc="best", fontsize=8)


def _draw_losses(axes: Axes, depths: list[dict[str, float]]) -> None:
    axes.plot([row["depth"] for row in depths], [row["loss"] for row in depths], color="C3", marker="^")
    axes.set(title="Loss by depth, tokens between known", xlabel="tokens ahead", ylabel="nats per token")
    from_zero(axes)


def _draw_acceptance(axes: Axes, figures: dict[str, Any]) -> None:
    for marker, row in zip(_MARKERS, figures["decoding"]):
        shares = [100 * share for share in row["accepted_by_position"]]
        axes.plot(range(1, len(shares) + 1), shares, marker=marker, label=f"generated, {row['name']}")
    if figures["depths"]:
        shares = [100 * row["accepted_block"] for row in figures["depths"]]
        axes.plot(range(1, len(shares) + 1), shares, "k.:", label="expected along text, T=1")
    axes.set(title="How far drafts are kept", xlabel="position in the draft", ylabel="kept up to here (%)")
    axes.set(ylim=(-4, 104))
    axes.legend(loc="best", fontsize=8)
