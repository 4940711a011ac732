"""README's first screen: the figures of the box, filled in from its file of figures and held to it by a test."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..evaluation import HeadReport, read_reports
from ..files import replace_text
from ..results import DecodingResult
from .folder import FIGURES

_BEGIN = "<!-- figures of the box: python examples/measure_box.py writes them -->"
_END = "<!-- end of the figures -->"
_BLOCK = re.compile(re.escape(_BEGIN) + r"\n(.*?)" + re.escape(_END), re.S)


def first_screen(reports: Sequence[HeadReport]) -> str:
    """Markdown: for every way of decoding the head with most bytes per second, and the command."""
    return "\n".join(_lines(reports)) + "\n"


def _lines(reports: Sequence[HeadReport]) -> Iterator[str]:
    first = reports[0].measured
    load = first.environment.get("load average, 1 min", "unknown")
    yield f"The model in the box writes Python source; held-out ones cost it {first.bits_per_byte:.2f} bits per byte."
    yield f"Measured on {first.hardware}, load {load} before, by"
    yield ""
    yield f"    {first.command}"
    yield ""
    columns = "decoding", "head", "bytes per call (range over prompts)", "expected on held-out text"
    yield "| " + " | ".join((*columns, "bytes/s", "plain", "speed-up")) + " |"
    yield "|---|---|---|---|---|---|---|"
    for name in [row.name for row in first.results]:
        rows = [(report, row) for report in reports for row in report.measured.results if row.name == name]
        yield "| " + " | ".join(_cells(*max(rows, key=lambda pair: pair[1].tokens_per_second))) + " |"


def _cells(report: HeadReport, row: DecodingResult) -> Iterator[str]:
    low, high = row.spread or (row.tokens_per_call,) * 2
    expected = row.expected_tokens_per_call
    yield row.name
    yield report.name
    yield f"{row.tokens_per_call:.2f} ({low:.1f} to {high:.1f})"
    yield "" if expected is None else f"{expected:.2f}"
    yield f"{row.tokens_per_second:.0f}"
    yield f"{row.plain_tokens_per_second:.0f}"
    yield "none claimed: the text repeats itself" if row.is_degenerate else f"{row.speed_up:.2f}"


def block_of(readme: str) -> str:
    """The figures that a README shows.

    Raises:
        ValueError: The two comments around them are missing.
    """
    found = _BLOCK.search(readme)
    if found is None:
        raise ValueError(f"the README lacks the comments {_BEGIN} and {_END}, between which the figures stand")
    return found[1]


def fill_readme(readme: Path, box: Path) -> None:
    """Writes the figures of a box into a README.

    Args:
        readme: The file.
        box: The box's directory.

    Raises:
        ValueError: See `block_of`.
    """
    text = readme.read_text(encoding="utf-8")
    block_of(text)
    figures = first_screen(read_reports(box / FIGURES))
    replace_text(readme, _BLOCK.sub(lambda _: f"{_BEGIN}\n{figures}{_END}", text))
