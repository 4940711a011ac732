"""`tokenahead demo`: the model in the box writes held-out code, plainly and with each of its heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .. import __version__
from ..modeling import EvaByteForMTPC
from .box import Box, excerpt_prompts
from .commands.bench import BENCH_FIGURE, FRONTIER_FIGURE, RESULTS, show, write
from .evaluation.bench import Bench, Protocol
from .evaluation.decoding import MODES
from .evaluation.methods import drafting_method, plain_method
from .evaluation.prompts import Prompt, Writer
from .evaluation.summary import Completion, completions_of, measured_results, results_of
from .results import DecodingResult, MeasuredResults, environment, hardware
from .utils import replace_file

MARK = "demo.json"
"""The file that marks the demo's own directories; it holds the command."""
_FEW = 4  # prompts below which results are too uncertain to be shown without a warning
_SHOWN = ("greedy", "sampled, T=1")  # ways of decoding of which an output is shown
_BATCH_SHARE = 0.35  # of the time, where batches are measured, too
_BATCH_BYTES = 64  # per completion in batches, at most
_ADAPTIVE = {"num_assistant_tokens_schedule": "adaptive"}  # in batches, where a drafted byte costs more than alone
_PREFIX = 320  # bytes of the held-out prefixes that are completed


@dataclass(frozen=True)
class BoxMeasurement:
    """How much is measured: `seconds` for all of it, but at least one round.

    `batch_size` above 1 also measures batches of so many prompts; `on_step` is called with words on the progress.
    """

    seconds: float = 40.0
    new_bytes: int = 128
    most_prompts: int = 32
    batch_size: int = 1
    seed: int = 0
    on_step: Callable[[str], None] = field(default=lambda words: None, compare=False)

    @property
    def command(self) -> str:
        """Return the command that repeats this."""
        batches = f" --batch-size {self.batch_size}" if self.batch_size > 1 else ""
        return f"tokenahead demo --seconds {self.seconds:g} --new-bytes {self.new_bytes} --seed {self.seed}{batches}"

    def measure(self, box: Box) -> tuple[MeasuredResults, Bench]:
        """Measure every head of a box; return the results, and the bench of single prompts, which holds the outputs."""
        before, share = environment(), _BATCH_SHARE if self.batch_size > 1 else 0.0
        single = self._decode(box, 1, self.new_bytes, (1 - share) * self.seconds)
        benches = [single]
        if share:
            few = min(self.new_bytes, _BATCH_BYTES)
            benches.append(self._decode(box, self.batch_size, few, share * self.seconds, **_ADAPTIVE))
        rows = [row for bench in benches for row in results_of(bench)]
        return self._measured(box, single, results=rows, environment=before), single

    def _decode(self, box: Box, batch_size: int, new_bytes: int, seconds: float, **options: Any) -> Bench:
        first, *_ = box.models.values()
        drafting = [drafting_method(_name(head, model), model, **options) for head, model in box.models.items()]
        texts = excerpt_prompts(box.excerpts, self.most_prompts, self.seed, _PREFIX)
        protocol = Protocol(MODES, (batch_size,), new_bytes, seconds=seconds, seed=self.seed)
        bench = Bench([plain_method(first), *drafting], Writer(box.tokenizer, chats=False), protocol, control=False)
        bench.run(
            [Prompt(str(number), (text,)) for number, text in enumerate(texts)],
            lambda done, count: self.on_step(f"{done} of at most {count} calls, {batch_size} prompts at once"),
        )
        return bench

    def _measured(self, box: Box, bench: Bench, **facts: Any) -> MeasuredResults:
        packages = sorted({excerpt.package for excerpt in box.excerpts})
        count = max(len(row.per_prompt) for row in facts["results"])
        return measured_results(
            bench,
            dataset_name="held-out Python packages",
            dataset_description=f"Source of {', '.join(packages)}, of which nothing was trained on: {count} "
            f"prompt{'s' * (count > 1)} of up to {_PREFIX} bytes, each completed with {self.new_bytes} bytes (in "
            f"batches with at most {_BATCH_BYTES}, and drafts as long as pays: the schedule `adaptive`).",
            command=self.command,
            extra={
                f"Parameters of {_name(head, model)}": sum(each.numel() for each in model.head.parameters())
                for head, model in box.models.items()
            },
            **facts,
        )


def _name(head: str, model: EvaByteForMTPC) -> str:
    """Return the family of a head, and its rank if it has one."""
    rank = model.config.mtp_head.rank
    return head if rank in (None, 1) else f"{head} {rank}"


def run_demo(
    measurement: BoxMeasurement,
    output: str | Path = "tokenahead-demo",
    directory: str | Path | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> MeasuredResults:
    """Measure the model in the box, show its outputs, and write results and figures into a directory.

    Args:
        measurement: How much is measured.
        output: The directory of results and figures. One that a demo made is written over.
        directory: Another box than the installed one.
        overwrite: Write into a directory that no demo made; files of other names stay.
        console: None: the standard output.

    Returns:
        The results, as saved in `results.json`.

    Raises:
        BoxDamagedError: There is no box, or a file of it is missing or has a wrong checksum; the message names it.
        OSError: An output directory that cannot be used; it is checked before anything is measured.
    """
    console, output = console or Console(highlight=False), Path(output)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    box = Box.load(directory)
    check_output(output, overwrite)
    model = next(iter(box.models.values()))
    console.print(
        f"The model in the box: EvaByte with {model.model.num_parameters():,} parameters, heads over {model.window} "
        f"bytes: {', '.join(box.models)}. {hardware()}; about {measurement.seconds:g} seconds.",
        markup=False,
    )
    with console.status("Measuring ...") as status:
        shown = replace(measurement, on_step=lambda words: status.update(f"Measuring: {words} ..."))
        measured, bench = shown.measure(box)
    _print(console, measured, bench)
    notes = {"made_by": f"tokenahead {__version__} demo", "command": measurement.command}
    replace_file(output / MARK, json.dumps(notes, indent=2) + "\n")
    write(output, measured)
    words = f"Wrote {RESULTS}, {BENCH_FIGURE} and {FRONTIER_FIGURE} into {output}. The same: {measurement.command}."
    console.print(words, markup=False)
    return measured


def check_output(output: Path, overwrite: bool) -> None:
    """Make the directory; refuse one that holds files of others, unless they may be overwritten."""
    output.mkdir(parents=True, exist_ok=True)
    if not overwrite and any(output.iterdir()) and not (output / MARK).is_file():
        raise FileExistsError(
            f"--output {output} holds files that the demo did not make; name another directory, or add --overwrite to "
            "replace files of the same names"
        )


def _print(console: Console, measured: MeasuredResults, bench: Bench) -> None:
    console.print(legend())
    for mode in (mode for mode in MODES if mode.name in _SHOWN):
        fastest = fastest_of(measured.results, mode.name)
        console.rule(f"{mode.name}, head {fastest}", align="left")
        console.print(coloured(next(completions_of(bench, str(fastest), mode)), bench.writer.tokenizer))
    show(console, measured)
    load = measured.environment.get("load average, 1 min", "unknown")
    console.print(f"{measured.dataset_description} {measured.hardware}; load {load} before.", markup=False)
    if min(len(row.per_prompt) for row in measured.results if row.batch_size == 1) < _FEW:
        words = "So few prompts say little; a busy machine needs more --seconds."
        console.print(words, style="bold yellow", markup=False)


def fastest_of(results: Sequence[DecodingResult], mode: str) -> str | None:
    """Return the method with drafts of most bytes per second in a way of decoding, one prompt at a time."""
    rows = [row for row in results if row.decoding == mode and row.batch_size == 1 and row.draft_length]
    return max(rows, key=lambda row: row.tokens_per_second).method


PROMPT, DRAFTED, VERIFIED = "dim", "black on green", "black on yellow"
"""Styles of the prompt, of accepted drafts and of bytes that the verifier added; a background shows blanks, too."""


def legend() -> Text:
    """Return one line that explains the colours."""
    return Text.assemble(
        ("prompt", PROMPT), "  ", ("drafted and accepted", DRAFTED), "  ", ("verifier's own", VERIFIED)
    )


def coloured(completion: Completion, tokenizer: PreTrainedTokenizerBase, prompt_lines: int = 4) -> Text:
    """Return the last lines of the prompt and its completion, every token in the colour of its origin."""
    text = Text().append("".join(completion.prompt.splitlines(keepends=True)[-prompt_lines:]), style=PROMPT)
    for is_drafted, run in groupby(zip(completion.ids, completion.drafted), key=lambda pair: pair[1]):
        piece = str(tokenizer.decode([token for token, _ in run]))
        text.append(visible(piece), style=DRAFTED if is_drafted else VERIFIED)
    return text


def visible(text: str) -> str:
    """Return text in which characters that would move the cursor are U+FFFD; line ends and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)
