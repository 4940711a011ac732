"""`tokenahead bench`: methods by prompts by settings in one process, as a table, figures and `results.json`."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging

from ... import __version__
from ...generation.backbone.wrapped_models import Kwargs
from ..evaluation.bench import LINES, PLAIN, Bench, Protocol
from ..evaluation.decoding import DecodingMode
from ..evaluation.methods import methods_of
from ..evaluation.prompts import PromptEncoder, read_prompts
from ..evaluation.summary import largest_error, measured_results
from ..evaluation.table import explanation, recommendation, tables
from ..loading import load_model
from ..requests import BenchRequest
from ..results import DecodingResult, MeasuredResults
from ..utils import check_same, needs_extra, replace_figure, replace_file, shown_word

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


def run_bench(request: BenchRequest, console: Console | None = None) -> MeasuredResults:
    """Measure, show the table, and write results and figures.

    Raises:
        FileNotFoundError: No such model or prompts.
        ValueError: Prompts, methods or settings that cannot be used, or a directory of other settings.
        OSError: What the Hub cannot give, or a directory that cannot be written to.
        KeyboardInterrupt: After what was measured until then is shown and written.
    """
    console = console or Console(highlight=False, emoji=False)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    modes = [DecodingMode.named(words) for words in request.decoding]
    limits = request.new_tokens, request.force_length, request.per_category, request.seconds, request.seed
    protocol = Protocol(modes, request.batch_size, *limits, not request.no_expected, request.quality)
    prompts, broken = read_prompts(request.prompts, request.skip_broken, request.ignore_columns)
    if request.quality and not any(map(any, (prompt.references for prompt in prompts))):
        raise ValueError(f"--quality: no prompt of {request.prompts} has a `reference` or an `answer`; leave it out")
    file, digest = request.output / SETTINGS, hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
    settings = {name: vars(request)[name] for name in _SETTINGS} | {"prompts": digest, "version": __version__}
    if file.is_file():
        check_same(f"--output {request.output}", json.loads(file.read_text(encoding="utf-8")), settings)
    logging.set_verbosity_error()
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
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
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
    for words in recommendation(model, measured.results) if request.recommend else ():
        console.print(words, markup=False)
    return measured


def _none_measured(reasons: dict[str, str] | dict[str, str | int | float]) -> ValueError:
    named = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return ValueError(f"--methods: none was measured: {named}")


def show(console: Console, measured: MeasuredResults) -> None:
    """Print the tables, and their explanation."""
    for table in tables(measured):
        console.print(table)
    for words in explanation(measured):
        console.print(words, markup=False)


def write(directory: Path, measured: MeasuredResults) -> None:
    """Write results and figures into a directory."""
    measured.to_json(directory / RESULTS)
    replace_figure(directory / BENCH_FIGURE, bench_figure(measured))
    replace_figure(directory / FRONTIER_FIGURE, frontier_figure(measured))


def bench_figure(measured: MeasuredResults) -> Figure:
    """Draw speed-ups by category: a panel per way of decoding and batch size, a colour per method."""
    styles = _styles(measured)
    categories = list(dict.fromkeys(name for row in measured.results for name in row.category_speed_ups))
    figure, panels = _grid(measured, max(3.6, 0.7 * len(categories) + 1.2), 3.4)
    width = 0.8 / max(1, len(styles))
    turned: Kwargs = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if len(categories) > 4 else {}
    for title, rows, axes in panels:
        shown = [row for row in rows if row.method in styles and not row.is_unstable]
        for row in shown:
            left, style = ([*styles].index(row.method) + 0.5) * width - 0.4, styles[row.method]
            for name, speed_up in row.category_speed_ups.items():
                axes.bar(categories.index(name) + left, speed_up, width, color=style["color"])
        if not any(row.category_speed_ups for row in shown):
            words = "texts loop: no claim" if shown else "plain decoding is unstable: no claim"
            axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center")
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.set(title=title, ylabel="speed-up over plain", xlim=(-0.6, len(categories) - 0.4))
        axes.set_xticks(range(len(categories)), categories, **turned)
        axes.grid(axis="y", alpha=0.3)
    named = [Line2D([], [], label=name, color=style["color"], linewidth=6) for name, style in styles.items()]
    figure.legend(handles=named, loc="outside lower center", ncols=3)
    return figure


def frontier_figure(measured: MeasuredResults) -> Figure:
    """Draw tokens per call against milliseconds per call, with lines of equal speed."""
    styles = _styles(measured)
    figure, panels = _grid(measured, 4.6, 4.2)
    for title, rows, axes in panels:
        points = {row.method: (row.call_ms, _per_call(row)) for row in rows if row.call_ms is not None}
        for row in (row for row in rows if row.method in points and row.method in styles):
            style = _POINT | styles[row.method] | ({} if row.claims_speed else _HOLLOW)
            axes.plot(*([value] for value in points[row.method]), **style)
        if PLAIN in points:
            axes.plot(*([value] for value in points[PLAIN]), **_PLAIN)
        if points:
            _draw_equal_speeds(axes, points, not any(row.is_unstable for row in rows))
        axes.set(title=title, xlabel="milliseconds per call", ylabel=f"{measured.unit}s per call")
    named = [Line2D([], [], label=name, **_POINT | style) for name, style in styles.items()]
    named.append(Line2D([], [], label=f"one {measured.unit} at a time", **_PLAIN))
    if not all(row.claims_speed for row in measured.results):
        point: Kwargs = _POINT | {"marker": "o", "color": "grey"} | _HOLLOW
        named.append(Line2D([], [], label="hollow: loops or unstable, no claim", **point))
    figure.legend(handles=named, loc="outside lower center", ncols=3)
    return figure


def _grid(
    measured: MeasuredResults, width: float, height: float
) -> tuple[Figure, list[tuple[str, list[DecodingResult], Axes]]]:
    """Return a figure with a row of panels per batch size and a column per way of decoding: titles, rows, axes."""
    settings = [(row.batch_size, row.decoding or row.name) for row in measured.results]
    sizes, modes = (list(dict.fromkeys(each)) for each in zip(*settings))
    figure = Figure(figsize=(max(7.2, width * len(modes)), height * len(sizes) + 0.8), layout="constrained")
    panels = []
    for setting, axes in zip(product(sizes, modes), figure.subplots(len(sizes), len(modes), squeeze=False).flat):
        rows = [row for row, each in zip(measured.results, settings) if each == setting]
        panels.append((f"{setting[1]}, batch {setting[0]}", rows, axes))
    return figure, panels


def _styles(measured: MeasuredResults) -> dict[str | None, Kwargs]:
    """Return the colour and the marker of every method that drafts, in all panels of both figures."""
    names = dict.fromkeys(row.method for row in measured.results if row.draft_length or _per_call(row) > 1)
    return {name: {"color": f"C{i}", "marker": _MARKERS[i % len(_MARKERS)]} for i, name in enumerate(names)}


def _draw_equal_speeds(axes: Axes, points: dict[str | None, tuple[float, float]], is_stable: bool) -> None:
    """Draw lines of equal speed through the origin, named by their ratio to plain decoding's where that is stable."""
    right = 1.25 * max(ms for ms, _ in points.values())
    top = 1.15 * max(2.0, *(per_call for _, per_call in points.values()))
    axes.set(xlim=(0, right), ylim=(0, top))
    if PLAIN not in points or not is_stable:
        return
    ms, per_call = points[PLAIN]
    for ratio in (0.5, 1, 1.5, 2, 3, 4):
        x = min(right, top * ms / (ratio * per_call))
        axes.plot([0, x], [0, ratio * per_call * x / ms], color="grey", linewidth=0.7, linestyle=":")
        axes.annotate(f"{ratio:g}x", (x, ratio * per_call * x / ms), color="grey", fontsize=8, ha="right", va="top")


def _per_call(row: DecodingResult) -> float:
    return row.tokens_per_verification or row.tokens_per_call
