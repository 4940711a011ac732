"""Measured results: counts and times, figures derived from them, and the circumstances.

Knows how to check, save and load results. Does not know how they are measured or shown.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import torch
import transformers

from .utils import replace_file

DEGENERATE_SHARE = 0.5
"""Share of repeated text above which a speed-up is not believed."""
UNSTABLE = 1.25
"""Ratio of plain decoding's speed to its own above which, or below whose reciprocal, no speed-up is believed."""


@dataclass(frozen=True, kw_only=True)
class DecodingResult:
    """One way of decoding, measured against one-token-at-a-time decoding of the same prompts.

    Args:
        name: What the row is called, for example `"greedy"`.
        do_sample: Whether tokens were sampled.
        backbone_calls: Calls of the backbone in the speculative run, prompt passes included, summed over the prompts
            (one prompt at a time: in a batch, one call serves several prompts).
        new_tokens: Tokens that the speculative run produced, summed over the prompts.
        seconds: Wall-clock seconds of the speculative run.
        plain_seconds: Wall-clock seconds of the plain run.
        identical: Whether both runs gave the same tokens; None if they were not compared (sampled runs).
        plain_new_tokens: Tokens that the plain run produced; None if as many as the speculative run.
        batch_size: Prompts per call. In a batch, `backbone_calls` counts a call once for every prompt that it served.
        per_prompt: Tokens per call of every prompt, for the spread; empty if not recorded.
        accepted_by_position: For draft positions 1, 2, ...: the share (0 to 1) of verifications that accept so many
            drafts, whatever the length of theirs; empty if not recorded.
        repeated_share: Share (0 to 1) of the output that repeated passages cover; None if not measured.
        draft_length: Tokens of the longest draft; None if not recorded.
        tokens_per_verification: (New tokens - 1) / verifications, a ratio of sums over prompts; None if not recorded.
        standard_error: That of `tokens_per_verification` over prompts; None of a single one.
        expected_tokens_per_call: The expected `tokens_per_verification` for drafts of `draft_length`, computed along
            the plain outputs without drawing drafts; None if not computed.
        expected_standard_error: That over outputs.
        expected_by_position: The expected `accepted_by_position`.
        processor_seconds: Processor seconds of the speculative run; None if not measured.
        plain_processor_seconds: Those of the plain run.
        method: The method that drafted, where several were measured.
        source: What drafted, as `source_mark` says it; None: nothing with a directory or a name of its own.
        decoding: The way of decoding, there.
        speed_ups: Quartiles of the ratios to plain decoding's speed, of calls by turns, without the prompts' own
            forwards and without outputs that repeat more than half of themselves.
        micro_speed_up: The same as a ratio of sums over tokens.
        plain_ratios: Of plain decoding against itself beside this row: quartiles and the ratio of sums; empty if it was
            decoded once.
        category_speed_ups: Medians by category of prompts; their mean is `macro_speed_up`.
        category_tokens_per_call: `tokens_per_verification` by category.
        whole_speed_ups: Quartiles of the ratios of whole calls, the prompts' own forwards included.
        looping: Calls whose output, or plain decoding's, repeats more than half of itself. All other figures leave them
            out, but for `repeated_share` and the comparison of texts.
        looping_share: Their share (0 to 1); where it is 1, counts and times are those of all calls.
        call_ms: Milliseconds per call after the prompt's, with drafting and verification; a median over prompts.
        draft_ms: Those of drafting.
        prompt_ms: Those of the prompt's own forward.
        cache_bytes: Of the largest cache.
        texts: Greedy outputs that were compared with plain decoding's.
        differing: How many of them differ.
        near_ties: How many differ by rounding alone.
        quality: Scores (0 to 100) of the answers by the prompts' references, by name; empty if not asked for.

    Raises:
        ValueError: A count below 1, a time that is not positive and finite, or a share outside 0 to 1.

    Example:
        >>> row = DecodingResult(name="greedy", do_sample=False, backbone_calls=50, new_tokens=200, seconds=1.0,
        ...                      plain_seconds=2.5, identical=True)
        >>> row.tokens_per_call, row.speed_up
        (4.0, 2.5)
    """

    name: str
    do_sample: bool
    backbone_calls: int
    new_tokens: int
    seconds: float
    plain_seconds: float
    identical: bool | None = None
    plain_new_tokens: int | None = None
    batch_size: int = 1
    per_prompt: list[float] = field(default_factory=list)
    accepted_by_position: list[float] = field(default_factory=list)
    repeated_share: float | None = None
    draft_length: int | None = None
    tokens_per_verification: float | None = None
    standard_error: float | None = None
    expected_tokens_per_call: float | None = None
    expected_standard_error: float | None = None
    expected_by_position: list[float] = field(default_factory=list)
    processor_seconds: float | None = None
    plain_processor_seconds: float | None = None
    method: str | None = None
    source: str | None = None
    decoding: str | None = None
    speed_ups: list[float] = field(default_factory=list)
    micro_speed_up: float | None = None
    plain_ratios: list[float] = field(default_factory=list)
    category_speed_ups: dict[str, float] = field(default_factory=dict)
    category_tokens_per_call: dict[str, float] = field(default_factory=dict)
    whole_speed_ups: list[float] = field(default_factory=list)
    looping: int | None = None
    looping_share: float | None = None
    call_ms: float | None = None
    draft_ms: float | None = None
    prompt_ms: float | None = None
    cache_bytes: int | None = None
    texts: int | None = None
    differing: int | None = None
    near_ties: int | None = None
    quality: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def tokens_per_call(self) -> float:
        """New tokens per backbone call; plain decoding has 1."""
        return self.new_tokens / self.backbone_calls

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the speculative run."""
        return self.new_tokens / self.seconds

    @property
    def plain_tokens_per_second(self) -> float:
        """New tokens per second of the plain run."""
        return (self.plain_new_tokens or self.new_tokens) / self.plain_seconds

    @property
    def speed_up(self) -> float:
        """Median ratio of the two speeds, or, where ratios were not recorded, that of the sums in tokens per second."""
        if self.speed_ups:
            return self.speed_ups[1]
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def macro_speed_up(self) -> float | None:
        """Mean over categories of their median speed-ups; None if they were not recorded."""
        return fmean(self.category_speed_ups.values()) if self.category_speed_ups else None

    @property
    def is_lossless(self) -> bool:
        """Whether no output differs from plain decoding's but by rounding."""
        return self.identical is not False or (self.differing is not None and self.differing == self.near_ties)

    @property
    def sameness(self) -> str:
        """What a card says of the outputs beside plain decoding's."""
        if self.identical is None:
            return "not compared"
        if self.identical or not self.is_lossless:
            return "yes" if self.identical else "**no**"
        assert self.texts is not None and self.differing is not None
        return f"{self.texts - self.differing} of {self.texts}, the rest near-ties"

    @property
    def reached_by_position(self) -> list[float]:
        """`accepted_by_position` up to the last position that was reached: a tree has more nodes than its paths."""
        shares = self.accepted_by_position
        return shares[: max((number for number, share in enumerate(shares, 1) if share), default=len(shares))]

    @property
    def processor_speed_up(self) -> float | None:
        """The same ratio by processor time, which other programs disturb less; None if that was not measured."""
        if self.processor_seconds is None or self.plain_processor_seconds is None:
            return None
        plain_tokens = self.plain_new_tokens or self.new_tokens
        return self.plain_processor_seconds / plain_tokens * self.new_tokens / self.processor_seconds

    @property
    def spread(self) -> tuple[float, float] | None:
        """Fewest and most tokens per call among the prompts; None if they were not recorded."""
        return (min(self.per_prompt), max(self.per_prompt)) if self.per_prompt else None

    @property
    def is_degenerate(self) -> bool:
        """Whether more than half of the output repeats itself: then no card claims its speed-up."""
        return self.repeated_share is not None and self.repeated_share > DEGENERATE_SHARE

    @property
    def only_loops(self) -> bool:
        """Whether no figure of drafts or speed means anything, for the output repeats itself."""
        return self.is_degenerate or self.looping_share == 1

    @property
    def is_unstable(self) -> bool:
        """Whether plain decoding ran faster or slower than itself by more than `UNSTABLE`."""
        return any(not 1 / UNSTABLE <= ratio <= UNSTABLE for ratio in self.plain_ratios)

    @property
    def claims_speed(self) -> bool:
        """Whether a speed-up is believed: the text does not repeat itself, and the machine was steady."""
        return not (self.only_loops or self.is_unstable)


@dataclass(frozen=True, kw_only=True)
class MeasuredResults:
    """All results of one measuring run, with all that is needed to repeat it.

    Args:
        results: One entry per way of decoding, at least one.
        dataset_name: Short name of the text that was completed.
        dataset_description: What that text is, how many prompts, how long.
        hardware: The machine, in words.
        dtype: The dtype of the weights during the run, for example `"float32"`.
        command: The command that repeats the run.
        library_version: The version of tokenahead that ran.
        unit: What one token is, in the singular.
        accepted_by_position: As that of a result, for files of one way of decoding.
        bits_per_byte: Cross-entropy of the next-token head on held-out text, in bits per byte of text.
        extra: Further facts to show, by name.
        environment: Versions of torch, transformers and Python, the processor, threads and load of the machine, by
            name (`training.evaluation.environment()`).
        not_measured: Methods that a setting does not have, and why.

    Raises:
        ValueError: An empty text, an empty `results`, a share outside 0 to 1, a number that is not finite.
    """

    results: list[DecodingResult]
    dataset_name: str
    dataset_description: str
    hardware: str
    dtype: str
    command: str
    library_version: str
    unit: str = "byte"
    accepted_by_position: list[float] = field(default_factory=list)
    bits_per_byte: float | None = None
    extra: dict[str, str | int | float] = field(default_factory=dict)
    environment: dict[str, str | int | float] = field(default_factory=dict)
    not_measured: dict[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)
        if not self.results or len({row.name for row in self.results}) < len(self.results):
            raise ValueError(f"results={self.results!r} must be at least one row, whose names occur once")

    def to_json(self, path: str | Path) -> Path:
        """Save the measured values (not the derived ones) as JSON, atomically; return the path."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False, allow_nan=False)
        return replace_file(path, text + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> MeasuredResults:
        """Load a file of `to_json`.

        Raises:
            ValueError: The file is not JSON, or a field is missing, unknown or out of range.
        """
        path = Path(path)
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not a JSON file: {error}") from error
        try:
            return cls(**fields | {"results": [DecodingResult(**row) for row in fields["results"]]})
        except (ValueError, TypeError, KeyError) as error:  # a field that is missing, unknown or out of range
            raise ValueError(f"{path} holds no results: {error}") from error


_ENDS = 2**20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def source_mark(source: str | Path) -> str:
    """Return what identifies a model or drafter that was measured: its name on the Hub, or its directory's name and a
    digest of the weights there, for which the ends of their files suffice.
    """
    directory = Path(source)
    if not directory.is_dir():
        return str(source)
    digest = hashlib.sha256()
    for file in sorted(each for each in directory.iterdir() if each.suffix in _WEIGHTS):
        with file.open("rb") as stream:
            digest.update(stream.read(_ENDS))
            stream.seek(max(0, file.stat().st_size - _ENDS))
            digest.update(stream.read(_ENDS))
    return f"{directory.resolve().name} {digest.hexdigest()[:16]}"


def environment() -> dict[str, str | int | float]:
    """Return versions, processor, cores, threads, and the load average of the last minute, by name."""
    facts: dict[str, str | int | float] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    with suppress(AttributeError, OSError):  # not on every system
        facts["load average, 1 min"] = round(os.getloadavg()[0], 2)
    return facts


def hardware() -> str:
    """Return the processor and the number of threads, in words."""
    count = torch.get_num_threads()
    return f"{processor()}, {count} thread{'s' * (count > 1)}"


def processor() -> str:
    """Return the processor's name, or at least its architecture."""
    with suppress(OSError, StopIteration), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    return platform.processor() or platform.machine() or "unknown processor"


_NUMBER = int, float
_TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "bool": bool,
    "int": int,
    "float": _NUMBER,
    "list[float]": _NUMBER,
    "dict[str, float]": _NUMBER,
    "dict[str, str | int | float]": (str, *_NUMBER),
    "list[DecodingResult]": DecodingResult,
}
"""By the annotation of a field: the types of its value, or of the items of its value."""
_SHARES = {"accepted_by_position", "expected_by_position", "repeated_share", "looping_share"}
_ABOVE_0 = {"backbone_calls", "new_tokens", "plain_new_tokens", "batch_size", "seconds", "plain_seconds"}
_ABOVE_0 |= {"processor_seconds", "plain_processor_seconds"}


def _check(record: DecodingResult | MeasuredResults) -> None:
    """Refuse values of another type than their field's, numbers out of range, and empty texts."""
    for entry in dataclasses.fields(record):
        name, value = entry.name, vars(record)[entry.name]
        if value is None and entry.default is None:
            continue
        hint, items = str(entry.type).removesuffix(" | None"), [value]
        if hint.startswith("list"):
            items = value if isinstance(value, list) else [None]
        elif hint.startswith("dict"):
            items = list(value.values()) if isinstance(value, dict) else [None]
        if not all(isinstance(each, _TYPES[hint]) and _is_in_range(name, each) for each in items):
            limits = " from 0 to 1" * (name in _SHARES) + " above 0" * (name in _ABOVE_0)
            raise ValueError(f"{name}={value!r} must be {hint}{limits}: finite, of at least 0, and no empty text")


def _is_in_range(name: str, value: object) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    if not isinstance(value, _NUMBER):
        return True
    return 0 <= value < math.inf and (value <= 1 or name not in _SHARES) and (value > 0 or name not in _ABOVE_0)
