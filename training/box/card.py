"""The card of a box: what it is, what it learned from, what its log says, and what every head of it does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...configuration import EvaByteConfig
from ...model_cards.card import render_card, write_card
from ..evaluation import HeadReport, read_reports
from ..results import DecodingResult
from .folder import EXCERPTS, FIGURES, LOG

SPEED_PICTURE, ACCEPTANCE_PICTURE = "speed.png", "acceptance.png"
"""Names of the figures."""
_ABOUT = f"""The small byte-level model that comes with tokenahead: it learned Python source, with heads that draft 16
bytes ahead. It shows what multi-token prediction does and is no assistant: it writes code that looks right and is not.
The directory itself holds the backbone with its FF heads; the circuits lie beside it, one file each:
`tokenahead.training.box.load_box("btree")` loads the model with another head, `tokenahead demo` measures all of them on
the held-out text in `{EXCERPTS}`. All figures are in `{FIGURES}`, the log of the training in `{LOG}`."""


def write_box_card(folder: Path) -> Path:
    """Writes README.md into a box that has its weights, figures, sources, figures and log.

    Args:
        folder: The box.

    Returns:
        The card's path.
    """
    reports = read_reports(folder / FIGURES)
    manifest = json.loads((folder / "manifest.json").read_text())
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    card = render_card(
        EvaByteConfig.from_pretrained(folder),
        next(report for report in reports if report.head_type == "ff").measured,
        license="apache-2.0",
        model_name="The model in the box",
        picture=ACCEPTANCE_PICTURE,
        remote_code=None,
        language="code",
        training_data="\n".join(_text(manifest)),
        training_description="\n".join((_ABOUT, *_log(lines))),
        training_results="\n".join(_comparison(reports)),
        out_of_scope="Writing code that anyone runs: it has seen a few dozen megabytes and understands nothing.",
        metadata={"tags": ["byte-level", "python"]},
    )
    return write_card(folder, card, overwrite=True)


def _text(manifest: dict[str, Any]) -> Iterator[str]:
    yield "Permissively licensed source that was installed on the machine that trained; tests, tables, generated files"
    yield "and files that resemble another were left out. No package is both learned from and held out."
    yield from ("", "| part | package | version | licence | files | bytes |", "|---|---|---|---|---:|---:|")
    for part, title in (("train", "train"), ("held_out", "held out")):
        for source in manifest[part]:
            cells = (source[key] for key in ("package", "version", "licence"))
            yield f"| {title} | " + " | ".join(map(_cell, cells)) + f" | {source['files']:,} | {source['size']:,} |"


def _comparison(reports: Sequence[HeadReport]) -> Iterator[str]:
    yield "One backbone, the same processor time for every head. `expected` is teacher-forced on held-out text, for"
    yield "drafts of 15 bytes: for T = 1 along the text itself, else along what the backbone writes behind it. The rest"
    yield "was generated, by turns with plain decoding; the range is that over prompts. `by processor` is the speed-up"
    yield "in processor time, which other programs disturb less."
    yield ""
    yield from heads_table(reports)
    yield from ("", f"![Bytes per call against latency]({SPEED_PICTURE})")


_SCALE = """- For scale: an earlier run of this recipe that saw 3.5 MB, with 10 s for each head, reached 1.66 bits per
  byte, and FF 2.41, CP 2.49, HMM 2.56, BTree 2.47 expected bytes per call at T = 1."""


def _log(lines: list[dict[str, Any]]) -> Iterator[str]:
    runs = list(_runs(lines))
    totals = _totals(runs)
    backbone = totals.pop("backbone")
    yield ""
    yield f"- Backbone, with FF heads: {backbone['bytes']:,} bytes in {backbone['seconds']:,} s on the clock of one"
    yield f"  core beside other work, {backbone['step']:,} steps; Muon for the matrices, AdamW for the rest."
    for stage, total in totals.items():
        yield f"- {stage.removeprefix('head-')} head alone, on the frozen backbone's states: {total['step']:,} steps in"
        yield f"  {total['seconds']:,} s of processor time."
    held_out = [(line["seconds"], line["held_out"]["bits_per_byte"]) for line in runs[0] if "held_out" in line]
    if held_out:
        yield (
            "- Bits per byte on held-out text on the way: " + ", ".join(f"{b:.3f} at {s} s" for s, b in held_out) + "."
        )
    yield _SCALE
    for line in lines:
        if "plan" in line:
            yield f"- Plan: `{json.dumps(line['plan'])}`."


def _runs(lines: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The lines of one run after the other: a training that began with an earlier box has that box's lines first."""
    starts = [index for index, line in enumerate(lines) if "plan" in line and index] + [len(lines)]
    for start, end in pairwise([0, *starts]):
        yield lines[start:end]


def _totals(runs: list[list[dict[str, Any]]]) -> dict[str, dict[str, int]]:
    """Bytes (or states), seconds and steps of every stage, over all runs."""
    totals: dict[str, dict[str, int]] = {}
    for run in runs:
        for stage, line in {line["stage"]: line for line in run}.items():
            total = totals.setdefault(stage, {"bytes": 0, "seconds": 0, "step": 0})
            totals[stage] = {name: before + line[name] for name, before in total.items()}
    return totals


def heads_table(reports: Sequence[HeadReport]) -> Iterator[str]:
    """A table in Markdown, a row for every head and way of decoding."""
    columns = "head", "parameters", "decoding", "expected", "bytes per call", "bytes/s", "plain", "speed-up"
    yield "| " + " | ".join((*columns, "by processor", "repeated")) + " |"
    yield "|---|---:|---|---:|---|---:|---:|---:|---:|---:|"
    for report in reports:
        for row in report.measured.results:
            yield "| " + " | ".join((report.name, f"{report.parameters:,}", *_cells(row))) + " |"


def _cells(row: DecodingResult) -> Iterator[str]:
    low, high = row.spread or (row.tokens_per_call,) * 2
    yield row.name
    yield "" if row.expected_tokens_per_call is None else f"{row.expected_tokens_per_call:.2f}"
    yield f"{row.tokens_per_call:.2f} ({low:.1f} to {high:.1f})"
    yield f"{row.tokens_per_second:.0f}"
    yield f"{row.plain_tokens_per_second:.0f}"
    yield "(repeats itself)" if row.is_degenerate else f"{row.speed_up:.2f}"
    yield "" if row.is_degenerate or row.processor_speed_up is None else f"{row.processor_speed_up:.2f}"
    yield "" if row.repeated_share is None else f"{row.repeated_share:.0%}"


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())
