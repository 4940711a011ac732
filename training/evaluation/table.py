"""The tables of a bench, one per way of decoding and batch size with a row per method, and the recommended drafts."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ...configuration.cache_names import CACHE, cache_of
from ..results import DecodingResult, MeasuredResults, Number
from ..utils import escaped
from .bench import CONTROL, PLAIN
from .summary import BLEU, EXACT

_CONTEXT, _REPEATS = 200, 7  # tokens before the blocks that are timed, and how often
_Cell = Callable[[DecodingResult], str | Text]


def tables(measured: MeasuredResults) -> Iterator[Table]:
    """Yield the tables of all settings."""
    for (mode, batch), rows in groupby(measured.results, key=lambda row: (row.decoding or row.name, row.batch_size)):
        settings = list(rows)
        yield _table(f"{mode}, batch {batch}", settings, measured.unit, _COLUMNS)
        yield _table("", settings, measured.unit, _DETAILS)
        if any(row.quality for row in settings):
            yield _table("", settings, measured.unit, _QUALITY)


def _table(title: str, rows: list[DecodingResult], unit: str, columns: dict[str, _Cell]) -> Table:
    """Return the columns that have values in some row; a table fits into 80 characters."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    shown = {head: cell for head, cell in columns.items() if any(cell(row) for row in rows)}
    table.add_column("method", overflow="fold")
    for head in shown:
        table.add_column(head.replace("UNIT", f"{unit}s"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(escaped(row.method or row.name)), *(cell(row) for cell in shown.values()))
    return table


def _number(value: Number | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _claimed(cell: _Cell) -> _Cell:
    """Return a cell of drafts or speed, which says why it claims nothing."""
    return lambda row: Text("loops", "bold yellow") if row.only_loops else cell(row)


def _expected(row: DecodingResult) -> str:
    length = "" if row.expected_tokens_per_call is None else f" ({len(row.expected_by_position)})"
    return _number(row.expected_tokens_per_call) + length


def _speed(row: DecodingResult) -> str | Text:
    if row.is_unstable:
        return Text("unstable", "bold yellow")
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
    return f"{words} + {row.near_ties} ties" if row.is_lossless else Text(f"{words} NOT LOSSLESS", "bold red")


def _macro(row: DecodingResult) -> Number | None:
    return fmean(row.category_speed_ups.values()) if row.category_speed_ups else None


_COLUMNS: dict[str, _Cell] = {
    "UNIT\nper call": _claimed(lambda row: _number(row.tokens_per_verification or row.tokens_per_call)),
    "expected\n(draft)": _expected,
    "speed-up\n(quartiles)": _claimed(_speed),
    "ms per\ncall": lambda row: _number(row.call_ms, ".1f"),
    "left\nout": lambda row: _number(row.looping_share, ".0%"),
    "same texts": _same,
}
_QUALITY: dict[str, _Cell] = {
    "exact match, %": lambda row: _number(row.quality.get(EXACT), ".1f"),
    "BLEU": lambda row: _number(row.quality.get(BLEU), ".1f"),
}
_DETAILS: dict[str, _Cell] = {
    "whole\ncalls": lambda row: _number(row.whole_speed_ups[1]) if row.claims_speed and row.whole_speed_ups else "",
    "micro": lambda row: _number(row.micro_speed_up) if row.claims_speed else "",
    "macro": lambda row: _number(_macro(row)) if row.claims_speed else "",
    "ms of\ndrafts": lambda row: _number(row.draft_ms, ".1f"),
    "ms of\nprompt": lambda row: _number(row.prompt_ms, ".0f"),
    "re-\npeat": lambda row: _number(row.repeated_share, ".0%"),
    "cache\nMB": lambda row: "" if row.cache_bytes is None else f"{row.cache_bytes / 1e6:.1f}",
    "accepted by\nposition, %": lambda row: " ".join(f"{100 * share:.0f}" for share in row.reached_by_position[:6]),
}


def explanation(measured: MeasuredResults) -> Iterator[str]:
    """Yield what the columns mean, and what is left out."""
    rows, unit = measured.results, measured.unit
    yield (
        f"{unit}s per call: of verifications, without the prompt's own call; expected: the same along the plain texts, "
        "for drafts of the length in brackets. Speed-ups: ratios to plain decoding by turns, without the prompts' own "
        "calls; whole calls: with them; micro: of the sums, macro: the mean over categories. Left out: texts of which "
        "more than half repeats itself, here or in plain decoding; they are in no figure. Same texts: greedy ones; "
        "those that differ by rounding alone are ties."
    )
    unstable = {(row.decoding or row.name, row.batch_size): row.plain_ratios for row in rows if row.is_unstable}
    for (mode, batch), ratios in unstable.items():
        yield (
            f"{mode}, batch {batch}: plain decoding ran at {min(ratios):.2f} to {max(ratios):.2f} times its own speed "
            "by turns, so that no speed-up is reported: let the machine do nothing else, or measure for longer."
        )
    for name, reason in measured.not_measured.items():
        yield f"n/a: {name}: {reason}"
    for row in rows:
        if not row.is_lossless:
            yield f"NOT LOSSLESS: {row.name}: texts differ from plain decoding's by more than rounding explains."


@torch.no_grad()
def block_costs(model: Any, lengths: Sequence[int], batch_size: int = 1) -> dict[int, float]:
    """Return the time of a block of so many tokens over that of one token, after 200 tokens; medians by turns."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.arange(_CONTEXT + max(lengths), device=model.device).remainder(vocab_size).expand(batch_size, -1)
    start = cache_of(model(ids[:, :_CONTEXT], use_cache=True))
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for number in range(1 + _REPEATS):  # the first time sets things up
        for length, seconds in times.items():
            cache, block = copy.deepcopy(start), ids[:, _CONTEXT : _CONTEXT + length]
            began = time.perf_counter()
            model(block, **{CACHE: cache}, use_cache=True).logits[0, 0, 0].item()
            if number:
                seconds.append(time.perf_counter() - began)
    return {length: median(seconds) / median(times[1]) for length, seconds in times.items()}


def best_length(row: DecodingResult, plain_ms: Number, costs: dict[int, float]) -> tuple[float, int, float]:
    """Return the expected speed-up, the length and the tokens per call of the drafts of a method that pay most.

    A draft of k tokens is expected to yield 1 + the shares accepted up to k, for a block of k + 1 tokens, whose cost is
    that of one token times `costs`, and k parts of the time that its drafts took.
    """
    longest, found = row.draft_length or 0, []
    for length in range(1, longest + 1):
        tokens = 1 + sum(row.accepted_by_position[:length])
        cost = costs[length + 1] + (row.draft_ms or 0.0) / plain_ms * length / longest
        found.append((tokens / cost, length, tokens))
    return max(found)


def recommendation(model: Any, rows: Sequence[DecodingResult]) -> Iterator[str]:
    """Time blocks of the backbone, and yield what pays for every way of decoding and batch size of a bench here."""
    lengths = range(1, 2 + max((row.draft_length or 0 for row in rows), default=0))
    for batch_size in dict.fromkeys(row.batch_size for row in rows):
        costs = block_costs(model, lengths, batch_size)
        shown = ", ".join(f"{length}: {cost:.2f}" for length, cost in costs.items())
        yield f"A block of so many tokens costs, over one token, at batch {batch_size}: {shown}."
        for mode in dict.fromkeys(row.decoding for row in rows):
            here = {row.method: row for row in rows if (row.decoding, row.batch_size) == (mode, batch_size)}
            plain_ms = (here[PLAIN].call_ms if PLAIN in here else None) or 1.0
            drafting = [row for name, row in here.items() if row.accepted_by_position and name not in (PLAIN, CONTROL)]
            found = [(*best_length(row, plain_ms, costs), row) for row in drafting if row.claims_speed]
            if not found:
                yield f"{mode}, batch {batch_size}: nothing can be said: no drafts, loops, or no steady speed."
                continue
            speed_up, length, tokens, row = max(found, key=lambda each: each[0])
            words = f"{row.method} with num_assistant_tokens={length}: {tokens:.2f} per call, {speed_up:.2f} x plain "
            words += f"expected ({row.speed_up:.2f} x measured as it was)"
            advice = f"take {words}" if speed_up > 1 else f"decode plainly; the best is {words}"
            yield f"{mode}, batch {batch_size}: {advice}."
