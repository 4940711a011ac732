"""`tokenahead demo`: the model in the box writes held-out code, plainly and with each of its heads."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import GenerationConfig
from transformers.utils import logging

from ... import __version__
from ..box import box_folder
from ..evaluation import Comparison, HeadReport, write_reports
from ..files import replace_text
from ..threads import describe_threads, threads_as_before, use_fastest_threads
from . import report
from .figures import ACCEPTANCE_FIGURE, SPEED_FIGURE, save_figures
from .measure import Box, BoxMeasurement

MARK = "demo.json"
"""The file by which the demo knows its own directories; it holds the command."""
RESULTS = "figures.json"
"""Name of the file of what was measured."""
_FEW = 4  # prompts below which results are too uncertain to be shown without a warning
_SHOWN = ("greedy", "sampled, T=1")  # ways of decoding of which an output is shown


def run_demo(
    measurement: BoxMeasurement,
    output: str | Path = "tokenahead-demo",
    folder: str | Path | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> list[HeadReport]:
    """Measure the model in the box, show what it wrote and how, and leave results and figures in a directory.

    Args:
        measurement: How much is measured.
        output: The directory of results and figures. One that a demo made is written over.
        folder: Another box than the installed one.
        overwrite: Write into a directory that no demo made; files of other names stay.
        console: Where everything is shown; None is the standard output.

    Returns:
        The results of every head, as saved in `figures.json`.

    Raises:
        BoxDamagedError: There is no box, or a file of it is missing or has a wrong checksum; the message names it.
        OSError: An output directory that cannot be used; this is found before anything is measured.
    """
    console, output, started = console or Console(highlight=False), Path(output), time.monotonic()
    check_output(output, overwrite)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    box = Box.load(Path(folder or box_folder()))
    with threads_as_before():
        use_fastest_threads(_typical(box), torch.get_num_threads())
        model = next(iter(box.models.values()))
        console.print(
            f"The model in the box: EvaByte with {model.model.num_parameters():,} parameters, heads over "
            f"{model.window} bytes: {', '.join(box.models)}. {describe_threads().capitalize()}; about "
            f"{measurement.seconds:g} seconds.",
            markup=False,
        )
        with console.status("Measuring ...") as status:
            told = replace(measurement, on_step=lambda words: status.update(f"Measuring: {words} ..."))
            reports, comparisons = told.measure(box)
    _print(console, reports, comparisons)
    _write(output, reports, measurement.command)
    console.print(
        f"Wrote {RESULTS}, {SPEED_FIGURE} and {ACCEPTANCE_FIGURE} into {output} after "
        f"{time.monotonic() - started:.0f} seconds. The same again: {measurement.command}.",
        markup=False,
    )
    return reports


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse a directory that holds something else, or that cannot be written to, before any work is done.

    Args:
        output: The directory, which need not exist.
        overwrite: Allow a directory that the demo did not make. Files of the same names are then replaced.

    Raises:
        FileExistsError: The directory holds something that the demo did not make.
        NotADirectoryError: The path is a file.
        OSError: The directory cannot be made or written to.
    """
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"--output {output} is a file; name a directory")
    if not overwrite and output.is_dir() and any(output.iterdir()) and not (output / MARK).is_file():
        raise FileExistsError(
            f"--output {output} holds files that the demo did not make; name another directory, or add --overwrite to "
            "replace files of the same names"
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=output if output.is_dir() else output.parent):
        pass


def _typical(box: Box) -> Callable[[], object]:
    model = next(iter(box.models.values()))
    inputs = box.tokenizer("def main():", return_tensors="pt")
    short = GenerationConfig(**model.generation_config.to_diff_dict() | {"max_new_tokens": 24})
    return lambda: model.generate(**inputs, generation_config=short)


def _print(console: Console, reports: list[HeadReport], comparisons: dict[str, list[Comparison]]) -> None:
    console.print(report.legend())
    for way in _SHOWN:
        head = fastest(reports, way)
        comparison = next(c for c in comparisons[head.head_type] if c.mode.name == way)
        console.rule(f"{way}, head {head.name}", align="left")
        console.print(report.coloured(comparison.completions[0]))
    console.print(report.reports_table(reports, "With drafts, beside one byte per call"))
    for words in report.explanation(reports):
        console.print(words, markup=False)
    first = reports[0].measured
    console.print(
        f"Held-out text: {first.bits_per_byte:.3f} bits per byte. {first.dataset_description} {first.hardware}; load "
        f"{first.environment.get('load average, 1 min', 'unknown')} before.",
        markup=False,
    )
    if len(first.results[0].per_prompt) < _FEW:
        words = "So few prompts say little; a busy machine needs more --seconds."
        console.print(words, style="bold yellow", markup=False)
    for rows in comparisons.values():
        for note in report.differences(rows):
            console.print(note, style="bold red")


def fastest(reports: list[HeadReport], way: str) -> HeadReport:
    """Return the head with most bytes per second in a way of decoding, by its name."""
    return max(reports, key=lambda one: next(row for row in one.measured.results if row.name == way).tokens_per_second)


def _write(output: Path, reports: list[HeadReport], command: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    notes = {"made_by": f"tokenahead {__version__} demo", "command": command}
    replace_text(output / MARK, json.dumps(notes, indent=2) + "\n")
    write_reports(output / RESULTS, reports)
    save_figures(output, reports)
