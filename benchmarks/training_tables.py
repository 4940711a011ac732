"""The tables of docs/training.md: what `training.py` measured, and what a drafter costs to train, from counts.

Counts are the products of a step, at a share of what an H100 multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu import SHAPES
from measuring import markdown

TOKENS = 50e6
OPERATIONS, USED = 989e12, 0.4
"""Dense bfloat16 operations per second of an H100 (SXM), and the share of them that is reckoned with."""
DEPTHS, RANK, STEPS, DRAFTED = 4, 4, 7, 32_000


@dataclass(frozen=True)
class Counts:
    """Operations per token of the parts of a model of some width.

    Attributes:
        square: A product with a [d, d] matrix.
        layer: Those of one decoder layer, forward.
        body: Those of all layers.
        logits: Those of the logits of all tokens.
        few: Those of the logits of a draft vocabulary.
    """

    square: float
    layer: float
    body: float
    logits: float
    few: float

    @classmethod
    def of(cls, shape: dict[str, Any]) -> Counts:
        """Count; attention's own products are left out, which is right for short rows."""
        width = shape["hidden_size"]
        kept = shape["num_key_value_heads"] / shape["num_attention_heads"]
        layer = 2 * width * (2 * width * (1 + kept) + 3 * shape["intermediate_size"])
        logits = 2 * width * shape["vocab_size"]
        body = layer * shape["num_hidden_layers"]
        return cls(2 * width**2, layer, body, logits, logits * DRAFTED / shape["vocab_size"])


def operations(counts: Counts) -> dict[str, tuple[float, float]]:
    """Per trainer: operations per token of a step, and those of the frozen backbone, which stored states save.

    What learns costs three times its forward; a frozen unembedding costs two products, as it has no gradient.
    """
    square, layer, body, logits, few = vars(counts).values()
    ranked = DEPTHS * RANK * (2 * logits + 3 * square)
    draft_layer = 3 * (layer + 2 * square)
    return {
        "FF": (DEPTHS * (2 * logits + 3 * square), body),
        "CP, HMM, BTree": (ranked, body),
        "Medusa": ((DEPTHS - 1) * (2 * logits + 3 * square), body),
        "Hydra": ((DEPTHS - 1) * (2 * logits + 3 * DEPTHS / 2 * square), body),
        "EAGLE-1": (3 * logits + draft_layer, body),
        "EAGLE-3": (logits + (1 + 3 * STEPS) * few + STEPS * draft_layer + 9 * square, body),
        "modules": (3 * body + 3 * logits + 3 * logits + draft_layer, 0.0),
        "PTP": (body + logits + 0.5 * (2 * body + 2 * logits), 0.0),
        "joint FF": (3 * body + 3 * logits + DEPTHS * 3 * (logits + square), 0.0),
    }


def costs() -> str:
    """The table: hours for 50M tokens, on backbones of the shapes of `gpu.py`."""
    found = {shape: operations(Counts.of(SHAPES[shape])) for shape in ("1B", "8B")}

    def hours(each: float) -> str:
        return f"{each * TOKENS / (OPERATIONS * USED) / 3600:.1f}"

    rows = []
    for name in found["1B"]:
        cells = [name]
        for shape in found:
            step, backbone = found[shape][name]
            cells += [hours(step + backbone), hours(step) if backbone else "-"]
        rows.append(cells)
    heads = [part for shape in found for part in (f"{shape}: first epoch, h", f"{shape}: from stored states, h")]
    return markdown(["trainer", *heads], rows)


def measured(results: dict[str, Any]) -> str:
    """The table of what was measured."""

    def cells(row: dict[str, Any]) -> list[str]:
        ratio, peer = row["ms_per_token"] / row["floor"], row.get("speculators")
        return [
            row["trainer"], f"{row['ms_per_token']:.2f}", f"{ratio:.2f} x {row['floor_is']}",
            "-" if row["plain_trainer"] is None else f"{row['ms_per_token'] / row['plain_trainer']:.3f}",
            "-" if peer is None else f"{row['ms_per_token'] / peer:.2f}", f"{row['peak_mib']:.0f}",
            f"{row['computed_per_useful']:.2f}", f"{row['backbone_share']:.0%}",
        ]  # fmt: skip

    columns = (
        "trainer", "ms per token", "of its floor", "of `Trainer`", "of speculators", "peak, MiB",
        "computed per useful", "backbone's share",
    )  # fmt: skip
    return markdown(columns, map(cells, results["rows"]))
