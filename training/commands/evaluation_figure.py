"""The picture of an evaluation: what drafts know by depth, and how far they are kept. Measures nothing."""

from __future__ import annotations

from typing import Any

from ..extras import needs_extra

with needs_extra("demo", "pictures"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

_MARKERS = "osD^v"


def evaluation_figure(figures: dict[str, Any]) -> Figure:
    """Loss and accuracy by depth on the left, where laws are known; acceptance by position in the draft on the right.

    Args:
        figures: What `evaluate` found.
    """
    depths = figures["depths"]
    figure = Figure(figsize=(6.4 * (1 + bool(depths)), 4.4), layout="constrained")
    axes = figure.subplots(1, 1 + bool(depths), squeeze=False)[0]
    if depths:
        _draw_depths(axes[0], depths)
    _draw_acceptance(axes[-1], figures)
    for one in axes:
        one.xaxis.set_major_locator(MaxNLocator(integer=True))
        one.grid(alpha=0.3)
    return figure


def _draw_depths(axes: Axes, depths: list[dict[str, float]]) -> None:
    numbers = [row["depth"] for row in depths]
    for marker, (name, label) in zip(_MARKERS, (("top_1", "among 1"), ("top_5", "among 5"))):
        axes.plot(numbers, [100 * row[name] for row in depths], marker=marker, label=f"true token {label} (%)")
    axes.set(title="What a draft knows by depth", xlabel="tokens ahead", ylabel="accuracy (%)", ylim=(-4, 104))
    losses = axes.twinx()
    losses.plot(numbers, [row["loss"] for row in depths], color="C3", marker="^", linestyle="--", label="loss (nats)")
    losses.set(ylabel="loss (nats)", ylim=(0, None))
    lines = [*axes.get_lines(), *losses.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], loc="best", fontsize=8)


def _draw_acceptance(axes: Axes, figures: dict[str, Any]) -> None:
    for marker, row in zip(_MARKERS, figures["decoding"]):
        shares = [100 * share for share in row["accepted_by_position"]]
        axes.plot(range(1, len(shares) + 1), shares, marker=marker, label=f"generated, {row['name']}")
    if figures["depths"]:
        shares = [100 * row["accepted_block"] for row in figures["depths"]]
        axes.plot(range(1, len(shares) + 1), shares, color="black", linestyle=":", label="expected along text, T=1")
    axes.set(title="How far drafts are kept", xlabel="position in the draft", ylabel="kept up to here (%)")
    axes.set(ylim=(-4, 104))
    axes.legend(loc="best", fontsize=8)
