"""`tokenahead bench`: methods by prompts by settings in one process, as tables, figures and `results.json`."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, product
from pathlib import Path
from statistics import fmean

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

from ... import __version__
from ...generation.backbone.wrapped_models import Kwargs
from ..evaluation.bench import BLEU, EXACT, LINES, Bench, Protocol, largest_error, measured_results
from ..evaluation.decoding import PLAIN, methods_of, named_mode
from ..evaluation.lossless import in_words
from ..evaluation.prompts import PromptEncoder, read_prompts
from ..loading import load_model
from ..requests import BenchRequest
from ..results import DecodingResult, MeasuredResults, Number
from ..utils import check_same, escaped, needs_extra, replace_figure, replace_file, shown_word

with needs_extra("demo", "figures"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

RESULTS, SETTINGS, BENCH_FIGURE, FRONTIER_FIGURE = "results.json", "settings.json", "bench.png", "frontier.png"
"""Names of the files of results, of settings and of the figures."""
_SETTINGS = "model", "methods", "new_tokens", "dtype", "device", "threads", "seed", "raw", "no_thinking", "force_length"
"""Options that must be the same where a run continues."""
_MARKERS = "osD^vPX*"  # of the methods, in turn; colour alone would not reach every eye
_HOLLOW: Kwargs = {"fillstyle": "full", "markerfacecolor": "white"}  # markers without a claim
_POINT: Kwargs = {"linestyle": "none", "markersize": 9, "markeredgewidth": 1.8}
_PLAIN: Kwargs = _POINT | {"marker": "x", "color": "black"}
_Cell = Callable[[DecodingResult], str | Text]


def main(request: BenchRequest) -> int:
    """Measure, show the table, and write results and figures; after an interruption, of what is there.

    Return 0 where all methods are lossless, else 1.
    """
    console = Console(highlight=False, emoji=False)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    limits = request.new_tokens, request.force_length, request.per_category, request.seconds, request.seed
    modes = [named_mode(words) for words in request.decoding]
    protocol = Protocol(modes, request.batch_size, *limits, not request.no_expected, request.quality)
    prompts, broken = read_prompts(request.prompts, request.skip_broken, request.ignore_columns)
    if request.quality and not any(map(any, (prompt.references for prompt in prompts))):
        raise ValueError(f"--quality: no prompt of {request.prompts} has a `reference` or an `answer`; leave it out")
    file, digest = request.output / SETTINGS, hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
    settings = {name: vars(request)[name] for name in _SETTINGS} | {"prompts": digest, "version": __version__}
    if file.is_file():
        check_same(f"--output {request.output}", json.loads(file.read_text(encoding="utf-8")), settings)
    logging.disable_progress_bar()
    model, tokenizer = load_model(request.model, request.dtype, request.device)
    methods, refused = methods_of(request.methods, model)
    named = {method.name for method in methods} - {PLAIN}
    if refused and not named:
        raise _none_measured(refused)
    for name, reason in refused.items():
        console.print(f"left out: {name}: {reason}", markup=False)
    replace_file(file, json.dumps(settings, indent=1) + "\n")
    encoder = PromptEncoder(tokenizer, not request.raw, not request.no_thinking)
    encoder.warn_of_thinking(method.drafter for method in methods)
    bench, interrupted = Bench(methods, encoder, protocol, request.output), None
    try:
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("measuring", total=None)
            bench.run(prompts, lambda done, count: progress.update(task, completed=done, total=count))
    except KeyboardInterrupt as error:  # the measured rows are saved
        interrupted = error
        console.print("Interrupted; the same command continues where this one ended.", markup=False)
    for words in broken:
        console.print(f"left out: {request.prompts}, {words}", markup=False)
    done = {row.method for row in bench.lines if row.error is None}
    if not (done & named if named and interrupted is None else done):
        if interrupted is not None:
            raise interrupted
        for path in (file, request.output / LINES):  # the methods that are named next may be others
            path.unlink(missing_ok=True)
        raise _none_measured(refused | bench.not_measured)
    measured = measured_results(
        bench,
        dataset_name=request.prompts.rpartition("/")[2],
        dataset_description=f"{len({name for row in bench.lines for name in row.prompts})} prompts, all turns, answers "
        f"of at most {request.new_tokens} tokens{', none ended earlier' * request.force_length}",
        command=shlex.join(["tokenahead", *map(shown_word, sys.argv[1:])]),
        extra={
            "Model": Path(request.model).name,
            "Chat template": bench.writer.template,
            "Largest error of logits, a block against single tokens": largest_error(bench.lines),
        },
        not_measured=bench.not_measured | refused,
    )
    show(console, measured)
    write(request.output, measured)
    console.print(f"Wrote {RESULTS}, {BENCH_FIGURE} and {FRONTIER_FIGURE} beside {LINES} in {request.output}.")
    if interrupted is not None:
        raise interrupted
    return 0 if all(row.is_lossless for row in measured.results) else 1


def _none_measured(reasons: Mapping[str, object]) -> ValueError:
    named = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return ValueError(f"--methods: none was measured: {named}")


def show(console: Console, measured: MeasuredResults) -> None:
    """Print the tables, three per way of decoding and batch size with a row per method, and their explanation.

    Columns without a value are left out; a table fits into 80 characters.
    """
    for (mode, batch), group in groupby(measured.results, key=_setting):
        rows, title = list(group), f"{mode}, batch {batch}"
        for columns in (_COLUMNS, _DETAILS, _QUALITY):
            if not (shown := {head: cell for head, cell in columns.items() if any(cell(row) for row in rows)}):
                continue
            table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
            table.add_column("method", overflow="fold")
            for head in shown:
                table.add_column(head.replace("UNIT", f"{measured.unit}s"), justify="right", no_wrap=True)
            for row in rows:
                table.add_row(Text(escaped(row.method or row.name)), *(cell(row) for cell in shown.values()))
            console.print(table)
            title = ""
    for words in explanation(measured):
        console.print(words, markup=False)


def write(directory: Path, measured: MeasuredResults) -> None:
    """Write results and figures into a directory."""
    measured.to_json(directory / RESULTS)
    replace_figure(directory / BENCH_FIGURE, bench_figure(measured))
    replace_figure(directory / FRONTIER_FIGURE, frontier_figure(measured))


def _setting(row: DecodingResult) -> tuple[str, int]:
    return row.decoding or row.name, row.batch_size


def _number(value: Number | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def _claimed(cell: _Cell) -> _Cell:
    """Return a cell of drafts or speed, which says why it claims nothing."""
    return lambda row: Text("loops", "bold yellow") if row.only_loops else cell(row)


def _expected(row: DecodingResult) -> str:
    expected = row.expected_tokens_per_call
    return "" if expected is None else f"{expected:.2f} ({len(row.expected_by_position)})"


def _speed(row: DecodingResult) -> str | Text:
    if row.is_unstable:
        return Text("unstable", "bold yellow")
    if not row.speed_ups:
        return f"{row.speed_up:.2f}x"
    low, middle, high = row.speed_ups
    return f"{middle:.2f}x ({low:.2f}-{high:.2f})"


def _macro(row: DecodingResult) -> str:
    return _number(fmean(row.category_speed_ups.values())) if row.claims_speed and row.category_speed_ups else ""


_COLUMNS: dict[str, _Cell] = {
    "UNIT\nper call": _claimed(lambda row: _number(_per_call(row))),
    "expected\n(draft)": _expected,
    "speed-up\n(quartiles)": _claimed(_speed),
    "ms per\ncall": lambda row: _number(row.call_ms, ".1f"),
    "left\nout": lambda row: _number(row.looping_share, ".0%"),
}
_QUALITY: dict[str, _Cell] = {
    "exact match, %": lambda row: _number(row.quality.get(EXACT), ".1f"),
    "BLEU": lambda row: _number(row.quality.get(BLEU), ".1f"),
}
_DETAILS: dict[str, _Cell] = {
    "whole\ncalls": lambda row: _number(row.whole_speed_ups[1]) if row.claims_speed and row.whole_speed_ups else "",
    "micro": lambda row: _number(row.micro_speed_up) if row.claims_speed else "",
    "macro": _macro,
    "ms of\ndrafts": lambda row: _number(row.draft_ms, ".1f"),
    "ms of\nprompt": lambda row: _number(row.prompt_ms, ".0f"),
    "re-\npeat": lambda row: _number(row.repeated_share, ".0%"),
    "cache\nMB": lambda row: "" if row.cache_bytes is None else f"{row.cache_bytes / 1e6:.1f}",
    "accepted by\nposition, %": lambda row: " ".join(f"{100 * share:.0f}" for share in row.reached_by_position[:6]),
}


def explanation(measured: MeasuredResults) -> Iterator[str]:
    """Yield what the columns mean, and what is left out."""
    yield (
        f"{measured.unit}s per call: of verifications, without the prompt's own call; expected: the same along the "
        "plain texts, for drafts of the length in brackets. Speed-ups: ratios to plain decoding by turns, without the "
        "prompts' own calls; whole calls: with them; micro: of the sums, macro: the mean over categories. Left out: "
        "texts of which more than half repeats itself, here or in plain decoding; they are in no figure."
    )
    unstable = {_setting(row): row.plain_ratios for row in measured.results if row.is_unstable}
    for (mode, batch), ratios in unstable.items():
        yield (
            f"{mode}, batch {batch}: plain decoding ran at {min(ratios):.2f} to {max(ratios):.2f} times its own speed "
            "by turns, so that no speed-up is reported: let the machine do nothing else, or measure for longer."
        )
    for name, reason in measured.not_measured.items():
        yield f"n/a: {name}: {reason}"
    for row in measured.results:
        if row.texts is not None and row.differing is not None and row.near_ties is not None:
            words = in_words(row.texts, row.differing, row.near_ties)
            yield f"Greedy texts, {row.name}: {words}{'' if row.is_lossless else ' NOT LOSSLESS'}"


def bench_figure(measured: MeasuredResults) -> Figure:
    """Draw speed-ups by category: a panel per way of decoding and batch size, a colour per method."""
    styles = _styles(measured)
    categories = list(dict.fromkeys(name for row in measured.results for name in row.category_speed_ups))
    figure, panels = _grid(measured, max(3.6, 0.7 * len(categories) + 1.2), 3.4)
    width = 0.8 / max(1, len(styles))
    turned: Kwargs = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if len(categories) > 4 else {}
    for rows, axes in panels:
        shown = [row for row in rows if row.method in styles and not row.is_unstable]
        for row in shown:
            left, heights = ([*styles].index(row.method) + 0.5) * width - 0.4, row.category_speed_ups
            places = [categories.index(name) + left for name in heights]
            axes.bar(places, [*heights.values()], width, color=styles[row.method]["color"])
        if not any(row.category_speed_ups for row in shown):
            words = "texts loop: no claim" if shown else "plain decoding is unstable: no claim"
            axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center")
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set(ylabel="speed-up over plain", xlim=(-0.6, len(categories) - 0.4), ylim=(0, None))
        axes.set_xticks(range(len(categories)), categories, **turned)
        axes.grid(axis="y", alpha=0.3)
    _label(figure, {name: {"color": style["color"], "linewidth": 6} for name, style in styles.items()})
    return figure


def frontier_figure(measured: MeasuredResults) -> Figure:
    """Draw tokens per call against milliseconds per call, with lines of equal speed."""
    styles: dict[str | None, Kwargs] = {name: _POINT | style for name, style in _styles(measured).items()}
    figure, panels = _grid(measured, 4.6, 4.2)
    for rows, axes in panels:
        points = {row.method: (row.call_ms, _per_call(row)) for row in rows if row.call_ms is not None}
        for row in rows:
            style = _PLAIN if row.method == PLAIN else styles.get(row.method)
            if style is not None and row.method in points:
                hollow = {} if row.claims_speed or row.method == PLAIN else _HOLLOW
                axes.plot(*points[row.method], **style | hollow)
        right = 1.25 * max((ms for ms, _ in points.values()), default=1.0)
        top = 1.15 * max(2.0, *(per_call for _, per_call in points.values()), 0.0)
        axes.set(xlim=(0, right), ylim=(0, top))
        if PLAIN in points and not any(row.is_unstable for row in rows):
            ms, per_call = points[PLAIN]
            for ratio in (0.5, 1, 1.5, 2, 3, 4):  # lines of equal speed, by their ratio to plain decoding's
                x = min(right, top * ms / (ratio * per_call))
                y = ratio * per_call * x / ms
                axes.plot([0, x], [0, y], color="grey", linewidth=0.7, linestyle=":")
                axes.annotate(f"{ratio:g}x", (x, y), color="grey", fontsize=8, ha="right", va="top")
        axes.set(xlabel="milliseconds per call", ylabel=f"{measured.unit}s per call")
    styles[f"one {measured.unit} at a time"] = _PLAIN
    if not all(row.claims_speed for row in measured.results):
        styles["hollow: loops or unstable, no claim"] = _POINT | {"marker": "o", "color": "grey"} | _HOLLOW
    _label(figure, styles)
    return figure


def _label(figure: Figure, styles: Mapping[str | None, Kwargs]) -> None:
    lines = [Line2D([], [], label=name, **style) for name, style in styles.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=3)


def _grid(
    measured: MeasuredResults, width: float, height: float
) -> tuple[Figure, list[tuple[list[DecodingResult], Axes]]]:
    """Return a figure with a row of panels per batch size and a column per way of decoding: rows of results, axes."""
    modes, sizes = (list(dict.fromkeys(each)) for each in zip(*map(_setting, measured.results)))
    figure = Figure(figsize=(max(7.2, width * len(modes)), height * len(sizes) + 0.8), layout="constrained")
    panels = []
    for (size, mode), axes in zip(product(sizes, modes), figure.subplots(len(sizes), len(modes), squeeze=False).flat):
        axes.set_title(f"{mode}, batch {size}")
        panels.append(([row for row in measured.results if _setting(row) == (mode, size)], axes))
    return figure, panels


def _styles(measured: MeasuredResults) -> dict[str | None, Kwargs]:
    """Return the colour and the marker of every method that drafts, in all panels of both figures."""
    names = dict.fromkeys(row.method for row in measured.results if row.draft_length or _per_call(row) > 1)
    return {name: {"color": f"C{i}", "marker": _MARKERS[i % len(_MARKERS)]} for i, name in enumerate(names)}


def _per_call(row: DecodingResult) -> float:
    return row.tokens_per_verification or row.tokens_per_call
