"""Showing what was measured: coloured text, a table, a picture of acceptance by draft position. Measures nothing."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.table import Table
from rich.text import Text

from ...model_cards import DecodingResult
from ...modeling.evabyte.tokenizer import BYTE_OFFSET, SPECIAL_TOKENS
from ..evaluation import Comparison, Completion
from .head_comparison import HeadFigures, cycle_ms

DRAFTED = "black on green"
"""Style of bytes that were drafted and accepted; a background shows blanks too."""
VERIFIED = "black on yellow"
"""Style of bytes that the verifier added."""
PROMPT = "dim"
"""Style of the prompt."""


def legend() -> Text:
    """One line that says what the colours mean."""
    return Text.assemble(
        ("prompt", PROMPT), "  ", ("drafted and accepted", DRAFTED), "  ", ("verifier's own", VERIFIED)
    )


def coloured(completion: Completion, prompt_lines: int = 4) -> Text:
    """The last lines of the prompt and what was written after it, every byte in the colour of its origin."""
    text = Text().append("".join(completion.prompt.splitlines(keepends=True)[-prompt_lines:]), style=PROMPT)
    for piece, is_drafted in pieces(completion.ids, completion.drafted):
        text.append(piece, style=DRAFTED if is_drafted else VERIFIED)
    return text


def pieces(ids: list[int], drafted: list[bool]) -> Iterator[tuple[str, bool]]:
    """Runs of text that share their origin.

    A character of several bytes has the origin of its last one. Bytes that are no UTF-8 and characters that would move
    the cursor become U+FFFD; special tokens become their literals.

    Args:
        ids: Token ids.
        drafted: For each, whether it was drafted and accepted.

    Yields:
        Text and origin, neighbours with different origins.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    run, origin = "", False
    for token, is_drafted in zip(ids, drafted):
        text = decoder.decode(bytes([token - BYTE_OFFSET])) if token >= BYTE_OFFSET else SPECIAL_TOKENS[token]
        if run and text and is_drafted != origin:
            yield run, origin
            run = ""
        if text:
            run, origin = run + _visible(text), is_drafted
    if run := run + decoder.decode(b"", final=True):
        yield run, origin


def decoding_table(comparisons: list[Comparison]) -> Table:
    """The figures of all ways of decoding, one row each; fits into 80 columns."""
    table = Table(title="With drafts, and plainly: one byte per call", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("decoding", no_wrap=True)
    for column in ("bytes", "backbone\ncalls", "bytes\nper call", "bytes/s", "plain\nbytes/s", "speed-up"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("identical", no_wrap=True)
    for comparison in comparisons:
        result = comparison.result
        table.add_row(
            result.name,
            f"{result.new_tokens:,}",
            f"{result.backbone_calls:,}",
            f"{result.tokens_per_call:.2f}",
            f"{result.tokens_per_second:,.0f}",
            f"{result.plain_tokens_per_second:,.0f}",
            f"{result.speed_up:.2f}x",
            {True: Text("yes", "green"), False: Text("no", "bold red"), None: Text("same law")}[result.identical],
        )
    return table


def heads_table(figures: list[HeadFigures]) -> Table:
    """Head families on one backbone, one row each; fits into 80 columns."""
    table = Table(title=f"Heads, window {figures[0].window}, equal training time", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("head", no_wrap=True)
    columns = ("param-\neters", "window NLL\n(nats)", "greedy:\nper call", "ms", "bytes/s", "sampled:\nper call", "ms")
    for column in (*columns, "bytes/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in figures:
        cells = [row.name, f"{row.parameters / 1e6:.2f}M", f"{row.window_nll:.2f}"]
        for result in (row.greedy, row.sampled):
            cells += [f"{result.tokens_per_call:.2f}", f"{cycle_ms(result):.2f}", f"{result.tokens_per_second:,.0f}"]
        table.add_row(*cells)
    return table


def save_heads_picture(figures: list[HeadFigures], path: Path) -> Path:
    """Draws tokens per call against milliseconds per call, with lines of equal throughput (MtPC paper, Figure 1).

    Args:
        figures: What was measured.
        path: The PNG file to write, under a temporary name first.

    Returns:
        `path`.
    """
    figure = Figure(figsize=(6.8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    points = [(row.name, kind, result) for row in figures for kind, result in _decodings(row)]
    widest = 1.15 * max(cycle_ms(result) for _, _, result in points)
    highest = 1.15 * max(result.tokens_per_call for _, _, result in points)
    for name, kind, result in points:
        marker = {"greedy": "o", "sampled": "s"}[kind]
        (line,) = axes.plot(cycle_ms(result), result.tokens_per_call, marker, markersize=8)
        axes.annotate(
            f" {name}, {kind}", (cycle_ms(result), result.tokens_per_call), color=line.get_color(), fontsize=8
        )
    for throughput in MaxNLocator(8).tick_values(0, 1000 * highest / (0.4 * widest))[1:]:
        axes.plot([0, widest], [0, widest * throughput / 1000], ":", color="grey", linewidth=0.8, zorder=0)
        at = min(widest, 1000 * highest / throughput)
        axes.text(at, at * throughput / 1000, f"{throughput:,.0f}/s", color="grey", fontsize=7, ha="right", va="top")
    axes.set(xlim=(0, widest), ylim=(0, highest), xlabel="latency (ms per call)", ylabel="bytes per call")
    axes.set_title("Acceptance against latency; dotted: equal bytes per second")
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    return temporary.replace(path)


def save_json(values: object, path: Path) -> Path:
    """Writes figures, under a temporary name first; returns `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return temporary.replace(path)


def _decodings(row: HeadFigures) -> tuple[tuple[str, DecodingResult], ...]:
    return ("greedy", row.greedy), ("sampled", row.sampled)


def differences(comparisons: list[Comparison]) -> Iterator[str]:
    """What there is to say about greedy runs that differ; nothing where all is well."""
    for comparison in comparisons:
        for number, completion in enumerate(comparison.completions, 1):
            if completion.difference is not None:
                yield f"{comparison.mode.name}, prompt {number}: with drafts, {completion.difference}"


def save_acceptance_picture(comparisons: list[Comparison], path: Path) -> Path:
    """Draws the share of drafts accepted up to each position, a line for each way of decoding.

    Args:
        comparisons: What was measured.
        path: The PNG file to write, under a temporary name first.

    Returns:
        `path`.
    """
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for comparison in comparisons:
        shares = comparison.accepted_by_position
        axes.plot(range(1, len(shares) + 1), [100 * share for share in shares], marker="o", label=comparison.mode.name)
    axes.set(
        title="How far drafts are accepted",
        xlabel="position in the draft",
        ylabel="accepted up to here (%)",
        ylim=(0, 100),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=120)
    return temporary.replace(path)


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
