"""`tokenahead demo`: a model writes with and without drafts: the text in colours, the table, the figures.

What is shown, the model in the box or one's own, stands in demo_subjects.py.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers.utils import logging

from .. import __version__
from .commands.bench import BENCH_FIGURE, FRONTIER_FIGURE, RESULTS, show, write
from .demo_subjects import DemoModel, spans
from .evaluation.bench import Bench, Protocol
from .evaluation.decoding import Method
from .evaluation.prompts import PromptEncoder
from .evaluation.summary import Completion, completions_of, measured_results, results_of
from .loading import unit_of
from .results import MeasuredResults, environment, hardware
from .utils import check_directory, replace_file, shown_word, visible

MARK = "demo.json"  # marks the demo's own directories, and holds the command
_FEW = 4  # prompts below which results need a warning
_UNSHOWN = "sampled, T=0.7"  # a way of decoding of which no output is shown
_BATCH_SHARE = 0.35  # of the time, where batches are measured, too
_BATCH_TOKENS = 64  # per completion in batches, at most
_ADAPTIVE = {"num_assistant_tokens_schedule": "adaptive"}
PROMPT, DRAFTED, VERIFIED = "dim", "black on green", "black on yellow"
"""Styles of the prompt, of accepted drafts and of tokens that the verifier added; a background shows blanks, too."""


@dataclass(frozen=True)
class Measurement:
    """How much is measured: `seconds` for all of it, but at least one round.

    `batch_size` above 1 also measures batches of so many prompts; `on_step` is called with words on the progress.
    """

    seconds: float = 40.0
    new_tokens: int = 128
    batch_size: int = 1
    seed: int = 0
    on_step: Callable[[str], None] = field(default=lambda words: None, compare=False)

    def command(self, subject: DemoModel, shows_directories: bool = True) -> str:
        """Return the command that repeats this."""
        words = ["tokenahead", "demo", *subject.arguments, "--seconds", f"{self.seconds:g}"]
        words += ["--new-tokens", str(self.new_tokens), "--seed", str(self.seed)]
        words += ["--batch-size", str(self.batch_size)] if self.batch_size > 1 else []
        return shlex.join(words) if shows_directories else " ".join(map(shown_word, words))

    def measure(self, subject: DemoModel) -> tuple[MeasuredResults, Bench]:
        """Measure the methods; return the results, and the bench of single prompts, which holds the outputs."""
        before, share = environment(), _BATCH_SHARE if self.batch_size > 1 else 0.0

        def decoded(methods: Sequence[Method], size: int, new_tokens: int, share: float) -> Bench:
            protocol = Protocol(subject.modes, (size,), new_tokens, seconds=share * self.seconds, seed=self.seed)
            bench, words = Bench(methods, subject.writer, protocol), f"calls, {size} prompts at once"
            bench.run(subject.prompts(self.seed), lambda done, most: self.on_step(f"{done} of at most {most} {words}"))
            return bench

        benches = [single := decoded(subject.methods, 1, self.new_tokens, 1 - share)]
        limits = f"at most {self.new_tokens} {unit_of(subject.writer.tokenizer)}s"
        if share:  # a drafted token costs more than alone: drafts as long as pays, and trees keep their form
            limits += f", in batches with at most {_BATCH_TOKENS}, and drafts as long as pays (the schedule `adaptive`)"
            methods = [*subject.methods]
            for index, each in enumerate(methods):
                if each.drafter is not None and "draft_tree" not in each.options:
                    methods[index] = replace(each, options=_ADAPTIVE | each.options)
            benches.append(decoded(methods, self.batch_size, min(self.new_tokens, _BATCH_TOKENS), share))
        refused = {name: reason for bench in benches for name, reason in bench.not_measured.items()}
        if not (rows := [row for bench in benches for row in results_of(bench)]):
            raise ValueError(f"nothing was measured: {'; '.join(map(str, refused.values()))}")
        count = len({name for bench in benches for line in bench.lines for name in line.prompts})
        prompts = f"{count} prompt{'s' * (count > 1)}"
        measured = measured_results(
            single,
            results=rows,
            environment=before,
            dataset_name=subject.dataset,
            dataset_description=f"{subject.description}: {prompts}, each completed with {limits}.",
            command=self.command(subject, shows_directories=False),
            extra=subject.facts,
            not_measured=refused,
        )
        return measured, single


def run_demo(
    measurement: Measurement,
    subject: DemoModel,
    output: str | Path = "tokenahead-demo",
    overwrite: bool = False,
    console: Console | None = None,
) -> MeasuredResults:
    """Measure a model, show its outputs, and write results and figures; return what is saved in `results.json`.

    Args:
        measurement: How much is measured.
        subject: The model, its methods and prompts.
        output: The directory of results and figures. One that a demo made is written over.
        overwrite: Write into a directory that no demo made; files of other names stay.
        console: None: the standard output.

    Raises:
        OSError: An output directory that cannot be used; it is checked before anything is measured.
        ValueError: Nothing could be measured; the message says why.
    """
    console, output = console or Console(highlight=False, emoji=False), Path(output)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    check_output(output, overwrite)
    console.print(f"{subject.words}. {hardware()}; about {measurement.seconds:g} seconds.", markup=False)
    with console.status("Measuring ...") as status:
        shown = replace(measurement, on_step=lambda words: status.update(f"Measuring: {words} ..."))
        measured, bench = shown.measure(subject)
    _print(console, measured, bench)
    notes = {"made_by": f"tokenahead {__version__} demo", "command": measured.command}
    replace_file(output / MARK, json.dumps(notes, indent=2) + "\n")
    write(output, measured)
    words = f"Wrote {RESULTS}, {BENCH_FIGURE} and {FRONTIER_FIGURE} into {output}. The same: "
    console.print(words + measurement.command(subject), markup=False)
    return measured


def check_output(output: Path, overwrite: bool) -> None:
    """Make the directory; refuse one that holds files of others, unless they may be overwritten."""
    check_directory("--output", output)
    output.mkdir(parents=True, exist_ok=True)
    if not overwrite and any(output.iterdir()) and not (output / MARK).is_file():
        raise FileExistsError(
            f"--output {output} holds files that the demo did not make; name another directory, or add --overwrite to "
            "replace files of the same names"
        )


def _print(console: Console, measured: MeasuredResults, bench: Bench) -> None:
    words = ("prompt", PROMPT), "  ", ("drafted and accepted", DRAFTED), "  ", ("verifier's own", VERIFIED)
    console.print(Text.assemble(*words))
    alone = [row for row in measured.results if row.batch_size == 1]
    for mode in bench.protocol.modes:
        drafting = [row for row in alone if row.decoding == mode.name and row.draft_length]
        if drafting and mode.name != _UNSHOWN:
            fastest = max(drafting, key=lambda row: row.tokens_per_second).method or ""
            console.rule(f"{mode.name}, {fastest}", align="left")
            written = completions_of(bench, fastest, mode)
            console.print(coloured(min(written, key=lambda each: each.loops), bench.writer))  # the first that does not
    show(console, measured)
    load = measured.environment.get("load average, 1 min", "unknown")
    console.print(f"{measured.dataset_description} {measured.hardware}; load {load} before.", markup=False)
    if min(len(row.per_prompt) for row in alone) < _FEW:
        console.print("So few prompts say little; a busy machine needs more --seconds.", style="bold yellow")


def coloured(completion: Completion, writer: PromptEncoder, prompt_lines: int = 4) -> Text:
    """Return the last lines of the prompt and its completion, every token in the colour of its origin."""
    prompt = "".join(completion.prompt.splitlines(keepends=True)[-prompt_lines:])
    text = Text().append(f"{prompt}{writer.gap}", style=PROMPT)
    for piece, is_drafted in spans(writer.tokenizer, completion.ids, completion.drafted):
        text.append(visible(piece), style=DRAFTED if is_drafted else VERIFIED)
    return text
