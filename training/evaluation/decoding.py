"""Decoding with and without drafts, compared on the same prompts, in turn, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import mean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..results import DecodingResult
from .drafts import DraftMeasures, has_probs, text_of
from .expected import GREEDY_RULE, SAMPLED, ratio_of_sums

REPEATED_GRAM = 16
"""Ids of a passage that counts as repeated if it stands in a text twice."""
_FREE = ("verification", "num_assistant_tokens")  # options that leave what is written as it is
_CHANGES = {"repetition_penalty", "no_repeat_ngram_size", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
            "bad_words_ids", "suppress_tokens", "sequence_bias", "min_length", "min_new_tokens",
            "num_assistant_tokens_schedule", "assistant_confidence_threshold"}  # fmt: skip
_WARM_UP = 8  # tokens of a first call that is not measured, because it also sets things up


@dataclass(frozen=True)
class DecodingMode:
    """A way of decoding.

    Attributes:
        name: What the table calls it.
        options: Keyword arguments of `generate`.
    """

    name: str
    options: dict[str, Any]

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are sampled; two runs then have the same distribution, not the same tokens."""
        return bool(self.options.get("do_sample"))

    @property
    def temperature(self) -> float:
        """Temperature of the samples; 0 for greedy decoding."""
        return float(self.options.get("temperature", 1.0)) if self.is_sampled else 0.0

    @property
    def rule(self) -> str | None:
        """How drafts are verified, where the calls that this takes can be expected along a text; None elsewhere."""
        rule = self.options.get("verification", SAMPLED[0]) if self.is_sampled else GREEDY_RULE[0]
        rest = {name: value for name, value in self.options.items() if name not in _FREE}
        plain = sampled(self.temperature) if self.is_sampled else GREEDY
        return rule if rest == plain.options and rule in (*SAMPLED, *GREEDY_RULE) else None


def sampled(temperature: float) -> DecodingMode:
    """Return sampling from the whole distribution, whatever a model's own defaults are (transformers': `top_k=50`)."""
    options = {"do_sample": True, "temperature": float(temperature), "top_k": 0, "top_p": 1.0}
    return DecodingMode(f"sampled, T={temperature:g}", options)


GREEDY = DecodingMode("greedy", {"do_sample": False})
"""The most probable token at every position."""
MODES = (GREEDY, sampled(0.7), sampled(1.0))
"""The ways of decoding in every report."""


@dataclass(frozen=True)
class Completion:
    """The text that a model wrote after a prompt.

    Attributes:
        prompt: The prompt.
        ids: New ids.
        drafted: For each new id, whether it was drafted and accepted; else the verifier added it.
        difference: Where speculative and plain greedy ids differ, in words; None if they do not, or were not compared.
    """

    prompt: str
    ids: list[int]
    drafted: list[bool]
    difference: str | None = None


@dataclass(frozen=True)
class Comparison:
    """A way of decoding, measured with and without drafts on the same prompts.

    Attributes:
        mode: The way of decoding.
        result: Counts and times.
        completions: The speculative runs, one per prompt.
    """

    mode: DecodingMode
    result: DecodingResult
    completions: list[Completion]


@dataclass(frozen=True)
class Measurement:
    """Prompts to decode, and limits.

    Attributes:
        prompts: Texts to complete.
        new_tokens: Tokens per completion, at most.
        batch_size: Prompts per call.
        seconds: Time limit: no round of prompts is started that would end later; the first round is always run. None:
            all prompts.
        seed: Seed of the sampled runs.
    """

    prompts: Sequence[str]
    new_tokens: int
    batch_size: int = 1
    seconds: float | None = None
    seed: int = 0

    def compare(
        self,
        drafters: dict[str, PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        modes: Sequence[DecodingMode],
        on_round: Callable[[int], None] = lambda done: None,
    ) -> dict[str, list[Comparison]]:
        """Decode plainly and with every drafter, in turn, so that a busy machine slows all of them alike.

        A round decodes the next `batch_size` prompts in all ways, so that every way has the same prompts when the time
        is over.

        Args:
            drafters: Models with one backbone, by name; the first also decodes plainly.
            tokenizer: Their tokenizer.
            modes: Ways of decoding.
            on_round: Called after every round with the number of finished prompts.

        Returns:
            For every drafter, a comparison per way of decoding.

        Raises:
            ValueError: No prompts or no drafters.
        """
        if not drafters or not self.prompts:
            raise ValueError(f"{len(drafters)} drafters and {len(self.prompts)} prompts: give at least one of each")
        plain = {mode.name: _Runs() for mode in modes}
        drafted = {(name, mode.name): _Runs() for name in drafters for mode in modes}
        first, started, longest = next(iter(drafters.values())), time.monotonic(), 0.0
        self._warm_up(drafters, tokenizer, modes)
        for start in range(0, len(self.prompts), self.batch_size):
            spent = time.monotonic() - started
            if start and self.seconds is not None and spent + longest > self.seconds:
                break
            for mode in modes:
                self._take(plain[mode.name], first, tokenizer, mode, start, use_mtp=False)
                for name, model in drafters.items():
                    self._take(drafted[name, mode.name], model, tokenizer, mode, start, use_mtp=None)
            longest = max(longest, time.monotonic() - started - spent)
            on_round(min(start + self.batch_size, len(self.prompts)))
        return {
            name: [
                self._comparison(model, tokenizer, mode, plain[mode.name], drafted[name, mode.name]) for mode in modes
            ]
            for name, model in drafters.items()
        }

    def _warm_up(
        self, drafters: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase, modes: Sequence[DecodingMode]
    ) -> None:
        short = replace(self, new_tokens=min(_WARM_UP, self.new_tokens))
        for mode in modes:
            for model in drafters.values():
                short._take(_Runs(), model, tokenizer, mode, 0, use_mtp=None)

    def _take(
        self,
        runs: _Runs,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        mode: DecodingMode,
        start: int,
        use_mtp: bool | None,
    ) -> None:
        torch.manual_seed(self.seed + start)
        prompts = list(self.prompts[start : start + self.batch_size])
        runs.add(_complete(model, tokenizer, prompts, mode, self.new_tokens, use_mtp=use_mtp))

    def _comparison(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mode: DecodingMode, plain: _Runs, runs: _Runs
    ) -> Comparison:
        completions = []
        for prompt, expected, row in zip(self.prompts, plain.rows, runs.rows):
            difference = None if mode.is_sampled else _difference(model, tokenizer, prompt, expected.ids, row.ids)
            completions.append(Completion(prompt, row.ids, drafted_flags(row.accepted, len(row.ids)), difference))
        accepted = [count for row in runs.rows for count in row.accepted]
        length = max((drafted for row in runs.rows for drafted in row.drafted), default=0)
        counted = [(len(row.ids) - 1.0, float(len(row.accepted))) for row in runs.rows if row.accepted]
        ratio, error = ratio_of_sums(*torch.tensor(counted, dtype=torch.float64).T) if counted else (None, None)
        result = DecodingResult(
            name=mode.name if self.batch_size == 1 else f"{mode.name}, batch {self.batch_size}",
            do_sample=mode.is_sampled,
            backbone_calls=sum(row.calls for row in runs.rows),
            new_tokens=runs.new_tokens,
            seconds=runs.seconds,
            plain_seconds=plain.seconds,
            identical=None if mode.is_sampled else all(completion.difference is None for completion in completions),
            plain_new_tokens=plain.new_tokens,
            batch_size=self.batch_size,
            per_prompt=[round(len(row.ids) / row.calls, 4) for row in runs.rows],
            accepted_by_position=acceptance_by_position(accepted, length),
            repeated_share=mean(repeated_share(row.ids) for row in runs.rows),
            draft_length=length or None,
            tokens_per_verification=ratio or None,
            standard_error=error,
            processor_seconds=runs.processor_seconds,
            plain_processor_seconds=plain.processor_seconds,
            **self._expected(model, tokenizer, mode, plain.rows, length),
        )
        return Comparison(mode, result, completions)

    def _expected(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, mode: DecodingMode, rows: Sequence[_Row], length: int
    ) -> dict[str, Any]:
        """Return what drafts of this length are expected to take along the plain texts; empty where nobody can tell."""
        drafter, rule = vars(model).get("drafter", model), mode.rule
        changed = model.generation_config.to_diff_dict().keys() & _CHANGES
        if rule is None or changed or not length or not has_probs(drafter):
            return {}
        measures = DraftMeasures(mode.temperature, length)
        for prompt, row in zip(self.prompts, rows):
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
            measures.add(drafter, text_of(ids, ids.new_tensor([row.ids])))
        return measures.calls[rule].fields() if rule in measures.calls else {}


def compare_decoding(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    mode: DecodingMode,
    new_tokens: int,
    seed: int = 0,
) -> Comparison:
    """Complete every prompt plainly and speculatively, in turn: `Measurement.compare` of one model and one way.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        prompts: Texts to complete.
        mode: Way of decoding.
        new_tokens: Tokens per completion, at most.
        seed: Seed of the sampled runs.

    Returns:
        Counts, times and texts.
    """
    return Measurement(prompts, new_tokens, seed=seed).compare({"it": model}, tokenizer, [mode])["it"][0]


def drafted_flags(accepted: list[int], count: int) -> list[bool]:
    """Return which of `count` new tokens were drafted and accepted.

    The prefill adds one token; each verification then gives its accepted drafts and one token of the verifier's own.
    The last verification may have been cut short.

    Example:
        >>> drafted_flags([2, 0], 5)
        [False, True, True, False, False]
    """
    flags = [False]
    for drafts in accepted:
        flags += [True] * drafts + [False]
    return flags[:count]


@dataclass(frozen=True)
class _Row:
    """The result of a call of `generate` for one prompt."""

    ids: list[int]
    accepted: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    calls: int = 1


@dataclass(frozen=True)
class _Run:
    """A call of `generate`, and its times."""

    rows: list[_Row]
    seconds: float
    processor_seconds: float


class _Runs:
    """All calls of a way of decoding."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.seconds = self.processor_seconds = 0.0

    def add(self, run: _Run) -> None:
        self.rows += run.rows
        self.seconds += run.seconds
        self.processor_seconds += run.processor_seconds

    @property
    def new_tokens(self) -> int:
        return sum(len(row.ids) for row in self.rows)


def _complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    mode: DecodingMode,
    new_tokens: int,
    use_mtp: bool | None = None,
) -> _Run:
    many = {"padding": True, "padding_side": "left"} if len(prompts) > 1 else {}
    inputs = tokenizer(prompts, return_tensors="pt", **many).to(model.device)
    wall, cpu = time.perf_counter(), time.process_time()
    output = model.generate(
        **inputs, **mode.options, max_new_tokens=new_tokens, use_mtp=use_mtp, return_dict_in_generate=True
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    texts = [_until_end(ids, model) for ids in output.sequences[:, inputs["input_ids"].shape[1] :].tolist()]
    return _Run(_rows(texts, getattr(output, "speculation", None)), wall, cpu)


def _rows(texts: list[list[int]], speculation: Any) -> list[_Row]:
    if speculation is None:
        return [_Row(ids, calls=max(1, len(ids))) for ids in texts]
    if len(texts) == 1:  # the loop's own count of calls, which plain steps between drafts are in, too
        accepted, drafts = speculation.rows_accepted[0], speculation.rows_drafts[0]
        return [_Row(texts[0], list(accepted), list(map(len, drafts)), speculation.backbone_calls)]
    pairs = zip(texts, speculation.rows_accepted, speculation.rows_drafts)
    return [_Row(ids, list(accepted), list(map(len, drafts)), 1 + len(accepted)) for ids, accepted, drafts in pairs]


def _until_end(ids: list[int], model: PreTrainedModel) -> list[int]:
    """Return a sequence's new ids without the padding after its end."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    return ids[: next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))]


def _difference(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, expected: list[int], got: list[int]
) -> str | None:
    """Return where two greedy runs differ, and the gap of the two logits there; None if they are equal."""
    if expected == got:
        return None
    pairs = enumerate(zip(expected, got))
    index = next((i for i, (one, other) in pairs if one != other), min(len(expected), len(got)))
    if index >= min(len(expected), len(got)):
        return f"one ended after {index} tokens, the other continued"
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    scores = model.generate(
        **inputs,
        **GREEDY.options,
        max_new_tokens=index + 1,
        use_mtp=False,
        output_logits=True,
        return_dict_in_generate=True,
    ).logits[index][0]
    gap = float(scores[expected[index]] - scores[got[index]])
    return f"token {index + 1} is {got[index]} and not {expected[index]}, whose logit is higher by {gap:.2g}"


def acceptance_by_position(accepted: Sequence[int], length: int) -> list[float]:
    """Return, for draft positions 1 .. length, the share of all verifications that accept so many drafts."""
    return [sum(count >= position for count in accepted) / len(accepted) for position in range(1, length + 1)]


def repeated_share(ids: Sequence[int], gram: int = REPEATED_GRAM) -> float:
    """Return the share of a text that passages of `gram` ids cover which occur in it more than once, and short loops.

    A loop is a passage of less than `gram` ids that is followed by itself, so often that it fills a passage, or all of
    a text that is shorter.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - gram + 1):
        found.setdefault(tuple(ids[start : start + gram]), []).append(start)
    covered = {start + i for starts in found.values() if len(starts) > 1 for start in starts for i in range(gram)}
    for period in range(1, gram):
        least = max(min(gram, len(ids)), 2 * period)
        for is_same, group in groupby(range(len(ids) - period), lambda i: ids[i] == ids[i + period]):  # noqa: B023
            run = list(group)
            if is_same and len(run) + period >= least:
                covered.update(range(run[0], run[-1] + period + 1))
    return len(covered) / max(1, len(ids))
