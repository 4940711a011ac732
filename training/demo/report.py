"""Coloured outputs, tables and notes of what was measured."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from ...modeling.evabyte.tokenizer import BYTE_OFFSET, SPECIAL_TOKENS
from ..byte_text import visible
from ..evaluation import Comparison, Completion, HeadReport
from ..results import DecodingResult

DRAFTED = "black on green"
"""Style of bytes that were drafted and accepted; a background shows blanks too."""
VERIFIED = "black on yellow"
"""Style of bytes that the verifier added."""
PROMPT = "dim"
"""Style of the prompt."""


def cycle_ms(result: DecodingResult) -> float:
    """Return the milliseconds per call of the backbone, drafting and verification included."""
    return 1000 * result.seconds / result.backbone_calls


def legend() -> Text:
    """Return one line that says what the colours mean."""
    return Text.assemble(
        ("prompt", PROMPT), "  ", ("drafted and accepted", DRAFTED), "  ", ("verifier's own", VERIFIED)
    )


def coloured(completion: Completion, prompt_lines: int = 4) -> Text:
    """Return the last lines of the prompt and what was written after it, every byte in the colour of its origin."""
    text = Text().append("".join(completion.prompt.splitlines(keepends=True)[-prompt_lines:]), style=PROMPT)
    for piece, is_drafted in pieces(completion.ids, completion.drafted):
        text.append(piece, style=DRAFTED if is_drafted else VERIFIED)
    return text


def pieces(ids: list[int], drafted: list[bool]) -> Iterator[tuple[str, bool]]:
    """Yield runs of text that share their origin.

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


def reports_table(reports: Sequence[HeadReport], title: str) -> Table:
    """Return the figures of all heads and ways of decoding, a row each; fits into 80 columns."""
    table = Table(
        title=title,
        caption=_caption(reports),
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("head", no_wrap=True)
    table.add_column("decoding", no_wrap=True)
    columns = ("per\ncall", "range", "ex-\npect", "ms", "per s", "speed\nup", "re-\npeat")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("same", no_wrap=True)
    for report in reports:
        rows = report.measured.results
        for row in rows:
            cells = report.name, _short(row), *_cells(row)
            table.add_row(*cells, end_section=row is rows[-1])
    return table


def _cells(row: DecodingResult) -> Iterator[str | Text]:
    yield f"{row.tokens_per_call:.2f}"
    yield "" if row.spread is None else f"{row.spread[0]:.1f}-{row.spread[1]:.1f}"
    yield "" if row.expected_tokens_per_call is None else f"{row.expected_tokens_per_call:.2f}"
    yield f"{cycle_ms(row):.1f}"
    yield f"{row.tokens_per_second:,.0f}"
    yield Text("loops", "bold yellow") if row.is_degenerate else f"{row.speed_up:.2f}x"
    yield "" if row.repeated_share is None else f"{row.repeated_share:.0%}"
    yield {True: Text("yes", "green"), False: Text("no", "bold red"), None: Text("drawn")}[row.identical]


def _short(row: DecodingResult) -> str:
    return row.name.removeprefix("sampled, ").replace(", batch ", " x ")


def _caption(reports: Sequence[HeadReport]) -> str:
    rows = reports[0].measured.results
    plain = ", ".join(f"{_short(row)} {row.plain_tokens_per_second:,.0f}" for row in rows)
    return f"Plain decoding, bytes per second: {plain}"


def explanation(reports: Sequence[HeadReport]) -> Iterator[str]:
    """Say what the columns mean, and what is wrong with a row where its text repeats itself."""
    yield "per call: bytes for one call of the backbone, and their range over prompts; plain decoding has 1."
    yield "ms: milliseconds of such a call, with drafting and verification."
    rows = [(report, row) for report in reports for row in report.measured.results]
    if any(row.expected_tokens_per_call is not None for _, row in rows):
        yield "expected: computed along held-out text for drafts as long as the window; nothing is drawn."
    yield "repeats: text covered by passages that stand in it twice; above 50 % no speed-up is claimed."
    yield "same: greedy texts are compared byte by byte; sampled ones have the same distribution."
    loops = [f"{report.name} {row.name}" for report, row in rows if row.is_degenerate]
    if loops:
        yield f"The text of these repeats itself, so that its speed says little: {'; '.join(loops)}."


def differences(comparisons: list[Comparison]) -> Iterator[str]:
    """Say what there is to say about greedy runs that differ; nothing where all is well."""
    for comparison in comparisons:
        for number, completion in enumerate(comparison.completions, 1):
            if completion.difference is not None:
                yield f"{comparison.mode.name}, prompt {number}: with drafts, {completion.difference}"
