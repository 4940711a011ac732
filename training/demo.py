"""`tokenahead demo`: the model in the box writes held-out code, plainly and with each of its heads."""

from __future__ import annotations

import codecs
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

from .. import __version__
from ..modeling.evabyte.tokenizer import BYTE_OFFSET, SPECIAL_TOKENS
from .box import Box, BoxMeasurement, box_folder
from .byte_text import visible
from .commands.figures import ACCEPTANCE_FIGURE, SPEED_FIGURE, cycle_ms, save_figures
from .evaluation import Comparison, Completion, HeadReport, write_reports
from .evaluation.reports import describe_threads
from .results import DecodingResult
from .utils import replace_text

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
    model = next(iter(box.models.values()))
    console.print(
        f"The model in the box: EvaByte with {model.model.num_parameters():,} parameters, heads over {model.window} "
        f"bytes: {', '.join(box.models)}. {describe_threads().capitalize()}; about {measurement.seconds:g} seconds.",
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


def _print(console: Console, reports: list[HeadReport], comparisons: dict[str, list[Comparison]]) -> None:
    console.print(legend())
    for way in _SHOWN:
        head = fastest(reports, way)
        comparison = next(c for c in comparisons[head.head_type] if c.mode.name == way)
        console.rule(f"{way}, head {head.name}", align="left")
        console.print(coloured(comparison.completions[0]))
    console.print(reports_table(reports, "With drafts, beside one byte per call"))
    for words in explanation(reports):
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
        for note in differences(rows):
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


DRAFTED = "black on green"
"""Style of bytes that were drafted and accepted; a background shows blanks too."""
VERIFIED = "black on yellow"
"""Style of bytes that the verifier added."""
PROMPT = "dim"
"""Style of the prompt."""


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
        yield "expect: bytes per verification, computed along the plain texts for drafts of the same length;"
        yield "unlike per call, it leaves out the prompt's own call."
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
