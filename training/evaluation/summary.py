"""Results of a bench: a `DecodingResult` for every method, way of decoding and batch size, and scores of answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from statistics import mean, median, quantiles
from typing import Any

import torch

from ... import __version__
from ..loading import unit_of
from ..results import DEGENERATE_SHARE, DecodingResult, MeasuredResults, environment, hardware
from ..utils import needs_extra
from .bench import CONTROL, Bench, is_near_tie
from .decoding import DecodingMode, Row, acceptance_by_position, drafted_flags, repeated_share
from .expected import ExpectedCalls, ratio_of_sums

EXACT, BLEU = "exact match", "BLEU"
"""Names of the scores, of 0 to 100."""
_ANSWER = "####"  # stands before the number in a reference of GSM8K


@dataclass(frozen=True)
class Pair:
    """What a method did, and what plain decoding did in the same turn of the same prompts."""

    run: Row
    plain: Row

    @property
    def loops(self) -> bool:
        """Whether more than half of either output repeats itself, which makes its speed meaningless."""
        return max(self.run.repeated_share, self.plain.repeated_share) > DEGENERATE_SHARE

    @property
    def ratio(self) -> float | None:
        """Speed over that of plain decoding, after the prompt's own call; None of single tokens."""
        run, plain = self.run.speed, self.plain.speed
        return None if run is None or plain is None else run / plain

    @property
    def whole_ratio(self) -> float | None:
        """The same of whole calls, the prompts' own forwards included."""
        if not self.run.new_tokens or not self.plain.new_tokens:
            return None
        return self.run.new_tokens / self.run.seconds * self.plain.seconds / self.plain.new_tokens


def results_of(bench: Bench) -> list[DecodingResult]:
    """Return all results, beside the control's ratios; the error of logits is the largest that was measured."""
    first, error = bench.methods[0].name, largest_error(bench.lines)
    plain = {(*row.prompts, row.mode, row.batch_size, row.turn): row for row in bench.lines if row.method == first}
    results: list[DecodingResult] = []
    for batch_size in bench.protocol.batch_sizes:
        for mode in bench.protocol.modes:
            here = [row for row in bench.lines if (row.mode, row.batch_size) == (mode.name, batch_size)]
            pairs = [Pair(row, plain[*row.prompts, mode.name, batch_size, row.turn]) for row in here]
            pairs = [pair for pair in pairs if pair.run.error is None and pair.plain.error is None]
            found = []
            for method in bench.methods:
                if own := [pair for pair in pairs if pair.run.method == method.name]:
                    result = result_of(method.name, mode, batch_size, own, error)
                    result.source = method.source
                    result.quality = _quality(bench, own) if bench.protocol.scores else {}
                    found.append(result)
            control = next((each for each in found if each.method == CONTROL and each.micro_speed_up), None)
            ratios = [*control.speed_ups, control.micro_speed_up] if control is not None else []
            results += [replace(each, plain_ratios=ratios) for each in found]
    return results


def _quality(bench: Bench, pairs: Sequence[Pair]) -> dict[str, float]:
    """Return the scores of a method's answers, those that loop included."""
    answers = []
    for row in (pair.run for pair in pairs):
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


def result_of(method: str, mode: DecodingMode, batch_size: int, pairs: Sequence[Pair], error: float) -> DecodingResult:
    """Return the result of a method's pairs; texts that loop are left out, but where all do, which the row says."""
    steady = [pair for pair in pairs if not pair.loops]
    counted = steady or pairs
    runs, plain = [pair.run for pair in counted], [pair.plain for pair in counted]
    ratios = [pair.ratio for pair in steady if pair.ratio is not None]
    whole = [pair.whole_ratio for pair in steady if pair.whole_ratio is not None]
    timed = [pair for pair in steady if pair.ratio is not None]
    result = DecodingResult(
        name=f"{method}, {mode.name}{f', batch {batch_size}' * (batch_size > 1)}",
        method=method,
        decoding=mode.name,
        do_sample=mode.is_sampled,
        backbone_calls=sum(sum(run.calls) for run in runs),
        new_tokens=sum(run.new_tokens for run in runs),
        seconds=sum(run.seconds for run in runs),
        plain_seconds=sum(run.seconds for run in plain),
        plain_new_tokens=sum(run.new_tokens for run in plain),
        batch_size=batch_size,
        per_prompt=[round(len(ids) / calls, 4) for run in runs for ids, calls in zip(run.ids, run.calls)],
        repeated_share=mean(pair.run.repeated_share for pair in pairs),
        looping=len(pairs) - len(steady),
        looping_share=1 - len(steady) / len(pairs),
        processor_seconds=sum(run.processor_seconds for run in runs),
        plain_processor_seconds=sum(run.processor_seconds for run in plain),
        cache_bytes=max(run.cache_bytes for run in runs) or None,
        prompt_ms=median(1000 * run.prompt_seconds for run in runs) or None,
        speed_ups=_quartiles(ratios),
        whole_speed_ups=_quartiles(whole),
        micro_speed_up=_micro([pair.run for pair in timed]) / _micro([pair.plain for pair in timed]) if timed else None,
    )
    _add_drafts(result, [pair.run for pair in steady])
    _add_times(result, [run for run in runs if run.forwards > 1])
    for category, group in groupby(sorted(steady, key=lambda pair: pair.run.category), lambda pair: pair.run.category):
        part = list(group)
        if own := [pair.ratio for pair in part if pair.ratio is not None]:
            result.category_speed_ups[category] = median(own)
        if count := _per_verification([pair.run for pair in part])[0]:
            result.category_tokens_per_call[category] = count
    if compared := [each for pair in pairs for each in pair.run.differences]:
        different = [each for each in compared if each is not None]
        result.identical, result.texts, result.differing = not different, len(compared), len(different)
        result.near_ties = sum(is_near_tie(each, error) for each in different)
    return result


def _add_drafts(result: DecodingResult, runs: Sequence[Row]) -> None:
    """Add the accepted drafts, as decoded and as expected."""
    accepted = [count for run in runs for counts in run.accepted for count in counts]
    result.draft_length = max((count for run in runs for counts in run.drafted for count in counts), default=0) or None
    result.accepted_by_position = acceptance_by_position(accepted, result.draft_length or 0) if accepted else []
    result.tokens_per_verification, result.standard_error = _per_verification(runs)
    expected = [ExpectedCalls.from_lists(run.expected) for run in runs if run.expected is not None]
    for name, value in (list(accumulate(expected))[-1].fields() if expected else {}).items():
        setattr(result, name, value)


def _per_verification(runs: Sequence[Row]) -> tuple[float | None, float | None]:
    """Return the tokens of a verification, as a ratio of sums, and its standard error over outputs."""
    counted = []
    for run in runs:
        verified = [len(counts) for counts in run.accepted] or [calls - 1 for calls in run.calls]
        counted += [(len(ids) - 1.0, float(calls)) for ids, calls in zip(run.ids, verified) if calls]
    return ratio_of_sums(*torch.tensor(counted, dtype=torch.float64).T) if counted else (None, None)


def _add_times(result: DecodingResult, runs: Sequence[Row]) -> None:
    """Add the medians of a call after the prompt's, and of its drafting."""
    drafting = [1000 * run.draft_seconds / (run.forwards - 1) for run in runs if run.draft_seconds is not None]
    calls = [1000 * (run.seconds - run.prompt_seconds) / (run.forwards - 1) for run in runs]
    result.call_ms = median(calls) if calls else None
    result.draft_ms = median(drafting) if drafting and max(drafting) else None


def _quartiles(ratios: list[float]) -> list[float]:
    return quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3


def _micro(runs: Sequence[Row]) -> float:
    """Return tokens per second after the prompts' own calls, as a ratio of sums."""
    later = sum(run.new_tokens - len(run.ids) for run in runs)
    return later / sum(run.seconds - run.prompt_seconds for run in runs)


@dataclass(frozen=True)
class Completion:
    """New ids after a prompt; `drafted`: whether each was drafted and accepted, or else added by the verifier."""

    prompt: str
    ids: list[int]
    drafted: list[bool]

    @property
    def loops(self) -> bool:
        """Whether more than half of it repeats itself."""
        return repeated_share(self.ids) > DEGENERATE_SHARE


def completions_of(bench: Bench, method: str, mode: DecodingMode) -> Iterator[Completion]:
    """Yield the completions of a method."""
    for row in bench.lines:
        if (row.method, row.mode) == (method, mode.name) and row.error is None:
            accepted = row.accepted or [[]] * len(row.ids)
            for name, ids, counts in zip(row.prompts, row.ids, accepted):
                yield Completion(bench.prompts[name].turns[row.turn], ids, drafted_flags(counts, len(ids)))
