"""Showing what was measured: coloured text, tables, notes. Measures nothing."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from ...modeling.evabyte.tokenizer import BYTE_OFFSET, SPECIAL_TOKENS
from ..byte_text import visible
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
            run, origin = run + visible(text), is_drafted
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


def save_json(values: object, path: Path) -> Path:
    """Writes figures, under a temporary name first; returns `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return temporary.replace(path)


def differences(comparisons: list[Comparison]) -> Iterator[str]:
    """What there is to say about greedy runs that differ; nothing where all is well."""
    for comparison in comparisons:
        for number, completion in enumerate(comparison.completions, 1):
            if completion.difference is not None:
                yield f"{comparison.mode.name}, prompt {number}: with drafts, {completion.difference}"
