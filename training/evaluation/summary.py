"""Results of a bench: a `DecodingResult` for every method, way of decoding and batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import mean, median, quantiles
from typing import Any

import torch

from ... import __version__
from ..loading import unit_of
from ..results import DEGENERATE_SHARE, DecodingResult, MeasuredResults, environment, hardware
from .bench import CONTROL, Bench, Line, is_near_tie
from .decoding import DecodingMode, Run, acceptance_by_position, drafted_flags, repeated_share
from .expected import ExpectedCalls, ratio_of_sums
from .quality import quality_of


@dataclass(frozen=True)
class Pair:
    """A run of a method, its category, and the run of plain decoding in the same turn of the same prompts."""

    category: str
    run: Run
    plain: Run

    @property
    def loops(self) -> bool:
        """Whether more than half of either output repeats itself, which makes its speed meaningless."""
        return max(self.run.repeated_share, self.plain.repeated_share) > DEGENERATE_SHARE

    @property
    def ratio(self) -> float | None:
        """Speed over that of plain decoding, after the prompt's own call; None of loops and single tokens."""
        speeds = self.run.speed, self.plain.speed
        return None if self.loops or speeds[0] is None or speeds[1] is None else speeds[0] / speeds[1]

    @property
    def whole_ratio(self) -> float | None:
        """The same of whole calls, the prompts' own forwards included."""
        if self.loops or not self.run.new_tokens or not self.plain.new_tokens:
            return None
        return self.run.new_tokens / self.run.seconds * self.plain.seconds / self.plain.new_tokens


def pairs_of(bench: Bench) -> Iterator[tuple[str, DecodingMode, int, list[Pair]]]:
    """Yield the pairs of every method, way of decoding and batch size, where there are any."""
    plain_name = bench.methods[0].name
    plain = {(*line.unit, line.turn): line.run for line in bench.lines if line.method == plain_name}
    for batch_size in bench.protocol.batch_sizes:
        for mode in bench.protocol.modes:
            for method in bench.methods:
                setting = method.name, mode.name, batch_size
                lines = [each for each in bench.lines if (each.method, each.mode, each.batch_size) == setting]
                pairs = [Pair(line.category, line.run, plain[(*line.unit, line.turn)]) for line in lines]
                if pairs := [pair for pair in pairs if pair.run.error is None and pair.plain.error is None]:
                    yield method.name, mode, batch_size, pairs


def results_of(bench: Bench) -> list[DecodingResult]:
    """Return all results, beside the control's ratios; the error of logits is the largest that was measured."""
    error, sources = largest_error(bench.lines), {method.name: method.source for method in bench.methods}
    rows = [replace(result_of(*pairs, error), source=sources[pairs[0]]) for pairs in pairs_of(bench)]
    controls = {(row.decoding, row.batch_size): row for row in rows if row.method == CONTROL}
    ratios = {key: [*row.speed_ups, row.micro_speed_up] for key, row in controls.items() if row.micro_speed_up}
    rows = [replace(row, plain_ratios=ratios.get((row.decoding, row.batch_size), [])) for row in rows]
    return [replace(row, quality=_quality(bench, row)) for row in rows] if bench.protocol.scores else rows


def _quality(bench: Bench, row: DecodingResult) -> dict[str, float]:
    """Return the scores of a row's answers, those that loop included."""
    answers = []
    for line in bench.lines:
        if (line.method, line.mode, line.batch_size) != (row.method, row.decoding, row.batch_size) or line.run.error:
            continue
        here = [bench.prompts[name] for name in line.prompts if len(bench.prompts[name].turns) > line.turn]
        for prompt, ids in zip(here, line.run.ids):
            if reference := dict(enumerate(prompt.references)).get(line.turn):
                answers.append((bench.writer.answer(ids), reference))
    return quality_of(answers)


def measured_results(bench: Bench, **facts: Any) -> MeasuredResults:
    """Return the results of a bench with its machine and dtype, and further fields of `MeasuredResults`."""
    model = bench.methods[0].model
    fields = {
        "hardware": hardware() if model.device.type == "cpu" else torch.cuda.get_device_name(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "library_version": __version__,
        "unit": unit_of(bench.writer.tokenizer),
        "results": results_of(bench),
        "environment": environment(),
        "not_measured": bench.not_measured,
    }
    return MeasuredResults(**fields | facts)


def largest_error(lines: Sequence[Line]) -> float:
    """Return the largest error between logits of a block and of single tokens that was measured."""
    return max((each["error"] for line in lines for each in line.run.differences if each is not None), default=0.0)


def result_of(method: str, mode: DecodingMode, batch_size: int, pairs: Sequence[Pair], error: float) -> DecodingResult:
    """Return the result of a method's pairs; texts that loop are left out, but where all do, which the row says."""
    steady = [pair for pair in pairs if not pair.loops]
    counted = steady or pairs
    every, runs, plain = [pair.run for pair in pairs], [pair.run for pair in counted], [pair.plain for pair in counted]
    return DecodingResult(
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
        repeated_share=mean(run.repeated_share for run in every),
        looping=len(pairs) - len(steady),
        looping_share=1 - len(steady) / len(pairs),
        processor_seconds=sum(run.processor_seconds for run in runs),
        plain_processor_seconds=sum(run.processor_seconds for run in plain),
        cache_bytes=max(run.cache_bytes for run in runs) or None,
        **_drafts([pair.run for pair in steady]),
        **_times(runs),
        **_speeds(steady),
        **_differences(every, error),
    )


def _drafts(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the accepted drafts, as decoded and as expected."""
    accepted = [count for run in runs for counts in run.accepted for count in counts]
    length = max((count for run in runs for counts in run.drafted for count in counts), default=0)
    ratio, error = _per_verification(runs)
    fields: dict[str, Any] = {
        "accepted_by_position": acceptance_by_position(accepted, length) if accepted else [],
        "draft_length": length or None,
        "tokens_per_verification": ratio,
        "standard_error": error,
    }
    expected = [ExpectedCalls.from_lists(run.expected) for run in runs if run.expected is not None]
    return fields | (list(accumulate(expected))[-1].fields() if expected else {})


def _per_verification(runs: Sequence[Run]) -> tuple[float | None, float | None]:
    """Return the tokens of a verification, as a ratio of sums, and its standard error over outputs."""
    counted = []
    for run in runs:
        verified = [len(counts) for counts in run.accepted] or [calls - 1 for calls in run.calls]
        counted += [(len(ids) - 1.0, float(calls)) for ids, calls in zip(run.ids, verified) if calls]
    return ratio_of_sums(*torch.tensor(counted, dtype=torch.float64).T) if counted else (None, None)


def _times(runs: Sequence[Run]) -> dict[str, Any]:
    """Return medians: of a call after the prompt's, of its drafting, and of the prompt's."""
    long = [run for run in runs if run.forwards > 1]
    drafting = [1000 * run.draft_seconds / (run.forwards - 1) for run in long if run.draft_seconds is not None]
    calls = [1000 * (run.seconds - run.prompt_seconds) / (run.forwards - 1) for run in long]
    return {
        "call_ms": median(calls) if calls else None,
        "draft_ms": median(drafting) if drafting and max(drafting) else None,
        "prompt_ms": median(1000 * run.prompt_seconds for run in runs) or None,
    }


def _speeds(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return quartiles of ratios, the ratio of sums, and medians by category, of pairs that do not loop."""
    timed = [pair for pair in pairs if pair.ratio is not None]
    ratios, whole = (
        [r for pair in pairs if (r := getattr(pair, name)) is not None] for name in ("ratio", "whole_ratio")
    )
    micro = [_micro([getattr(pair, name) for pair in timed]) for name in ("run", "plain") if timed]
    categories = dict.fromkeys(pair.category for pair in pairs)
    by_category = {each: [pair for pair in pairs if pair.category == each] for each in categories}
    speeds = {name: [pair.ratio for pair in part if pair.ratio is not None] for name, part in by_category.items()}
    calls = {name: _per_verification([pair.run for pair in part])[0] for name, part in by_category.items()}
    return {
        "speed_ups": _quartiles(ratios),
        "whole_speed_ups": _quartiles(whole),
        "micro_speed_up": micro[0] / micro[1] if timed else None,
        "category_speed_ups": {name: median(values) for name, values in speeds.items() if values},
        "category_tokens_per_call": {name: count for name, count in calls.items() if count},
    }


def _quartiles(ratios: list[float]) -> list[float]:
    return quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3


def _micro(runs: Sequence[Run]) -> float:
    """Return tokens per second after the prompts' own calls, as a ratio of sums."""
    later = sum(run.new_tokens - len(run.ids) for run in runs)
    return later / sum(run.seconds - run.prompt_seconds for run in runs)


def _differences(runs: Sequence[Run], error: float) -> dict[str, Any]:
    """Return how many outputs differ from plain decoding's, and how many of these are near-ties."""
    compared = [each for run in runs for each in run.differences]
    different = [each for each in compared if each is not None]
    if not compared:
        return {}
    return {
        "identical": not different,
        "texts": len(compared),
        "differing": len(different),
        "near_ties": sum(is_near_tie(each, error) for each in different),
    }


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
    for line in bench.lines:
        if (line.method, line.mode) == (method, mode.name) and line.run.error is None:
            accepted = line.run.accepted or [[]] * len(line.run.ids)
            for name, ids, counts in zip(line.prompts, line.run.ids, accepted):
                yield Completion(bench.prompts[name].turns[line.turn], ids, drafted_flags(counts, len(ids)))
