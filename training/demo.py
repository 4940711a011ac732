"""`tokenahead demo`: a model writes with and without drafts: the text in colours, the table, the figures."""

from __future__ import annotations

import json
import shlex
import sys
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
from .box import EXCERPTS, check_box, code_prompts, heads_in, load_box
from .commands.bench import RESULTS, show, write
from .evaluation.bench import Bench, Completion, Protocol, completions_of, measured_results
from .evaluation.decoding import MODES, DecodingMode, Method, drafting_method, named_method, plain_method
from .evaluation.prompts import Prompt, PromptEncoder, read_prompts
from .loading import load_model, unit_of
from .results import MeasuredResults, environment, hardware
from .utils import shown_word, visible

PROMPT, DRAFTED, VERIFIED = "dim", "black on green", "black on yellow"
"""Styles of the prompt, of accepted drafts and of tokens that the verifier added; a background shows blanks, too."""


@dataclass(frozen=True)
class DemoModel:
    """A model and its drafters, in words and as methods, of which the first decodes plainly, and what they answer.

    `dataset` names the prompts, `description` says what they are, and `facts` are shown beside the results.
    """

    words: str
    methods: Sequence[Method]
    writer: PromptEncoder
    prompts: list[Prompt]
    dataset: str
    description: str
    modes: Sequence[DecodingMode] = MODES
    facts: dict[str, str | int | float] = field(default_factory=dict)


def box_model(directory: str | Path | None = None, prompts: int = 32, dtype: str = "auto", seed: int = 0) -> DemoModel:
    """Return the model in the box with each of its heads, and held-out code to complete, chosen by the seed.

    `dtype` is that of the weights; `"auto"`: float32. For `directory`, and what is raised, see `check_box`.
    """
    directory = check_box(directory)
    excerpts = json.loads((directory / EXCERPTS).read_text(encoding="utf-8"))
    methods, facts = list[Method](), dict[str, str | int | float]()
    for head in heads_in(directory):
        model, tokenizer = load_box(head, directory, "float32" if dtype == "auto" else dtype)
        rank = model.config.mtp_head.rank
        methods.append(drafting_method(head if rank in (None, 1) else f"{head} {rank}", model))
        facts[f"Parameters of {methods[-1].name}"] = _further_parameters(model, model)
    texts = code_prompts([each["text"].encode() for each in excerpts], prompts, seed)
    return DemoModel(
        described(None, methods),
        [plain_method(methods[0].model), *methods],
        PromptEncoder(tokenizer, chats=False),
        [Prompt(str(number), (text,)) for number, text in enumerate(texts)],
        "held-out Python packages",
        f"Source of {', '.join(sorted({each['package'] for each in excerpts}))}, of which nothing was trained on",
        facts=facts,
    )


def requests(further: bool = False) -> list[Prompt]:
    """Return a short request of each of eight kinds, or three, for models of which no prompts are given."""
    return read_prompts(Path(__file__).with_name("requests.jsonl"))[0][: None if further else 8]


def named_model(
    model: str | None, drafter: str | None = None, prompts: Path | None = None, dtype: str = "auto"
) -> DemoModel:
    """Return a model, what drafts for it (see `load_methods`), and the prompts of a file, or else `requests`."""
    asked = read_prompts(prompts)[0] if prompts else requests()
    tokenizer, plain, drafting = load_methods(model, drafter, dtype)
    writer, kinds = PromptEncoder(tokenizer, chats=bool(model)), dict.fromkeys(prompt.category for prompt in asked)
    return DemoModel(
        described(model, [drafting]),
        [plain, drafting],
        writer,
        asked,
        prompts.name if prompts else "short requests",
        f"{'Prompts' if prompts else 'Requests'} of {', '.join(kinds)}",
        modes=(MODES[0], MODES[-1]),
        facts={"Model": shown_word(model or "the model in the box"), "Chat template": writer.template},
    )


def load_methods(
    model: str | None, drafter: str | None, dtype: str = "auto"
) -> tuple[PreTrainedTokenizerBase, Method, Method]:
    """Return the tokenizer of a model, plain decoding with it, and a method that drafts.

    `model` None is the one in the box, and `drafter` a method of `tokenahead bench`, None: its own drafts, or n-grams;
    `dtype="auto"` is that of the checkpoint, and float32 of the box.
    """
    loaded, tokenizer = load_model(model, dtype) if model else load_box(dtype="float32" if dtype == "auto" else dtype)
    drafter = drafter or ("own" if isinstance(loaded, MTPGenerationMixin) else "ngram")
    return tokenizer, plain_method(loaded), named_method(drafter, loaded)


def described(name: str | None, methods: Sequence[Method]) -> str:
    """Return a model and what drafts for it, in a line, with the parameters of each."""
    model, drafts = methods[0].model, list[str]()
    own = _further_parameters(model, model) if isinstance(methods[0].model, BaseDrafter) else 0
    for method in methods:
        further = _further_parameters(method.drafter, method.model)
        drafts.append(f"{method.name}{f' ({further:,} further parameters)' if further else ''}")
    about = f"{model.num_parameters() - own:,} parameters, {str(model.dtype)[6:]}"
    return f"{name or 'The model in the box'} ({about}), drafts: {', '.join(drafts)}"


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

    def measure(self, subject: DemoModel) -> tuple[MeasuredResults, Bench]:
        """Measure the methods; return the results, and the bench, which holds the outputs."""
        before, sizes = environment(), sorted({1, self.batch_size})
        protocol = Protocol(subject.modes, sizes, self.new_tokens, seconds=self.seconds, seed=self.seed)
        bench = Bench(subject.methods, subject.writer, protocol)
        bench.run(subject.prompts, lambda done, most: self.on_step(f"{done} of at most {most} calls"))
        if not any(row.error is None for row in bench.lines):
            raise ValueError(f"nothing was measured: {'; '.join(map(str, bench.not_measured.values()))}")
        count = len({name for line in bench.lines for name in line.prompts})
        limit = f"at most {self.new_tokens} {unit_of(subject.writer.tokenizer)}s"
        measured = measured_results(
            bench,
            environment=before,
            dataset_name=subject.dataset,
            dataset_description=f"{subject.description}: {count} prompts, each completed with {limit}.",
            command=shlex.join(["tokenahead", *map(shown_word, sys.argv[1:])]),
            extra=subject.facts,
        )
        return measured, bench


def run_demo(measurement: Measurement, subject: DemoModel, output: str | Path = "tokenahead-demo") -> MeasuredResults:
    """Measure a model, show its outputs, and write results and figures into a directory; return the results."""
    if any(Path(output).glob("*")) and not (Path(output) / RESULTS).is_file():
        raise FileExistsError(f"--output {output} holds files that the demo did not make: name another directory")
    console = Console(highlight=False, emoji=False)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console.print(f"{subject.words}. {hardware()}; about {measurement.seconds:g} seconds.", markup=False)
    with console.status("Measuring ...") as status:
        shown = replace(measurement, on_step=lambda words: status.update(f"Measuring: {words} ..."))
        measured, bench = shown.measure(subject)
    words = ("prompt", PROMPT), "  ", ("drafted and accepted", DRAFTED), "  ", ("verifier's own", VERIFIED)
    console.print(Text.assemble(*words))
    for mode in subject.modes:
        drafting = [row for row in measured.results if row.decoding == mode.name and row.batch_size == 1]
        if drafting := [row for row in drafting if row.draft_length]:
            fastest = max(drafting, key=lambda row: row.tokens_per_second).method or ""
            console.rule(f"{mode.name}, {fastest}", align="left")
            written = completions_of(bench, fastest, mode)
            console.print(coloured(min(written, key=lambda each: each.loops), bench.writer))  # the first that does not
    show(console, measured)
    load = measured.environment.get("load average, 1 min", "unknown")
    console.print(f"{measured.dataset_description} {measured.hardware}; load {load} before.", markup=False)
    write(Path(output), measured)
    console.print(f"Wrote {RESULTS} and figures into {output}.", markup=False)
    return measured


def coloured(completion: Completion, writer: PromptEncoder, prompt_lines: int = 4) -> Text:
    """Return the last lines of the prompt and its completion, every token in the colour of its origin."""
    prompt = "".join(completion.prompt.splitlines(keepends=True)[-prompt_lines:])
    text = Text().append(f"{prompt}{writer.gap}", style=PROMPT)
    for piece, is_drafted in spans(writer.tokenizer, completion.ids, completion.drafted):
        text.append(visible(piece), style=DRAFTED if is_drafted else VERIFIED)
    return text


def spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], flags: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    """Yield pieces of the text of ids, whole characters alone, and whether they were drafted, as `flags` say."""
    end, done = 0, ""
    for is_drafted, run in groupby(flags):
        end += len([*run])
        whole = str(tokenizer.decode(list(ids[:end])))
        whole = whole if end == len(flags) else whole.rstrip("\ufffd")
        if whole != done:
            yield whole[len(done) :], is_drafted
        done = whole
