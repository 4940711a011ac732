"""The figure of an analysis: losses by depth, and the logit lens by layer. Measures nothing."""

from __future__ import annotations

from typing import Any

from ..extras import needs_extra

with needs_extra("demo", "pictures"):
    from matplotlib.figure import Figure

from .panels import finish, from_zero, panels

_LINES = {
    "marginal": ("backbone, tokens between summed out", "C0o-"),
    "head": ("drafter, tokens between summed out", "C1s-"),
    "head_given": ("drafter, tokens between known", "C2D--"),
    "backbone_given": ("backbone, tokens between known", "k^:"),
}


def analysis_figure(found: dict[str, Any]) -> Figure:
    """Losses by depth on the left; on the right, where it is known, what each layer already says.

    Args:
        found: What `analyze` found.
    """
    has_layers = bool(found["layers"])
    figure, axes = panels(1 + has_layers)
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
        from_zero(one)
    finish(axes)
    return figure
