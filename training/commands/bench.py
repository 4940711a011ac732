"""`tokenahead bench`: methods by prompts by settings in one process, as a table, figures and `results.json`.

In the figures a method has one colour and one marker, and what claims no speed-up is hollow.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging

from ... import __version__
from ...generation.tensors.wrapped_models import Kwargs
from ..evaluation.bench import LINES, PLAIN, Bench, Protocol
from ..evaluation.decoding import DecodingMode
from ..evaluation.methods import methods_of
from ..evaluation.prompts import Prompt, PromptEncoder, read_prompts
from ..evaluation.summary import largest_error, measured_results
from ..evaluation.table import explanation, recommendation, tables
from ..loading import load_model
from ..requests import BenchRequest
from ..results import DecodingResult, MeasuredResults
from ..utils import check_directory, check_same, needs_extra, replace_figure, replace_file, shown_word

with needs_extra("demo", "figures"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

RESULTS, SETTINGS = "results.json", "settings.json"
"""Names of the files of results and of settings."""
BENCH_FIGURE, FRONTIER_FIGURE = "bench.png", "frontier.png"
_SETTINGS = "model", "methods", "new_tokens", "dtype", "device", "threads", "seed", "raw", "no_thinking", "force_length"
"""Options that must be the same where a run continues."""
_MARKERS = "osD^vPX*"  # of the families, in turn; colour alone would not reach every eye
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
    check_directory("--output", request.output)
    settings = _settings(request, prompts)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load_model(request.model, request.dtype, request.device)
    methods, refused = methods_of(request.methods, model)
    named = {method.name for method in methods} - {PLAIN}
    if refused and not named:
        raise ValueError(_none_measured(refused))
    for name, reason in refused.items():
        console.print(f"left out: {name}: {reason}", markup=False)
    replace_file(request.output / SETTINGS, settings)
    encoder = PromptEncoder(tokenizer, not request.raw, not request.no_thinking)
    encoder.warn_of_thinking(method.drafter for method in methods)
    bench = Bench(methods, encoder, protocol, request.output)
    interrupted = None
    try:
        _run(bench, prompts, console)
    except KeyboardInterrupt as error:  # the measured lines are saved
        interrupted = error
        console.print("Interrupted; the same command continues where this one ended.", markup=False)
    for words in broken:
        console.print(f"left out: {request.prompts}, {words}", markup=False)
    done = {line.method for line in bench.lines if line.run.error is None}
    wanted = done & named if named and interrupted is None else done
    measured = _measured(request, bench, refused) if wanted else None
    if measured is not None:
        show(console, measured)
        write(request.output, measured)
        console.print(f"Wrote {RESULTS}, {BENCH_FIGURE} and {FRONTIER_FIGURE} beside {LINES} in {request.output}.")
    if interrupted is not None:
        raise interrupted
    if measured is not None and request.recommend:
        for words in recommendation(model, measured.results):
            console.print(words, markup=False)
    if measured is None:
        for name in (SETTINGS, LINES):  # the methods that are named next may be others
            (request.output / name).unlink(missing_ok=True)
        raise ValueError(_none_measured(refused | bench.not_measured))
    return measured


def _none_measured(reasons: Mapping[str, object]) -> str:
    return f"--methods: none was measured: {'; '.join(f'{name}: {reason}' for name, reason in reasons.items())}"


def _settings(request: BenchRequest, prompts: list[Prompt]) -> str:
    """Return the settings as JSON; refuse a directory with results of other settings."""
    file = request.output / SETTINGS
    digest = hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]
    now = {name: vars(request)[name] for name in _SETTINGS} | {"prompts": digest, "version": __version__}
    if file.is_file():
        check_same(f"--output {request.output}", json.loads(file.read_text(encoding="utf-8")), now)
    return json.dumps(now, indent=1) + "\n"


def _run(bench: Bench, prompts: list[Prompt], console: Console) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=None)
        bench.run(prompts, lambda done, count: progress.update(task, completed=done, total=count))


def _measured(request: BenchRequest, bench: Bench, refused: dict[str, str]) -> MeasuredResults:
    names = {name for line in bench.lines for name in line.prompts}
    return measured_results(
        bench,
        dataset_name=request.prompts.rpartition("/")[2],
        dataset_description=f"{len(names)} prompts, all turns, answers of at most {request.new_tokens} tokens"
        f"{', none ended earlier' * request.force_length}",
        command=shlex.join(["tokenahead", *map(shown_word, sys.argv[1:])]),
        extra={
            "Model": Path(request.model).name,
            "Chat template": bench.writer.template,
            "Largest error of logits, a block against single tokens": largest_error(bench.lines),
        },
        not_measured=bench.not_measured | refused,
    )


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
    methods = _styles(measured)
    categories = list(dict.fromkeys(name for row in measured.results for name in row.category_speed_ups))
    figure, panels = _grid(measured, max(3.6, 0.7 * len(categories) + 1.2), 3.4)
    width = 0.8 / max(1, len(methods))
    turned: Kwargs = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if len(categories) > 4 else {}
    for title, rows, axes in panels:
        shown = [row for row in rows if row.method in methods and not row.is_unstable]
        for row in shown:
            position, style = methods[row.method]
            for index, name in enumerate(categories):
                if name in row.category_speed_ups:
                    left = index + (position + 0.5) * width - 0.4
                    axes.bar(left, row.category_speed_ups[name], width, color=style["color"])
        if not any(row.category_speed_ups for row in shown):
            words = "texts loop: no claim" if shown else "plain decoding is unstable: no claim"
            axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center")
        axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.set(title=title, ylabel="speed-up over plain", xlim=(-0.6, len(categories) - 0.4))
        axes.set_xticks(range(len(categories)), categories, **turned)
        axes.grid(axis="y", alpha=0.3)
    named = [Line2D([], [], label=name, color=style["color"], linewidth=6) for name, (_, style) in methods.items()]
    figure.legend(handles=named, loc="outside lower center", ncols=3)
    return figure


def frontier_figure(measured: MeasuredResults) -> Figure:
    """Draw tokens per call against milliseconds per call, with lines of equal speed."""
    methods = _styles(measured)
    figure, panels = _grid(measured, 4.6, 4.2)
    for title, rows, axes in panels:
        points = {row.method: (row.call_ms, _per_call(row)) for row in rows if row.call_ms is not None}
        for row in (row for row in rows if row.method in points and row.method in methods):
            style = _POINT | methods[row.method][1] | ({} if row.claims_speed else _HOLLOW)
            axes.plot(*([value] for value in points[row.method]), **style)
        if PLAIN in points:
            axes.plot(*([value] for value in points[PLAIN]), **_PLAIN)
        if points:
            _draw_equal_speeds(axes, points, not any(row.is_unstable for row in rows))
        axes.set(title=title, xlabel="milliseconds per call", ylabel=f"{measured.unit}s per call")
    named = [Line2D([], [], label=name, **_POINT | style) for name, (_, style) in methods.items()]
    named.append(Line2D([], [], label=f"one {measured.unit} at a time", **_PLAIN))
    if not all(row.claims_speed for row in measured.results):
        point: Kwargs = _POINT | {"marker": "o", "color": "grey"} | _HOLLOW
        named.append(Line2D([], [], label="hollow: loops or unstable, no claim", **point))
    figure.legend(handles=named, loc="outside lower center", ncols=3)
    return figure


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


def _grid(
    measured: MeasuredResults, width: float, height: float
) -> tuple[Figure, list[tuple[str, list[DecodingResult], Axes]]]:
    """Return a figure with a row of panels per batch size and a column per way of decoding: titles, rows, axes."""
    modes = list(dict.fromkeys(row.decoding or row.name for row in measured.results))
    sizes = list(dict.fromkeys(row.batch_size for row in measured.results))
    figure = Figure(figsize=(max(7.2, width * len(modes)), height * len(sizes) + 0.8), layout="constrained")
    panels = figure.subplots(len(sizes), len(modes), squeeze=False)
    grid = []
    for (i, size), (j, mode) in product(enumerate(sizes), enumerate(modes)):
        rows = [row for row in measured.results if (row.decoding or row.name, row.batch_size) == (mode, size)]
        grid.append((f"{mode}, batch {size}", rows, panels[i, j]))
    return figure, grid


def _styles(measured: MeasuredResults) -> dict[str | None, tuple[int, Kwargs]]:
    """Return the index, the colour and the marker of every method that drafts."""
    names = dict.fromkeys(row.method for row in measured.results if row.draft_length or _per_call(row) > 1)
    return {
        name: (index, {"color": f"C{index}", "marker": _MARKERS[index % len(_MARKERS)]})
        for index, name in enumerate(names)
    }


def _per_call(row: DecodingResult) -> float:
    return row.tokens_per_verification or row.tokens_per_call
