"""One call of `generate`: ways of decoding, methods, and what a call took and wrote."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

import torch

from ...configuration.cache_names import cache_of
from ...configuration.ptp import SAMPLING
from ...generation.call.options import first_set
from ...generation.tensors.wrapped_models import Kwargs
from ..utils import eos_ids, until_end
from .drafts import has_probs, usual_drafts
from .expected import GREEDY_RULE, SAMPLED

REPEATED_GRAM = 16
"""Ids of a passage that counts as repeated if it occurs in a sequence twice."""
_FREE = ("verification", "num_assistant_tokens", "assistant_model", "use_mtp")
"""Options that do not change the output."""
_CHANGES = {"repetition_penalty", "no_repeat_ngram_size", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
            "bad_words_ids", "suppress_tokens", "sequence_bias", "min_length", "min_new_tokens",
            "num_assistant_tokens_schedule", "assistant_confidence_threshold"}  # fmt: skip


@dataclass(frozen=True)
class DecodingMode:
    """A way of decoding: its name in tables, and keyword arguments of `generate`."""

    name: str
    options: Kwargs

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
        """How drafts are verified, where expected calls along an output can be computed; None elsewhere."""
        rule = self.options.get("verification", SAMPLED[0]) if self.is_sampled else GREEDY_RULE[0]
        rest = {name: value for name, value in self.options.items() if name not in _FREE}
        plain = sampled(self.temperature) if self.is_sampled else GREEDY
        return rule if rest == plain.options and rule in (*SAMPLED, *GREEDY_RULE) else None

    @classmethod
    def named(cls, words: str) -> DecodingMode:
        """Return `"greedy"`, or the samples of `"T=0.7"`.

        Raises:
            ValueError: Neither.
        """
        match = re.fullmatch(r"T=(\d+(?:\.\d+)?)", words)
        if words != "greedy" and (match is None or float(match[1]) == 0):
            raise ValueError(f"decoding={words!r} must be 'greedy', or a temperature above 0 such as 'T=0.7'")
        return sampled(float(match[1])) if match else GREEDY


def sampled(temperature: float) -> DecodingMode:
    """Return sampling from the whole distribution, whatever a model's own defaults are (transformers': `top_k=50`)."""
    options = {"do_sample": True} | SAMPLING | {"temperature": float(temperature)}
    return DecodingMode(f"sampled, T={temperature:g}", options)


GREEDY = DecodingMode("greedy", {"do_sample": False})
"""The most probable token at every position."""
MODES = (GREEDY, sampled(0.7), sampled(1.0))
"""The ways of decoding in every report."""


@dataclass(frozen=True)
class Method:
    """A model whose `generate` is called with `options`, and the drafter, where this library drafts.

    `is_foreign`: transformers' own `generate` is called, past attached drafters. `source`: what drafts, as
    `source_mark` says it.
    """

    name: str
    model: Any
    options: Kwargs = field(default_factory=dict)
    drafter: Any = None
    is_foreign: bool = False
    source: str | None = None

    def generate(self, **kwargs: Any) -> Any:
        """Call `generate` with the method's options."""
        call = type(self.model).generate.__get__(self.model) if self.is_foreign else self.model.generate
        return call(**self.options | kwargs, return_dict_in_generate=True)

    def expectation(self, mode: DecodingMode) -> tuple[str, int] | None:
        """Return the rule and the draft length of expected calls along an output; None where they are unknown."""
        config = self.model.generation_config
        rule = DecodingMode(mode.name, mode.options | self.options).rule
        if rule is None or config.to_diff_dict().keys() & _CHANGES or not has_probs(self.drafter):
            return None
        length = first_set("num_assistant_tokens", (self.options, config))
        bound = self.drafter.longest_draft()
        return rule, usual_drafts(self.drafter) if length is None else min(length, bound or length)


@dataclass(frozen=True)
class Run:
    """What a method took, and wrote after the prompts of one call of `generate`.

    Attributes:
        ids: New ids of each sequence.
        calls: Calls of the backbone that served each sequence, that of the prompt included.
        forwards: Calls of the backbone in total.
        seconds: Wall-clock seconds.
        prompt_seconds: Those of the prompt's own call.
        draft_seconds: Those of drafting; None where they were not measured.
        processor_seconds: Of all threads.
        cache_bytes: Of the cache at the end.
        accepted: Accepted drafts of every verification of each sequence; empty where they were not counted.
        drafted: Drafted tokens of each of them.
        differences: Of greedy outputs: the difference from plain decoding's in each, None where they are equal.
        expected: Expected calls along the outputs (`ExpectedCalls`), as lists.
        error: Why there is no output.
    """

    ids: list[list[int]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    forwards: int = 0
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    draft_seconds: float | None = None
    processor_seconds: float = 0.0
    cache_bytes: int = 0
    accepted: list[list[int]] = field(default_factory=list)
    drafted: list[list[int]] = field(default_factory=list)
    differences: list[Kwargs | None] = field(default_factory=list)
    expected: Kwargs | None = None
    error: str | None = None

    @property
    def new_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(map(len, self.ids))

    @property
    def speed(self) -> float | None:
        """Tokens per second after the prompt's own call, which adds one to each sequence; None if there are none."""
        later, seconds = self.new_tokens - len(self.ids), self.seconds - self.prompt_seconds
        return later / seconds if later > 0 and seconds > 0 else None

    @cached_property
    def repeated_share(self) -> float:
        """Mean share of the outputs that repeats itself."""
        return sum(map(repeated_share, self.ids)) / max(1, len(self.ids))


def decode(
    method: Method, batch: dict[str, torch.Tensor], mode: DecodingMode, new_tokens: int, seed: int | None = None
) -> Run:
    """Return the output of a method after a batch of prompts, and its cost; `seed=None` keeps the generator's state."""
    if seed is not None:
        torch.manual_seed(seed)
    with _Clock(method.model) as clock:
        output = method.generate(**batch, **mode.options, max_new_tokens=new_tokens)
    ends = eos_ids(method.model)
    ids = [until_end(new, ends) for new in output.sequences[:, batch["input_ids"].shape[1] :].tolist()]
    speculation = getattr(output, "speculation", None)
    longest = max(map(len, ids))
    run = {
        "ids": ids,
        "forwards": clock.calls if speculation is None else speculation.backbone_calls,
        "calls": [clock.calls if clock.calls < longest else len(each) for each in ids],
        "seconds": clock.seconds,
        "prompt_seconds": clock.prompt_seconds,
        "processor_seconds": clock.processor_seconds,
        "cache_bytes": cache_bytes(cache_of(output)),
    }
    if speculation is not None:
        accepted, calls = speculation.rows_accepted, speculation.rows_calls
        drafted = [list(map(len, drafts)) for drafts in speculation.rows_drafts]
        run |= {"calls": calls, "accepted": accepted, "drafted": drafted, "draft_seconds": speculation.draft_seconds}
    return Run(**run)


class _Clock:
    """Takes the time of a call of `generate` and of its first forward, and counts forwards."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls, self.prompt_seconds = model, 0, 0.0
        self.wait: Callable[[], None] = torch.accelerator.synchronize if model.device.type != "cpu" else lambda: None

    def __enter__(self) -> _Clock:
        self.hooks = [
            self.model.register_forward_pre_hook(self._begin, prepend=True),
            self.model.register_forward_hook(self._end),
        ]
        self.wait()
        self.started, self.processor = time.perf_counter(), time.process_time()
        return self

    def _begin(self, *_: object) -> None:
        self.calls += 1
        if self.calls == 1:
            self.forward_started = time.perf_counter()

    def _end(self, *_: object) -> None:
        if self.calls == 1:
            self.wait()
            self.prompt_seconds = time.perf_counter() - self.forward_started

    def __exit__(self, *_: object) -> None:
        self.wait()
        self.seconds = time.perf_counter() - self.started
        self.processor_seconds = time.process_time() - self.processor
        for hook in self.hooks:
            hook.remove()


def cache_bytes(cache: object) -> int:
    """Return the bytes of the tensors in the layers of a cache."""
    tensors = [each for layer in getattr(cache, "layers", ()) for each in vars(layer).values()]
    storages = [each.untyped_storage() for each in tensors if isinstance(each, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


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


def acceptance_by_position(accepted: Sequence[int], length: int) -> list[float]:
    """Return, for draft positions 1 .. length, the share of all verifications that accept so many drafts."""
    return [sum(count >= position for count in accepted) / len(accepted) for position in range(1, length + 1)]


def repeated_share(ids: Sequence[int], gram: int = REPEATED_GRAM) -> float:
    """Return the share of a sequence that repeated passages of `gram` ids and short loops cover.

    A loop is a passage of less than `gram` ids that is followed by itself, so often that it fills a passage, or all of
    a sequence that is shorter.
    """
    starts_of: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - gram + 1):
        starts_of.setdefault(tuple(ids[start : start + gram]), []).append(start)
    covered = {start + i for starts in starts_of.values() if len(starts) > 1 for start in starts for i in range(gram)}
    for period in range(1, gram):
        least = max(min(gram, len(ids)), 2 * period)
        for is_same, group in groupby(range(len(ids) - period), lambda i: ids[i] == ids[i + period]):  # noqa: B023
            run = list(group)
            if is_same and len(run) + period >= least:
                covered.update(range(run[0], run[-1] + period + 1))
    return len(covered) / max(1, len(ids))
