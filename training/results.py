"""Measured results: counts and times, figures derived from them, and the circumstances."""

# no `from __future__ import annotations`: @strict checks field types only where annotations are real types
import hashlib
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import torch
import transformers
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError

from .utils import replace_file

DEGENERATE_SHARE = 0.5
"""Share of repeated text above which a speed-up is not believed."""
UNSTABLE = 1.25
"""Ratio of plain decoding's speed to its own above which, or below whose reciprocal, no speed-up is believed."""
Number = int | float


@strict
@dataclass(kw_only=True)
class DecodingResult:
    """One way of decoding, measured against one-token-at-a-time decoding of the same prompts.

    None, and what is empty, was not measured. Shares lie in 0 to 1. Texts that loop, with drafts or without, are in no
    figure but `repeated_share` and the comparison of texts; where all do, counts and times are those of all.
    """

    name: str
    do_sample: bool  # whether tokens were sampled
    backbone_calls: int  # those of prompts included, counted once for every prompt that they served
    new_tokens: int  # of all prompts
    seconds: Number  # wall-clock time
    plain_seconds: Number  # of plain decoding
    identical: bool | None = None  # whether both gave the same tokens; None: not compared
    plain_new_tokens: int | None = None  # None: as many
    batch_size: int = 1  # prompts per call
    per_prompt: list[Number] = field(default_factory=list)  # tokens per call of every prompt
    accepted_by_position: list[Number] = field(default_factory=list)  # shares that accept 1, 2, ... drafts
    repeated_share: Number | None = None  # of the output, covered by repeated passages
    draft_length: int | None = None  # tokens of the longest draft
    tokens_per_verification: Number | None = None  # (new tokens - 1) / verifications, a ratio of sums over prompts
    standard_error: Number | None = None  # its own, over prompts
    expected_tokens_per_call: Number | None = None  # the same three, computed along the plain outputs without drafts
    expected_standard_error: Number | None = None
    expected_by_position: list[Number] = field(default_factory=list)
    processor_seconds: Number | None = None
    plain_processor_seconds: Number | None = None
    method: str | None = None  # what drafted, and the `source_mark` of its weights
    source: str | None = None
    decoding: str | None = None  # the way of decoding
    speed_ups: list[Number] = field(default_factory=list)  # quartiles, without the prompts' own calls
    micro_speed_up: Number | None = None  # the same as a ratio of sums over tokens
    plain_ratios: list[Number] = field(default_factory=list)  # of plain decoding to itself: quartiles, and of sums
    category_speed_ups: dict[str, Number] = field(default_factory=dict)  # medians by category of prompts
    category_tokens_per_call: dict[str, Number] = field(default_factory=dict)  # tokens per verification
    whole_speed_ups: list[Number] = field(default_factory=list)  # quartiles of whole calls, the prompts' own included
    looping: int | None = None  # calls whose output, or plain decoding's, repeats more than half of itself
    looping_share: Number | None = None
    call_ms: Number | None = None  # medians: of a call after the prompt's, of its drafts, of the prompt's own
    draft_ms: Number | None = None
    prompt_ms: Number | None = None
    cache_bytes: int | None = None  # of the largest cache
    texts: int | None = None  # greedy outputs that were compared, that differ, and that do so by rounding alone
    differing: int | None = None
    near_ties: int | None = None
    quality: dict[str, Number] = field(default_factory=dict)  # scores (0 to 100) of answers by their references

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
        return self.speed_ups[1] if self.speed_ups else self.tokens_per_second / self.plain_tokens_per_second

    @property
    def is_lossless(self) -> bool:
        """Whether no output differs from plain decoding's but by rounding."""
        return self.identical is not False or (self.differing is not None and self.differing == self.near_ties)

    @property
    def reached_by_position(self) -> list[Number]:
        """`accepted_by_position` up to the last position that was reached: a tree has more nodes than its paths."""
        shares = self.accepted_by_position
        return shares[: max((number for number, share in enumerate(shares, 1) if share), default=len(shares))]

    @property
    def only_loops(self) -> bool:
        """Whether no figure of drafts or speed means anything, for more than half of the output repeats itself."""
        return (self.repeated_share or 0) > DEGENERATE_SHARE or self.looping_share == 1

    @property
    def is_unstable(self) -> bool:
        """Whether plain decoding ran faster or slower than itself by more than `UNSTABLE`."""
        return any(not 1 / UNSTABLE <= ratio <= UNSTABLE for ratio in self.plain_ratios)

    @property
    def claims_speed(self) -> bool:
        """Whether a speed-up is believed: the text does not repeat itself, and the machine was steady."""
        return not (self.only_loops or self.is_unstable)


Facts = dict[str, str | int | float]


@strict
@dataclass(kw_only=True)
class MeasuredResults:
    """All results of one measuring run, with all that is needed to repeat it."""

    results: list[DecodingResult]  # one entry per way of decoding
    dataset_name: str  # short name of the text that was completed
    dataset_description: str  # what that text is, how many prompts, how long
    hardware: str  # the machine, in words
    dtype: str  # of the weights during the run, for example "float32"
    command: str  # repeats the run
    library_version: str  # of tokenahead
    unit: str = "byte"  # what one token is, in the singular
    accepted_by_position: list[Number] = field(default_factory=list)  # for files of one way of decoding
    bits_per_byte: Number | None = None  # cross-entropy of the next-token head on held-out text
    extra: Facts = field(default_factory=dict)  # further facts to show, by name
    environment: Facts = field(default_factory=dict)  # of `evaluation.environment()`
    not_measured: Facts = field(default_factory=dict)  # methods that a setting does not have, and why

    def to_json(self, path: str | Path) -> Path:
        """Save the measured values (not the derived ones) as JSON, atomically; return the path."""
        return replace_file(path, json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Load a file of `to_json`; a field that is missing, unknown or of another type is refused."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(**fields | {"results": [DecodingResult(**row) for row in fields["results"]]})
        except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
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


def environment() -> Facts:
    """Return versions, processor, cores, threads, and the load average of the last minute, by name."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        **({"load average, 1 min": round(os.getloadavg()[0], 2)} if hasattr(os, "getloadavg") else {}),
    }


def hardware() -> str:
    """Return the processor and the number of threads, in words."""
    count = torch.get_num_threads()
    return f"{processor()}, {count} thread{'s' * (count > 1)}"


def processor() -> str:
    """Return the processor's name, or at least its architecture."""
    with suppress(OSError, StopIteration), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    return platform.processor() or platform.machine() or "unknown processor"
