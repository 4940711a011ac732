"""The card of a box, and the table of its results in `docs/box.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenahead import EvaByteConfig
from tokenahead.model_cards import DecodingResult, MeasuredResults, render_card, write_card
from tokenahead.training.box import EXCERPTS
from tokenahead.training.commands.bench import FRONTIER_FIGURE, RESULTS

LOG = "training.jsonl"
"""Name of the log of the training."""
MANIFEST = "manifest.json"
"""Name of the list of packages that the text comes from."""
_ABOUT = f"""The small byte-level model that comes with tokenahead: it learned Python source, with heads that draft 16
bytes ahead. It shows what multi-token prediction does and is no assistant: it writes code that looks right and is not.
The folder itself holds the backbone with its FF heads; other heads lie beside it, one file each:
`tokenahead.training.box.load_box("hmm")` loads the model with another head, `tokenahead demo` measures all of them on
the held-out text in `{EXCERPTS}`. All figures are in `{RESULTS}`, the log of the training in `{LOG}`."""
_BEGIN, _END = "<!-- figures of the box: python examples/box/release.py writes them -->", "<!-- end of the figures -->"
_BLOCK = re.compile(r"<!-- figures of the box: .*? -->\n(.*?)" + re.escape(_END), re.S)


def write_box_card(folder: Path) -> None:
    """Write README.md into a box that has its weights, results, manifest, figures and log."""
    measured = MeasuredResults.from_json(folder / RESULTS)
    own = [replace(row, name=_setting(row), method=None) for row in measured.results if row.method == "ff"]
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    card = render_card(
        EvaByteConfig.from_pretrained(folder),
        replace(measured, results=own),
        license="apache-2.0",
        model_name="The model in the box",
        picture=FRONTIER_FIGURE,
        remote_code=None,
        language="code",
        training_data="\n".join(_text(json.loads((folder / MANIFEST).read_text()))),
        training_description="\n".join((_ABOUT, "", *_log(lines))),
        training_results="\n".join(_results(measured)),
        out_of_scope="Writing code that anyone runs: it has seen a few dozen megabytes and understands nothing.",
        tags=["byte-level", "python"],
    )
    write_card(folder, card, overwrite=True)


def _text(manifest: dict[str, Any]) -> Iterator[str]:
    yield "Permissively licensed source that was installed on the machine that trained; tests, tables, generated files"
    yield "and files that resemble another were left out. No package is both learned from and held out."
    yield from ("", "| part | package | version | licence | files | bytes |", "|---|---|---|---|---:|---:|")
    for part, title in (("train", "train"), ("held_out", "held out")):
        for source in manifest[part]:
            cells = (" ".join(source[key].replace("|", "\\|").split()) for key in ("package", "version", "licence"))
            yield f"| {title} | {' | '.join(cells)} | {source['files']:,} | {source['size']:,} |"


def _log(lines: list[dict[str, Any]]) -> Iterator[str]:
    last = {line["stage"]: line for line in lines}
    for stage, line in last.items():
        seconds = f", {line['seconds']:,} s" if "seconds" in line else ""
        size = f"{line['bytes']:,} bytes, " if stage == "backbone" else ""
        what = "Backbone, with FF heads" if stage == "backbone" else f"Head alone: {stage.removeprefix('head-')}"
        yield f"- {what}: {size}{line['step']:,} steps{seconds}."
    bits = [(line["step"], line["held_out"]["bits_per_byte"]) for line in lines if "held_out" in line]
    if bits:
        way = ", ".join(f"{value:.3f} at step {step:,}" for step, value in bits)
        yield f"- Bits per byte on held-out text on the way: {way}."
    for line in lines:
        if recipe := line.get("recipe", line.get("plan")):
            yield f"- Recipe: `{json.dumps(recipe)}`."


def _setting(row: DecodingResult) -> str:
    return f"{row.decoding}{f', batch {row.batch_size}' * (row.batch_size > 1)}"


def _results(measured: MeasuredResults) -> Iterator[str]:
    yield "One backbone, the same budget for every head. All was generated, by turns with plain decoding; the range is"
    yield "that over prompts. `per verification` leaves out the prompt's own call, and `expected` is the same, computed"
    yield "along the plain texts for drafts of the length beside it; both with the standard error over prompts. `by"
    yield "processor` is the speed-up in processor time, which other programs disturb less. `looping` is the share of"
    yield "calls of which more than half repeats itself: no speed-up counts them, but other figures of this run do."
    columns = "head", "parameters", "decoding", "bytes per call", "per verification", "expected", "bytes/s", "plain"
    yield from ("", f"| {' | '.join(columns)} | speed-up | by processor | repeated | looping |")
    yield "|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for row in _drafting(measured):
        by_processor = None
        if row.claims_speed and row.processor_seconds and row.plain_processor_seconds:
            plain_share = row.plain_processor_seconds / (row.plain_new_tokens or row.new_tokens)
            by_processor = plain_share * row.new_tokens / row.processor_seconds
        cells = (
            str(row.method), f"{measured.extra[f'Parameters of {row.method}']:,}", _setting(row), _per_call(row),
            *_per_verification(row), *_speeds(row, "(repeats itself)"), _number(by_processor),
            _number(row.repeated_share, ".0%"), _left_out(row),
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _drafting(measured: MeasuredResults) -> list[DecodingResult]:
    return [row for row in measured.results if f"Parameters of {row.method}" in measured.extra]


def _per_call(row: DecodingResult) -> str:
    if row.only_loops:
        return "loops"
    counts = row.per_prompt or [row.tokens_per_call]
    return f"{row.tokens_per_call:.2f} ({min(counts):.1f} to {max(counts):.1f})"


def _per_verification(row: DecodingResult) -> tuple[str, str]:
    """Return tokens per verification as decoded and as expected, with standard errors and the length of drafts."""
    if row.only_loops:
        return "loops", ""
    expected = _with_error(row.expected_tokens_per_call, row.expected_standard_error)
    drafts = f" (drafts of {row.draft_length})" if expected else ""
    return _with_error(row.tokens_per_verification, row.standard_error), expected + drafts


def _left_out(row: DecodingResult) -> str:
    """Return the share of calls whose text repeats itself; older files hold their number alone."""
    calls = len(row.per_prompt) / row.batch_size
    counted = row.looping / calls if row.looping is not None and calls else None
    return _number(counted if row.looping_share is None else row.looping_share, ".0%")


def _with_error(value: float | None, error: float | None) -> str:
    return _number(value) + ("" if error is None else f" ± {error:.2f}")


def _speeds(row: DecodingResult, none: str) -> tuple[str, str, str]:
    speed_up = "unstable" if row.is_unstable else none if row.only_loops else f"{row.speed_up:.2f}"
    return f"{row.tokens_per_second:.0f}", f"{row.plain_tokens_per_second:.0f}", speed_up


def _number(value: float | None, form: str = ".2f") -> str:
    return "" if value is None else format(value, form)


def first_screen(measured: MeasuredResults) -> str:
    """Return Markdown: for every way of decoding the head with most bytes per second, and the command."""
    load = measured.environment.get("load average, 1 min", "unknown")
    lines = [
        f"The model in the box writes Python source; held-out ones cost it {measured.bits_per_byte:.2f} bits per byte.",
        f"Measured on {measured.hardware}, load {load} before, by",
        "",
        f"    {measured.command}",
        "",
        "| decoding | head | bytes per call (range over prompts) | per verification | expected | bytes/s | plain | "
        "speed-up | calls that loop |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(_setting(row) for row in measured.results):
        row = max((row for row in _drafting(measured) if _setting(row) == name), key=lambda row: row.tokens_per_second)
        speeds = _speeds(row, "none claimed: the text repeats itself")
        cells = (name, str(row.method), _per_call(row), *_per_verification(row), *speeds, _left_out(row))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def block_of(readme: str) -> str:
    """Return the results that a README shows.

    Raises:
        ValueError: The two comments around them are missing.
    """
    found = _BLOCK.search(readme)
    if found is None:
        raise ValueError(f"the README lacks the comments {_BEGIN} and {_END}, between which the results stand")
    return found[1]


def fill_readme(readme: Path, box: Path) -> None:
    """Write the results of a box into a README.

    Raises:
        ValueError: See `block_of`.
    """
    text = readme.read_text(encoding="utf-8")
    block_of(text)
    results = first_screen(MeasuredResults.from_json(box / RESULTS))
    readme.write_text(_BLOCK.sub(lambda _: f"{_BEGIN}\n{results}{_END}", text), encoding="utf-8")
