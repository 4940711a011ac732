"""`tokenahead demo`: the model in the box writes held-out code, plainly and with each of its heads. Trains nothing.

Only the order of things is written here; measuring and showing are done by the modules imported.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from transformers import GenerationConfig
from transformers.utils import logging

from ... import __version__
from ..box.folder import box_folder
from ..box.measure import Box, BoxMeasurement
from ..evaluation import Comparison, HeadReport, write_reports
from ..files import replace_text
from ..threads import describe_threads, threads_as_before, use_fastest_threads
from . import pictures, report
from .folder import MARK, check_output

RESULTS = "figures.json"
"""Name of the file of measured figures."""
SPEED_PICTURE, ACCEPTANCE_PICTURE = "speed.png", "acceptance.png"
"""Names of the figures."""
_FEW = 4  # prompts below which figures are too uncertain to be shown without a warning
_SHOWN = ("greedy", "sampled, T=1")  # ways of decoding of which a text is shown


def show_box(
    measurement: BoxMeasurement,
    output: str | Path = "tokenahead-demo",
    folder: str | Path | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> list[HeadReport]:
    """Measures the model in the box, shows what it wrote and how, and leaves figures and figures in a directory.

    Args:
        measurement: How much is measured.
        output: The directory of figures and figures. One that a demo made is written over.
        folder: Another box than the installed one.
        overwrite: Write into a directory that no demo made; files of other names stay.
        console: Where everything is shown; None is the standard output.

    Returns:
        The figures of every head, as saved in `figures.json`.

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
        f"Wrote {RESULTS}, {SPEED_PICTURE} and {ACCEPTANCE_PICTURE} into {output} after "
        f"{time.monotonic() - started:.0f} seconds. The same again: {measurement.command}. To train a toy: "
        "tokenahead demo --train",
        markup=False,
    )
    return reports


def _typical(box: Box) -> object:
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
    """The head with most bytes per second in a way of decoding, by its name."""
    return max(reports, key=lambda one: next(row for row in one.measured.results if row.name == way).tokens_per_second)


def _write(output: Path, reports: list[HeadReport], command: str) -> None:
    output.mkdir(parents=True, exist_ok=True)
    notes = {"made_by": f"tokenahead {__version__} demo", "command": command}
    replace_text(output / MARK, json.dumps(notes, indent=2) + "\n")
    write_reports(output / RESULTS, reports)
    pictures.save_picture(pictures.speed_figure(reports), output / SPEED_PICTURE)
    pictures.save_picture(pictures.acceptance_figure(reports), output / ACCEPTANCE_PICTURE)
