"""`tokenahead demo --train`: a tiny model is trained on this machine, saved, and decoded with and without drafts.

Only the order of things is written here; training, measuring and showing are done by the modules imported.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, TrainerCallback, set_seed
from transformers.utils import logging

from ... import __version__
from ...configuration import EvaByteConfig
from ...model_cards import MeasuredResults, render_card, write_card
from ...modeling import EvaByteForMTPC, EvaByteTokenizer
from ..callbacks import StepCounter
from ..data import ByteWindows, Corpus, code_prompts, load_corpus
from ..evaluation import (
    MODES,
    Comparison,
    HeadReport,
    Measurement,
    bits_per_byte,
    environment,
    hardware,
    write_reports,
)
from ..threads import threads_as_before, use_fastest_threads
from . import pictures, report
from .folder import check_output, forget_measurements, save_checkpoint
from .head_comparison import FAMILIES, HeadComparison
from .recipe import STAGES, Stage, tiny_config, train

DEFAULT_MINUTES = 2.0
"""Training time if none is given."""
PICTURE = "acceptance.png"
"""Name of the figure of acceptance by draft position."""
RESULTS = "results.json"
"""Name of the file of measured figures."""
HEADS_PICTURE = "heads.png"
"""Name of the figure of the head families: acceptance against latency."""
HEADS_RESULTS = "heads.json"
"""Name of the file of their figures."""
_MAIN_SHARE = 0.7  # of the training time; the rest is shared by the heads that are compared
_SHOWN = 2  # completions to print for each way of decoding


@dataclass(frozen=True)
class Measuring:
    """How much the demo measures.

    Attributes:
        prompts: Held-out prompts to complete.
        new_bytes: Bytes to write after each.
        windows: Held-out windows for the bits per byte.
        window_length: Ids per window.
        seconds: Time for decoding; one prompt is always completed, and further ones while there is time.
    """

    prompts: int = 8
    new_bytes: int = 128
    windows: int = 60
    window_length: int = 512
    seconds: float = 20.0


def run_demo(
    minutes: float = DEFAULT_MINUTES,
    output: str | Path = "tokenahead-demo",
    seed: int = 0,
    overwrite: bool = False,
    config: EvaByteConfig | None = None,
    stages: Sequence[Stage] = STAGES,
    measuring: Measuring | None = None,
    corpus: Corpus | None = None,
    console: Console | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> MeasuredResults:
    """Trains, saves, reloads, completes and shows; ends with a directory that holds the model, its card and the
    figures.

    Ctrl-C saves what has been trained so far and says where.

    Args:
        minutes: Time for the training.
        output: The directory. One that the demo made is written over.
        seed: Of the split, the weights, the order of the text and the samples.
        overwrite: Write into a directory that the demo did not make; files of other names stay.
        config: The model to train; None takes `tiny_config()`.
        stages: How it is trained.
        measuring: How much is measured.
        corpus: The text; None takes the standard library's source.
        console: Where everything is shown; None is the standard output.
        callbacks: Further callbacks of the trainers.

    Returns:
        What was measured, as saved in `results.json`.

    Raises:
        ValueError: Minutes that are not positive, or no source to learn from.
        OSError: An output directory that cannot be used; this is found before the training.
        KeyboardInterrupt: Again, after Ctrl-C was taken care of.
    """
    if not minutes > 0:
        raise ValueError(f"minutes={minutes} must be above 0")
    output, console = Path(output), console or Console(highlight=False)
    check_output(output, overwrite)
    logging.disable_progress_bar()
    demo = _Demo(minutes, output, seed, overwrite, console, measuring or Measuring())
    with threads_as_before():
        try:
            demo.load(corpus, config or tiny_config())
            demo.train(stages, callbacks)
            demo.save()
            results = demo.measure()
            demo.compare_heads(callbacks)
            return results
        except KeyboardInterrupt:
            demo.rescue()
            raise


class _Demo:
    """One run, and what it has made so far."""

    def __init__(
        self, minutes: float, output: Path, seed: int, overwrite: bool, console: Console, measuring: Measuring
    ) -> None:
        self.minutes, self.output, self.seed, self.overwrite = minutes, output, seed, overwrite
        self.console, self.measuring = console, measuring
        self.steps = StepCounter()
        self.model: EvaByteForMTPC | None = None
        self.tokenizer: PreTrainedTokenizerBase = EvaByteTokenizer()
        self.is_saved = self.is_measured = False
        self.threads = torch.get_num_threads()

    def load(self, corpus: Corpus | None, config: EvaByteConfig) -> None:
        """Reads the text and makes a new model."""
        self.corpus = corpus or load_corpus(seed=self.seed)
        train_text, held_out = self.corpus.train, self.corpus.held_out
        self._say(
            f"Text: {len(train_text.files) + len(held_out.files)} files of Python source, "
            f"{len(train_text) + len(held_out):,} bytes, from {self.corpus.root}; "
            f"{len(held_out.files)} files ({len(held_out):,} bytes) are held out."
        )
        set_seed(self.seed)
        self.model = EvaByteForMTPC(config)
        self._say(
            f"Model: EvaByte with {self.model.num_parameters():,} parameters and {self.model.window} heads. "
            f"Training: {self.minutes:g} min, {_MAIN_SHARE:.0%} for this model and the rest for heads to compare; "
            "Ctrl-C stops and saves."
        )
        self._say(
            "A toy: it shows that training works here. It stays far from what its size could learn, and its figures "
            "say little of other models; `tokenahead demo` without --train measures a model that was trained for hours."
        )

    def train(self, stages: Sequence[Stage], callbacks: Sequence[TrainerCallback]) -> None:
        """Trains it."""
        everything = [self.steps, *callbacks]
        minutes = _MAIN_SHARE * self.minutes
        train(self.model, self.corpus.train, minutes, self.console, self.seed, stages, everything)

    def save(self) -> None:
        """Writes model and tokenizer."""
        notes = {
            "made_by": f"tokenahead {__version__} demo",
            "command": self.command,
            "steps": self.steps.count,
            "text": f"{self.corpus.root}, {len(self.corpus.train.files)} files",
        }
        forget_measurements(self.output, PICTURE, RESULTS, HEADS_PICTURE, HEADS_RESULTS)
        save_checkpoint(self.output, self.model, self.tokenizer, notes)
        self.is_saved = True
        self._say(f"Saved the model and its tokenizer in {self.output}.")

    def rescue(self) -> None:
        """After Ctrl-C: saves what there is, and says what was saved and where."""
        if self.is_measured:
            self._say(f"\nStopped. {self.output} holds the model and its figures; the heads were not all compared.")
        elif self.is_saved:
            self._say(f"\nStopped. The trained model is in {self.output}; measuring it was not finished.")
        elif self.steps.count:
            self._say(f"\nStopped in the training, after step {self.steps.count}.")
            self.save()
        else:
            self._say("\nStopped. Nothing was trained, and nothing was saved.")

    def measure(self) -> MeasuredResults:
        """Reloads the model, measures it, and shows and writes the figures."""
        self.model = EvaByteForMTPC.from_pretrained(self.output).eval()
        self.tokenizer = EvaByteTokenizer.from_pretrained(self.output)
        inputs = self.tokenizer("def main():", return_tensors="pt")
        use_fastest_threads(lambda: self.model.generate(**inputs, max_new_tokens=32), self.threads)
        windows = ByteWindows(self.corpus.held_out, self.measuring.window_length)
        bits = bits_per_byte(self.model, windows, self.measuring.windows)
        prompts = code_prompts(self.corpus.held_out, self.measuring.prompts, self.seed)
        comparisons = self._compare(prompts)
        results = self._results(bits, comparisons)
        self._show(results, comparisons)
        self._write(results, comparisons)
        self.is_measured = True
        return results

    def compare_heads(self, callbacks: Sequence[TrainerCallback]) -> list[HeadReport]:
        """Trains every head family on this backbone for the same time, and draws acceptance against latency."""
        comparison = HeadComparison(
            train_text=self.corpus.train,
            held_out=ByteWindows(self.corpus.held_out, self.measuring.window_length),
            windows=max(1, self.measuring.windows // 4),
            decoding=Measurement(
                code_prompts(self.corpus.held_out, self.measuring.prompts, self.seed),
                max(1, self.measuring.new_bytes // 2),
                seconds=self.measuring.seconds / len(FAMILIES),
                seed=self.seed,
            ),
            command=self.command,
            minutes=(1 - _MAIN_SHARE) * self.minutes / len(FAMILIES),
            seed=self.seed,
        )
        self._say("\nHead families on the same backbone, trained alone for the same time:")
        reports = [comparison.measure(self.output, kind, self.console, callbacks) for kind in FAMILIES]
        title = f"Heads, window {reports[0].window}, equal training time"
        self.console.print(report.reports_table(reports, title))
        pictures.save_picture(pictures.speed_figure(reports), self.output / HEADS_PICTURE)
        write_reports(self.output / HEADS_RESULTS, reports)
        self._say(f"Wrote {HEADS_PICTURE} and {HEADS_RESULTS}; every head is in {self.output / 'heads'}. To go on:")
        self._say(f"  tokenahead generate --model {self.output} 'def main('")
        return reports

    def _say(self, text: str) -> None:
        """Prints words that may hold a path, which is no markup."""
        self.console.print(text, markup=False, highlight=False)

    def _compare(self, prompts: list[str]) -> list[Comparison]:
        measurement = Measurement(prompts, self.measuring.new_bytes, seconds=self.measuring.seconds, seed=self.seed)
        with self.console.status("Completing held-out prompts ..."):
            return measurement.compare({"it": self.model}, self.tokenizer, MODES)["it"]

    def _results(self, bits: list[float], comparisons: list[Comparison]) -> MeasuredResults:
        prompts = [completion.prompt for completion in comparisons[0].completions]
        count, most = len(prompts), max(map(len, prompts))
        return MeasuredResults(
            results=[comparison.result for comparison in comparisons],
            dataset_name="Python standard library source",
            dataset_description=f"{count} prompts of up to {most} bytes from files that were held out of the training, "
            f"each completed with {self.measuring.new_bytes} bytes.",
            hardware=hardware(),
            dtype=str(self.model.dtype).removeprefix("torch."),
            command=self.command,
            library_version=__version__,
            accepted_by_position=comparisons[0].accepted_by_position,
            bits_per_byte=bits[0],
            extra={
                "Training": f"{self.steps.count:,} steps in {_MAIN_SHARE * self.minutes:.2g} minutes",
                "Bits per byte, all heads": ", ".join(f"{value:.3f}" for value in bits),
            },
            environment=environment(),
        )

    def _show(self, results: MeasuredResults, comparisons: list[Comparison]) -> None:
        self.console.print(report.legend())
        for comparison in comparisons:
            for number, completion in enumerate(comparison.completions[:_SHOWN], 1):
                self.console.rule(f"{comparison.mode.name}, prompt {number}", align="left")
                self.console.print(report.coloured(completion))
        reports = [HeadReport.of(self.model, results)]
        self.console.print(report.reports_table(reports, "With drafts, beside one byte per call"))
        for words in report.explanation(reports):
            self._say(words)
        self._say(f"Held-out text: {results.bits_per_byte:.3f} bits per byte.")
        for note in report.differences(comparisons):
            self.console.print(note, style="bold red")

    def _write(self, results: MeasuredResults, comparisons: list[Comparison]) -> None:
        results.to_json(self.output / RESULTS)
        reports = [HeadReport.of(self.model, results)]
        pictures.save_picture(pictures.acceptance_figure(reports), self.output / PICTURE)
        card = render_card(
            self.model,
            results,
            model_name=self.output.resolve().name,
            picture=PICTURE,
            training_description=self._description(),
        )
        try:
            write_card(self.output, card, overwrite=self.overwrite)
        except FileExistsError as error:  # a README that a person wrote is not replaced
            self._say(f"No card was written: {error}")
        self._say(f"Wrote README.md, {RESULTS} and {PICTURE} beside the model.")

    def _description(self) -> str:
        text = self.corpus.train
        return (
            f"Trained by `{self.command}` on {len(text.files):,} files ({len(text):,} bytes) of the source of the "
            f"Python {platform.python_version()} standard library: {self.steps.count:,} steps, first the backbone "
            "with its heads, then the heads alone. A toy: it shows decoding, and knows little Python."
        )

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        return f"tokenahead demo --train --minutes {self.minutes:g} --seed {self.seed}"
