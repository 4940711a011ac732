"""The table of a bench: a part per way of decoding and batch size, a row per method."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..results import DecodingResult, MeasuredResults

_Cell = Callable[[DecodingResult], str | Text]


def tables(measured: MeasuredResults) -> Iterator[Table]:
    """Yield the tables of all settings."""
    for (mode, batch), rows in groupby(measured.results, key=lambda row: (row.decoding or row.name, row.batch_size)):
        settings = list(rows)
        yield _table(f"{mode}, batch {batch}", settings, measured.unit, _COLUMNS)
        yield _table("", settings, measured.unit, _DETAILS)


def _table(title: str, rows: list[DecodingResult], unit: str, columns: dict[str, _Cell]) -> Table:
    """Return the columns that have values in some row; a table fits into 80 characters."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown = {head: cell for head, cell in columns.items() if any(cell(row) for row in rows)}
    table.add_column("method", overflow="fold")
    for head in shown:
        table.add_column(head.replace("UNIT", f"{unit}s"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.method or row.name, *(cell(row) for cell in shown.values()))
    return table


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _expected(row: DecodingResult) -> str:
    length = "" if row.expected_tokens_per_call is None else f" ({len(row.expected_by_position)})"
    return _number(row.expected_tokens_per_call) + length


def _speed(row: DecodingResult) -> str | Text:
    if row.is_degenerate or (row.looping and not row.speed_ups):
        return Text("loops", "bold yellow")
    if not row.speed_ups:
        return f"{row.speed_up:.2f}x"
    low, middle, high = row.speed_ups
    return f"{middle:.2f}x ({low:.2f}-{high:.2f})"


def _same(row: DecodingResult) -> str | Text:
    if row.identical is None:
        return ""
    if row.texts is None or row.differing is None:
        return Text("yes", "green") if row.identical else Text("no", "bold red")
    words = f"{row.texts - row.differing}/{row.texts}"
    if not row.differing:
        return Text(words, "green")
    if row.is_lossless:
        return f"{words} + {row.near_ties} ties"
    return Text(f"{words} NOT LOSSLESS", "bold red")


_COLUMNS: dict[str, _Cell] = {
    "UNIT\nper call": lambda row: _number(row.tokens_per_verification or row.tokens_per_call),
    "expected\n(draft)": _expected,
    "speed-up\n(quartiles)": _speed,
    "ms per\ncall": lambda row: _number(row.call_ms, ".1f"),
    "re-\npeat": lambda row: _number(row.repeated_share, ".0%"),
    "same texts": _same,
}
_DETAILS: dict[str, _Cell] = {
    "micro": lambda row: "" if row.is_degenerate else _number(row.micro_speed_up),
    "macro": lambda row: "" if row.is_degenerate else _number(row.macro_speed_up),
    "ms of\ndrafts": lambda row: _number(row.draft_ms, ".1f"),
    "ms of\nprompt": lambda row: _number(row.prompt_ms, ".0f"),
    "cache\nMB": lambda row: "" if row.cache_bytes is None else f"{row.cache_bytes / 1e6:.1f}",
    "accepted by\nposition, %": lambda row: " ".join(f"{100 * share:.0f}" for share in row.accepted_by_position[:8]),
}


def explanation(measured: MeasuredResults) -> Iterator[str]:
    """Say what the columns mean, and what is left out."""
    rows, unit = measured.results, measured.unit
    yield (
        f"{unit}s per call: of verifications, without the prompt's own call; expected: the same along the plain texts, "
        "for drafts of the length beside it. Speed-ups: ratios to plain decoding by turns, without the prompts' own "
        "calls; micro: of the sums, macro: the mean over categories. Same texts: greedy ones; those that differ "
        "by rounding alone are ties."
    )
    if any(row.looping for row in rows):
        most = max(row.looping or 0 for row in rows)
        yield f"Up to {most} calls of a row repeat more than half of their text: they are in no speed-up."
    for name, reason in measured.not_measured.items():
        yield f"n/a: {name}: {reason}"
    for row in rows:
        if not row.is_lossless:
            yield f"NOT LOSSLESS: {row.name}: texts differ from plain decoding's by more than rounding explains."
