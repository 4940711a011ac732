"""`tokenahead demo`: a model writes with and without drafts: the text in colours, the table, the figures.

The model is the one in the box, with each of its heads, or one's own.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ..generation.attach import MTPGenerationMixin
from ..generation.drafter import BaseDrafter
from .box import Box, excerpt_prompts, load_box
from .commands.bench import BENCH_FIGURE, FRONTIER_FIGURE, RESULTS, show, write
from .evaluation.bench import Bench, Completion, Protocol, completions_of, measured_results, results_of
from .evaluation.decoding import MODES, DecodingMode, Method
from .evaluation.methods import drafting_method, named_method, plain_method
from .evaluation.prompts import Prompt, PromptEncoder, read_prompts
from .loading import load_model, unit_of
from .results import MeasuredResults, environment, hardware
from .utils import shown_word, visible

_FEW = 4  # prompts below which results need a warning
_UNSHOWN = "sampled, T=0.7"  # a way of decoding of which no output is shown
_BATCH_SHARE = 0.35  # of the time, where batches are measured, too
_BATCH_TOKENS = 64  # per completion in batches, at most
_ADAPTIVE = {"num_assistant_tokens_schedule": "adaptive"}
_PREFIX = 320  # bytes of the held-out prefixes that the model in the box completes
PROMPT, DRAFTED, VERIFIED = "dim", "black on green", "black on yellow"
"""Styles of the prompt, of accepted drafts and of tokens that the verifier added; a background shows blanks, too."""


@dataclass(frozen=True)
class DemoModel:
    """A model and its drafters, in words and as methods, of which the first decodes plainly, and what they answer.

    `prompts` makes prompts of a seed; `dataset` names them, and `description` says what they are. `arguments` of
    `tokenahead demo` name all this, and `facts` are shown beside the results.
    """

    words: str
    methods: Sequence[Method]
    writer: PromptEncoder
    prompts: Callable[[int], list[Prompt]]
    dataset: str
    description: str
    modes: Sequence[DecodingMode] = MODES
    arguments: Sequence[str] = ()
    facts: dict[str, str | int | float] = field(default_factory=dict)


def box_model(directory: str | Path | None = None, prompts: int = 32, dtype: str = "auto") -> DemoModel:
    """Return the model in the box (None: the installed one) with each of its heads, and held-out code to complete.

    `dtype` is that of the weights; `"auto"`: float32. For what is raised, see `check_box`.
    """
    box = Box.load(directory, "float32" if dtype == "auto" else dtype)
    first, *_ = box.models.values()
    ranks = {head: model.config.mtp_head.rank for head, model in box.models.items()}
    models = {head if ranks[head] in (None, 1) else f"{head} {ranks[head]}": box.models[head] for head in ranks}
    sizes = {name: _further_parameters(model, model) for name, model in models.items()}
    packages = ", ".join(sorted({excerpt.package for excerpt in box.excerpts}))

    def completed(seed: int) -> list[Prompt]:
        texts = excerpt_prompts(box.excerpts, prompts, seed, _PREFIX)
        return [Prompt(str(number), (text,)) for number, text in enumerate(texts)]

    return DemoModel(
        f"The model in the box: EvaByte with {_backbone_parameters(first):,} parameters, {str(first.dtype)[6:]}; "
        f"heads over {first.window} bytes: {', '.join(f'{name} ({size:,})' for name, size in sizes.items())}",
        [plain_method(first), *(drafting_method(name, model) for name, model in models.items())],
        PromptEncoder(box.tokenizer, chats=False),
        completed,
        "held-out Python packages",
        f"Source of {packages}, of which nothing was trained on, prompts of up to {_PREFIX} bytes",
        arguments=[] if dtype == "auto" else ["--dtype", dtype],
        facts={f"Parameters of {name}": size for name, size in sizes.items()},
    )


def requests(further: bool = False) -> list[Prompt]:
    """Return a short request of each of eight kinds, or three, for models of which no prompts are given."""
    return read_prompts(Path(__file__).with_name("requests.jsonl"))[0][: None if further else 8]


def named_model(
    model: str | None, drafter: str | None = None, prompts: Path | None = None, dtype: str = "auto"
) -> DemoModel:
    """Return a model, what drafts for it, and prompts.

    Args:
        model: Directory, or name on the Hub; None: the model in the box.
        drafter: A method of `tokenahead bench`; None: the model's own drafts, or n-grams.
        prompts: A file of prompts, as `read_prompts` takes it; None: a short request of each of eight kinds.
        dtype: Of the weights; `"auto"`: the checkpoint's, float32 of the model in the box.

    Raises:
        OSError: No such directory or file, or what the Hub cannot give.
        ValueError: No model, prompts that cannot be read, or a drafter that does not fit.
    """
    asked = read_prompts(prompts)[0] if prompts else requests()
    loaded, tokenizer, plain, drafting = load_methods(model, drafter, dtype)
    writer, kinds = PromptEncoder(tokenizer, chats=bool(model)), dict.fromkeys(prompt.category for prompt in asked)
    given = {"model": model, "drafter": drafter, "prompts": prompts, "dtype": None if dtype == "auto" else dtype}
    return DemoModel(
        described(loaded, model, drafting),
        [plain, drafting],
        writer,
        lambda seed: asked,
        prompts.name if prompts else "short requests",
        f"{'Prompts' if prompts else 'Requests'} of {', '.join(kinds)}",
        modes=(MODES[0], MODES[-1]),
        arguments=[word for name, value in given.items() if value for word in (f"--{name}", str(value))],
        facts={"Model": shown_word(model or "the model in the box"), "Chat template": writer.template},
    )


def load_methods(
    model: str | None, drafter: str | None, dtype: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Method, Method]:
    """Return a model, its tokenizer, plain decoding, and the method of `tokenahead bench` that drafts."""
    loaded, tokenizer = load_model(model, dtype) if model else load_box(dtype="float32" if dtype == "auto" else dtype)
    drafter = drafter or ("own" if isinstance(loaded, MTPGenerationMixin) else "ngram")
    return loaded, tokenizer, plain_method(loaded), named_method(drafter, loaded)


def described(model: PreTrainedModel, name: str | None, method: Method) -> str:
    """Return a model and what drafts for it, in a line, with the parameters of each."""
    about = f"{_backbone_parameters(model):,} parameters, {str(model.dtype)[6:]}"
    further = _further_parameters(method.drafter, model)
    drafts = f"{method.name}{f' ({further:,} further parameters)' if further else ''}"
    return f"{name or 'The model in the box'} ({about}), drafts: {drafts}"


def _backbone_parameters(model: PreTrainedModel) -> int:
    """Return the parameters of plain decoding, its unembedding among them: all but those that only draft."""
    return model.num_parameters() - (_further_parameters(model, model) if isinstance(model, BaseDrafter) else 0)


def _further_parameters(drafter: BaseDrafter, model: PreTrainedModel) -> int:
    """Return the parameters that a drafter adds to those of plain decoding; of a model, those that only draft."""
    parts = (part for part in drafter.parts().values() if part is not model.get_output_embeddings())
    return sum(each.numel() for part in parts for each in part.parameters())


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
    console: Console | None = None,
) -> MeasuredResults:
    """Measure a model, show its outputs, and write results and figures; return what is saved in `results.json`.

    Args:
        measurement: How much is measured.
        subject: The model, its methods and prompts.
        output: The directory of results and figures; those of an earlier run there are replaced.
        console: None: the standard output.

    Raises:
        FileExistsError: The directory holds files, and no results of an earlier run.
        ValueError: Nothing could be measured.
    """
    console, output = console or Console(highlight=False, emoji=False), Path(output)
    if any(output.glob("*")) and not (output / RESULTS).is_file():
        raise FileExistsError(f"--output {output} holds files that the demo did not make: name another directory")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console.print(f"{subject.words}. {hardware()}; about {measurement.seconds:g} seconds.", markup=False)
    with console.status("Measuring ...") as status:
        shown = replace(measurement, on_step=lambda words: status.update(f"Measuring: {words} ..."))
        measured, bench = shown.measure(subject)
    _print(console, measured, bench)
    write(output, measured)
    words = f"Wrote {RESULTS}, {BENCH_FIGURE} and {FRONTIER_FIGURE} into {output}. The same: "
    console.print(words + measurement.command(subject), markup=False)
    return measured


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


def spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], flags: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    """Yield pieces of the text of ids, and whether they were drafted, as `flags` say.

    An incomplete character belongs to the token that completes it.
    """
    end, done = 0, ""
    for is_drafted, run in groupby(flags):
        end += len([*run])
        whole = str(tokenizer.decode(list(ids[:end])))
        whole = whole if end == len(flags) else whole.rstrip("\ufffd")
        if whole != done:
            yield whole[len(done) :], is_drafted
        done = whole
