"""`tokenahead bench`: methods by prompts by settings in one process, as a table, figures and `results.json`."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.utils import logging

from ... import __version__
from ..evaluation.bench import LINES, Bench, Protocol
from ..evaluation.decoding import DecodingMode
from ..evaluation.methods import methods_of
from ..evaluation.prompts import Prompt, Writer, read_prompts
from ..evaluation.summary import largest_error, measured_results
from ..evaluation.table import explanation, recommendation, tables
from ..loading import load_model
from ..requests import BenchRequest
from ..results import MeasuredResults
from ..utils import check_same, replace_picture, replace_text, without_directories
from .figures import bench_figure, frontier_figure

RESULTS, SETTINGS = "results.json", "settings.json"
"""Names of the files of what came out, and of what was asked for."""
BENCH_FIGURE, FRONTIER_FIGURE = "bench.png", "frontier.png"


_SETTINGS = "model", "methods", "new_tokens", "dtype", "device", "threads", "seed", "raw", "force_length"
"""Options that must be the same where a run goes on."""


def protocol_of(request: BenchRequest) -> Protocol:
    """Return how much is measured, and how."""
    modes = [DecodingMode.named(words) for words in request.decoding]
    limits = request.new_tokens, request.force_length, request.per_category, request.seconds, request.seed
    return Protocol(modes, request.batch_size, *limits, expects=not request.no_expected)


def run_bench(request: BenchRequest, console: Console | None = None) -> MeasuredResults:
    """Measure, show the table, and write results and figures.

    Raises:
        FileNotFoundError: No such model or prompts.
        ValueError: Prompts, methods or settings that cannot be used, or a directory of other settings.
        OSError: What the Hub cannot give, or a directory that cannot be written to.
        KeyboardInterrupt: After what was measured until then is shown and written.
    """
    console = console or Console(highlight=False)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    protocol = protocol_of(request)
    prompts, broken = read_prompts(request.prompts, request.skip_broken)
    settings = _settings(request)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load_model(request.model, request.dtype, request.device)
    methods, refused = methods_of(request.methods, model)
    replace_text(request.output / SETTINGS, settings)
    bench = Bench(methods, Writer(tokenizer, not request.raw), protocol, request.output)
    interrupted = None
    try:
        _run(bench, prompts, console)
    except KeyboardInterrupt as error:  # what is measured stays
        interrupted = error
        console.print("Interrupted; the same command goes on where this one ended.", markup=False)
    for words in broken:
        console.print(f"left out: {request.prompts}, {words}", markup=False)
    measured = _measured(request, bench, refused) if any(line.run.error is None for line in bench.lines) else None
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
        reasons = [*(f"{name}: {reason}" for name, reason in refused.items()), *bench.refused.values()]
        raise ValueError(f"--methods: none was measured: {'; '.join(reasons)}")
    return measured


def _settings(request: BenchRequest) -> str:
    """Return what the directory's file of settings says; refuse a directory that other settings were measured into."""
    file = request.output / SETTINGS
    digest = hashlib.sha256(request.prompts.read_bytes()).hexdigest()[:16]
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
    many: dict[str, str | int | float] = {
        f"{method}, {mode}, batch {size}": reason for (method, mode, size), reason in bench.refused.items()
    }
    return measured_results(
        bench,
        dataset_name=request.prompts.name,
        dataset_description=f"{len(names)} prompts, all turns, answers of at most {request.new_tokens} tokens"
        f"{', none ended earlier' * request.force_length}",
        command=" ".join(["tokenahead", *map(_shown, sys.argv[1:])]),
        extra={
            "Model": Path(request.model).name,
            "Chat template": bench.writer.template,
            "Largest error of logits, a block against single tokens": largest_error(bench.lines),
        },
        not_measured=many | refused,
    )


def _shown(word: str) -> str:
    """Return an argument with names in place of paths of this machine, which no card may show."""
    return "".join(part and without_directories(part) for part in re.split("([=:?])", word))


def show(console: Console, measured: MeasuredResults) -> None:
    """Print the tables, and what they mean."""
    for table in tables(measured):
        console.print(table)
    for words in explanation(measured):
        console.print(words, markup=False)


def write(folder: Path, measured: MeasuredResults) -> None:
    """Write results and figures into a directory."""
    measured.to_json(folder / RESULTS)
    replace_picture(folder / BENCH_FIGURE, bench_figure(measured))
    replace_picture(folder / FRONTIER_FIGURE, frontier_figure(measured))
