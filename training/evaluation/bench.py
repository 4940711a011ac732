"""The protocol of all measurements: methods by turns on the same prompts, a row for each, within a time limit.

A unit is a group of prompts and a way of decoding. In it every method decodes, in an order that rotates from unit to
unit: plain decoding, once more as a control, and the methods with drafts. All of them get plain decoding's answers as
the history of later turns. Drafters that remember text begin every unit with what they remembered at first. A unit
counts as a whole or not at all, so that every method has seen the same prompts wherever a run ends.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import torch

from ... import __version__
from ...generation.call.sequences import acceptance_by_position
from ...generation.drafter import BaseDrafter
from ...generation.tensors.tensor_files import Fields
from ..loading import unit_of
from ..results import DEGENERATE_SHARE, DecodingResult, MeasuredResults, environment, hardware
from ..utils import needs_extra, one_line, replace_file
from .decoding import CONTROL, MODES, DecodingMode, Method, Row, decode, drafted_flags, repeated_share
from .drafts import Batch, DraftMeasures, ExpectedCalls, ratio_of_sums, text_of
from .lossless import Comparison, counts_of
from .prompts import Prompt, PromptEncoder, groups_of

LINES = "lines.jsonl"
"""Name of the file of what was measured, as it was measured: a list of rows for each unit."""
EXACT, BLEU = "exact match", "BLEU"
"""Names of the scores, of 0 to 100."""
_ANSWER = "####"  # stands before the number in a reference of GSM8K
_WARM_UP = 8  # tokens of a first call that is not measured, because it also sets things up
_Unit = tuple[list[Prompt], DecodingMode, int]
_Pair = tuple[Row, Row]  # what a method did, and plain decoding in the same turn of the same prompts


@dataclass(frozen=True)
class Protocol:
    """How much is measured, and how."""

    modes: Sequence[DecodingMode] = MODES  # ways of decoding
    batch_sizes: Sequence[int] = (1,)  # prompts per call
    new_tokens: int = 128  # per answer, at most
    forces_length: bool = False  # let no answer end earlier; forced outputs loop
    per_category: int | None = None  # prompts of each category; None: all
    seconds: float | None = None  # no unit is begun that would end later, but one of every mode and batch size
    seed: int = 0  # of the samples
    expects: bool = True  # whether calls are expected along the plain outputs, too
    scores: bool = False  # whether answers are scored by the prompts' references


class Bench:
    """Measures methods, of which the first decodes plainly, once more with `control`, on prompts that a writer encodes.

    Rows are written into the directory as they are measured, and read from it where there are some; None: nowhere.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        writer: PromptEncoder,
        protocol: Protocol,
        directory: Path | None = None,
        control: bool = True,
    ) -> None:
        again = [replace(methods[0], name=CONTROL)] if control else []
        self.methods = [methods[0], *again, *methods[1:]]
        self.writer, self.protocol = writer, protocol
        self.file = None if directory is None else directory / LINES
        self.lines: list[Row] = []  # all that was measured, of whole units
        self.prompts: dict[str, Prompt] = {}  # by name
        self.refused: dict[tuple[str, str, int], str] = {}  # why a method, mode and batch size are not measured
        self.comparison = Comparison(methods[0])
        self.warm: set[tuple[str, int]] = set()  # modes and batch sizes
        drafters = [method.drafter for method in methods if isinstance(method.drafter, BaseDrafter)]
        self.restore_points = [drafter.restore_point() for drafter in drafters]

    @property
    def not_measured(self) -> dict[str, str | int | float]:
        """What failed, and why."""
        return {f"{method}, {mode}, batch {size}": reason for (method, mode, size), reason in self.refused.items()}

    def run(self, prompts: Sequence[Prompt], on_unit: Callable[[int, int], None] = lambda done, count: None) -> None:
        """Measure until all is done or the time is over; what earlier runs left in the directory is not repeated.

        `on_unit` is called after every unit with the numbers of finished ones and of all.
        """
        self.writer.check(prompts)
        self.prompts = {prompt.name: prompt for prompt in prompts}
        units, known = self._units(prompts), self._read()
        missing = [unit for key, unit in units.items() if key not in known]
        self.lines = [row for key in units for row in known.get(key, [])]
        self.refused |= {(row.method, row.mode, row.batch_size): row.error for row in self.lines if row.error}
        done, started, longest = len(units) - len(missing), time.monotonic(), 0.0
        on_unit(done, len(units))
        settings = len(self.protocol.modes) * len(self.protocol.batch_sizes)
        for unit in missing:
            spent = time.monotonic() - started
            if done >= settings and self.protocol.seconds is not None and spent + longest > self.protocol.seconds:
                break
            rows = self._measure(*unit, done)
            self.lines += rows
            if self.file is not None:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(list(map(asdict, rows))) + "\n")
            longest, done = max(longest, time.monotonic() - started - spent), done + 1
            on_unit(done, len(units))

    def _units(self, prompts: Sequence[Prompt]) -> dict[tuple[object, ...], _Unit]:
        """Return the units by `Row.place`, in an order in which all settings advance alike."""
        units = dict[tuple[object, ...], tuple[float, _Unit]]()
        for batch_size, mode in product(self.protocol.batch_sizes, self.protocol.modes):
            groups = groups_of(prompts, batch_size, self.protocol.per_category)
            for index, group in enumerate(groups):
                place = (*(prompt.name for prompt in group), mode.name, batch_size, 0)
                units[place] = index / len(groups), (group, mode, batch_size)
        return {place: unit for place, (_, unit) in sorted(units.items(), key=lambda each: each[1][0])}

    def _read(self) -> dict[tuple[object, ...], list[Row]]:
        """Return the rows of whole units, and leave only these in the file."""
        if self.file is None or not self.file.is_file():
            return {}
        *whole, _ = self.file.read_text(encoding="utf-8").split("\n")  # the last line may have been cut off
        replace_file(self.file, "".join(f"{line}\n" for line in whole))
        units = [[Row(**row) for row in json.loads(line)] for line in whole]
        return {rows[0].place: rows for rows in units}

    def _measure(self, group: Sequence[Prompt], mode: DecodingMode, batch_size: int, number: int) -> list[Row]:
        device = self.methods[0].model.device
        if (mode.name, batch_size) not in self.warm:
            self.warm.add((mode.name, batch_size))
            batch = self.writer.batch(group, [[] for _ in group], device)
            for method in self.methods:
                self._tried(method, batch, mode, batch_size, min(_WARM_UP, self.protocol.new_tokens))
        for restore in self.restore_points:
            restore()
        if self.protocol.forces_length:
            mode = replace(mode, options=mode.options | {"min_new_tokens": self.protocol.new_tokens})
        categories = {prompt.category for prompt in group}
        facts: Fields = {"prompts": [prompt.name for prompt in group], "mode": mode.name, "batch_size": batch_size}
        facts["category"] = "mixed" if len(categories) > 1 else group[0].category
        answers: dict[str, list[str]] = {name: [] for name in facts["prompts"]}
        rows: list[Row] = []
        for turn in range(max(len(prompt.turns) for prompt in group)):
            here = [prompt for prompt in group if len(prompt.turns) > turn]
            batch = self.writer.batch(here, [answers[prompt.name] for prompt in here], device)
            # another one for each turn, for plain decoding would else answer a turn as it answered the one before
            seed = zlib.crc32(f"{self.protocol.seed} {turn} {[prompt.name for prompt in here]}".encode())
            found = self._turn(batch, mode, batch_size, number + turn, seed)
            rows += [replace(row, turn=turn, **facts) for row in found]
            if found[0].error is not None:
                break
            for prompt, ids in zip(here, found[0].ids):
                answers[prompt.name].append(self.writer.answer(ids))
        return rows

    def _turn(self, batch: Batch, mode: DecodingMode, batch_size: int, number: int, seed: int) -> list[Row]:
        """Return what the methods do, in their order, with differences from plain decoding, and expected calls."""
        shift, found = number % len(self.methods), dict[str, Row]()
        for method in [*self.methods[shift:], *self.methods[:shift]]:
            row = self._tried(method, batch, mode, batch_size, self.protocol.new_tokens, seed)
            found[method.name] = replace(row, method=method.name)
        rows = [found[method.name] for method in self.methods]
        plain, prompts = rows[0], [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"])]
        for method, row in zip(self.methods[1:], rows[1:]):
            if plain.error is not None or row.error is not None:
                continue
            outputs = () if mode.is_sampled else zip(prompts, plain.ids, row.ids)
            row.differences = [self.comparison.difference(*output, len(prompts)) for output in outputs]
            if self.protocol.expects and (expectation := method.expectation(mode)) is not None:
                measures = DraftMeasures(mode.temperature, expectation[1])
                for prompt, ids in zip(prompts, plain.ids):
                    measures.add(method.drafter, text_of(prompt[None], prompt.new_tensor([ids])))
                if (calls := measures.calls.get(expectation[0])) is not None:
                    row.expected = {name: values.tolist() for name, values in vars(calls).items()}
        return rows

    def _tried(
        self, method: Method, batch: Batch, mode: DecodingMode, batch_size: int, new_tokens: int, seed: int = 0
    ) -> Row:
        """Return a row, or why there is none; the method is then left out of this setting."""
        for name in (self.methods[0].name, method.name):  # without plain decoding there is nothing to compare with
            if reason := self.refused.get((name, mode.name, batch_size)):
                return Row(error=reason if name == method.name else f"{name}: {reason}")
        try:
            return decode(method, batch, mode, new_tokens, seed)
        except Exception as error:  # whatever it is, of our code or of transformers', the other methods go on
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
            reason = f"no memory for a batch of {batch_size}" if is_memory else one_line(error)
            self.refused[method.name, mode.name, batch_size] = reason
            return Row(error=reason)


def measured_results(bench: Bench, **facts: Any) -> MeasuredResults:
    """Return the results of a bench with its machine and dtype, and further fields of `MeasuredResults`."""
    model = bench.methods[0].model
    fields = {
        "results": results_of(bench),
        "hardware": hardware() if model.device.type == "cpu" else torch.cuda.get_device_name(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "library_version": __version__,
        "unit": unit_of(bench.writer.tokenizer),
        "environment": environment(),
        "not_measured": bench.not_measured,
    }
    return MeasuredResults(**fields | facts)


def largest_error(rows: Sequence[Row]) -> float:
    """Return the largest error between logits of a block and of single tokens that was measured."""
    return max((each["error"] for row in rows for each in row.differences if each is not None), default=0.0)


def results_of(bench: Bench) -> list[DecodingResult]:
    """Return all results, beside the control's ratios; the error of logits is the largest that was measured."""
    rows, results = [row for row in bench.lines if row.error is None], list[DecodingResult]()
    plain, error = {row.place: row for row in rows if row.method == bench.methods[0].name}, largest_error(rows)
    for batch_size, mode in product(bench.protocol.batch_sizes, bench.protocol.modes):
        here = [row for row in rows if (row.mode, row.batch_size) == (mode.name, batch_size) and row.place in plain]
        found = []
        for method in bench.methods:
            if own := [row for row in here if row.method == method.name]:
                result = result_of(method.name, mode, batch_size, [(row, plain[row.place]) for row in own], error)
                quality = _quality(bench, own) if bench.protocol.scores else {}
                found.append(replace(result, source=method.source, quality=quality))
        control = next((each for each in found if each.method == CONTROL and each.micro_speed_up), None)
        ratios = [*control.speed_ups, control.micro_speed_up] if control is not None else []
        results += [replace(each, plain_ratios=ratios) for each in found]
    return results


def result_of(method: str, mode: DecodingMode, batch_size: int, pairs: Sequence[_Pair], error: float) -> DecodingResult:
    """Return the result of a method's pairs; texts that loop are left out, but where all do, which the row says."""
    steady = [pair for pair in pairs if max(row.repeated_share for row in pair) <= DEGENERATE_SHARE]
    counted = steady or pairs
    runs, plain, written = [run for run, _ in counted], [row for _, row in counted], [run for run, _ in steady]
    timed = [(run, row, run.speed / row.speed) for run, row in steady if run.speed and row.speed]
    whole = [
        run.new_tokens / run.seconds * row.seconds / row.new_tokens
        for run, row in steady
        if run.new_tokens and row.new_tokens
    ]
    categories = sorted({run.category for run in written})
    speed_ups = {each: [ratio for run, _, ratio in timed if run.category == each] for each in categories}
    rates = {each: _per_verification([run for run in written if run.category == each])[0] for each in categories}
    later = [run for run in runs if run.forwards > 1]
    drafting = [1000 * run.draft_seconds / (run.forwards - 1) for run in later if run.draft_seconds is not None]
    accepted = [count for run in written for counts in run.accepted for count in counts]
    length = max((count for run in written for counts in run.drafted for count in counts), default=0)
    tokens_per_verification, standard_error = _per_verification(written)
    along = [run.expected.values() for run in written if run.expected is not None]
    sums = [torch.cat([torch.tensor(each, dtype=torch.float64) for each in part]) for part in zip(*along)]
    expected = ExpectedCalls(*sums) if sums else None
    compared = [each for run, _ in pairs for each in run.differences]
    texts, differing, near_ties = counts_of(compared, error)
    return DecodingResult(
        name=f"{method}, {mode.name}{f', batch {batch_size}' * (batch_size > 1)}",
        method=method,
        decoding=mode.name,
        do_sample=mode.is_sampled,
        backbone_calls=sum(sum(run.calls) for run in runs),
        new_tokens=sum(run.new_tokens for run in runs),
        seconds=sum(run.seconds for run in runs),
        plain_seconds=sum(row.seconds for row in plain),
        plain_new_tokens=sum(row.new_tokens for row in plain),
        batch_size=batch_size,
        per_prompt=[round(len(ids) / calls, 4) for run in runs for ids, calls in zip(run.ids, run.calls)],
        repeated_share=mean(run.repeated_share for run, _ in pairs),
        looping=len(pairs) - len(steady),
        looping_share=1 - len(steady) / len(pairs),
        processor_seconds=sum(run.processor_seconds for run in runs),
        plain_processor_seconds=sum(row.processor_seconds for row in plain),
        cache_bytes=max(run.cache_bytes for run in runs) or None,
        prompt_ms=median(1000 * run.prompt_seconds for run in runs) or None,
        call_ms=median(1000 * run.later[1] / (run.forwards - 1) for run in later) if later else None,
        draft_ms=median(drafting) if drafting and max(drafting) else None,
        speed_ups=_quartiles([ratio for *_, ratio in timed]),
        whole_speed_ups=_quartiles(whole),
        micro_speed_up=_micro([run for run, *_ in timed]) / _micro([row for _, row, _ in timed]) if timed else None,
        category_speed_ups={each: median(own) for each, own in speed_ups.items() if own},
        category_tokens_per_call={each: rate for each, rate in rates.items() if rate},
        draft_length=length or None,
        accepted_by_position=acceptance_by_position(accepted, length) if accepted else [],
        tokens_per_verification=tokens_per_verification,
        standard_error=standard_error,
        identical=not differing if compared else None,
        texts=texts or None,
        differing=differing if compared else None,
        near_ties=near_ties if compared else None,
        expected_tokens_per_call=expected and expected.tokens_per_call,
        expected_standard_error=expected and expected.standard_error,
        expected_by_position=expected.by_position if expected else [],
    )


def _per_verification(runs: Sequence[Row]) -> tuple[float | None, float | None]:
    """Return the tokens of a verification, as a ratio of sums, and its standard error over outputs."""
    counted = []
    for run in runs:
        verified = [len(counts) for counts in run.accepted] or [calls - 1 for calls in run.calls]
        counted += [(len(ids) - 1.0, float(calls)) for ids, calls in zip(run.ids, verified) if calls]
    return ratio_of_sums(*torch.tensor(counted, dtype=torch.float64).T) if counted else (None, None)


def _quartiles(ratios: list[float]) -> list[float]:
    return quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3


def _micro(runs: Sequence[Row]) -> float:
    """Return tokens per second after the prompts' own calls, as a ratio of sums."""
    tokens, seconds = map(sum, zip(*(run.later for run in runs)))
    return tokens / seconds


def _quality(bench: Bench, rows: Sequence[Row]) -> dict[str, float]:
    """Return the scores of a method's answers, those that loop included."""
    answers = []
    for row in rows:
        here = [bench.prompts[name] for name in row.prompts if len(bench.prompts[name].turns) > row.turn]
        for prompt, ids in zip(here, row.ids):
            if reference := dict(enumerate(prompt.references)).get(row.turn):
                answers.append((bench.writer.answer(ids), reference))
    return quality_of(answers)


def quality_of(answers: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return the scores of answers beside their references, by name, 0 to 100; one without answers is absent.

    Where the reference ends as in GSM8K (`#### 42`), the last number of the answer must be that one; all others go into
    one BLEU of the corpus (sacrebleu's).
    """
    numbers, texts = [], []
    for answer, reference in answers:
        (numbers if _ANSWER in reference else texts).append((answer, reference))
    scores = {}
    if numbers:
        scores[EXACT] = 100 * mean(_last_number(answer) == _last_number(reference) for answer, reference in numbers)
    if texts:
        with needs_extra("eval", "--quality with references that are texts"):
            import sacrebleu
        scores[BLEU] = float(sacrebleu.corpus_bleu([text for text, _ in texts], [[text for _, text in texts]]).score)
    return scores


def _last_number(text: str) -> float | None:
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True)
class Completion:
    """New ids after a prompt; `drafted`: whether each was drafted and accepted, or else added by the verifier."""

    prompt: str
    ids: list[int]
    drafted: list[bool]
    loops: bool = False  # whether more than half of it repeats itself


def completions_of(bench: Bench, method: str, mode: DecodingMode) -> Iterator[Completion]:
    """Yield the completions of a method."""
    for row in bench.lines:
        if (row.method, row.mode) == (method, mode.name) and row.error is None:
            for name, ids, counts in zip(row.prompts, row.ids, row.accepted or [[]] * len(row.ids)):
                loops = repeated_share(ids) > DEGENERATE_SHARE
                yield Completion(bench.prompts[name].turns[row.turn], ids, drafted_flags(counts, len(ids)), loops)
