"""The box measured within a budget of time: expected acceptance on its held-out text, and decoding by turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ... import __version__
from ...modeling import EvaByteForMTPC
from ..box import EXCERPT, EXCERPTS, Excerpt, excerpt_prompts, excerpt_windows, load_excerpts, load_heads
from ..evaluation import (
    MODES,
    Comparison,
    ExpectedAcceptance,
    HeadReport,
    Measurement,
    TeacherForced,
    environment,
    hardware,
)
from ..evaluation.drafts import window_bits
from ..results import DecodingResult, MeasuredResults

_EXPECTED_SHARE = 0.25  # of the time
_BATCH_SHARE = 0.35  # of the time for decoding, where batches are measured, too
_TEXTS_AT_ONCE = 4
_BATCH_BYTES = 64  # per completion in batches, at most
_ADAPTIVE = {"num_assistant_tokens_schedule": "adaptive"}  # in batches, where a drafted byte costs more than alone
_PREFIX = 320  # ids of the held-out prefixes behind which the backbone writes


@dataclass
class Box:
    """A box in memory.

    Attributes:
        models: By head.
        tokenizer: Theirs.
        excerpts: Held-out text.
    """

    models: dict[str, EvaByteForMTPC]
    tokenizer: PreTrainedTokenizerBase
    excerpts: list[Excerpt]

    @classmethod
    def load(cls, folder: Path) -> Box:
        """Read a box.

        Raises:
            BoxDamagedError: A file is missing, or its checksum is wrong; the message names it.
        """
        models, tokenizer = load_heads(folder)
        return cls(models, tokenizer, load_excerpts(folder / EXCERPTS))


@dataclass(frozen=True)
class BoxMeasurement:
    """How much is measured.

    Attributes:
        seconds: Time for all of it. One round of everything is always taken.
        new_bytes: Bytes per completion.
        most_prompts: Prompts at most.
        batch_size: Measure batches of so many, too; 1: none.
        seed: Of prompts and samples.
        on_step: Called with words on what is done next.
    """

    seconds: float = 40.0
    new_bytes: int = 128
    most_prompts: int = 32
    batch_size: int = 1
    seed: int = 0
    on_step: Callable[[str], None] = field(default=lambda words: None, compare=False)

    @property
    def command(self) -> str:
        """Return the command that repeats this."""
        batches = f" --batch-size {self.batch_size}" if self.batch_size > 1 else ""
        return f"tokenahead demo --seconds {self.seconds:g} --new-bytes {self.new_bytes} --seed {self.seed}{batches}"

    def measure(self, box: Box) -> tuple[list[HeadReport], dict[str, list[Comparison]]]:
        """Measure every head of a box.

        Args:
            box: The box.

        Returns:
            Reports, and for every head the comparisons at batch 1, which hold the texts.
        """
        before, started = environment(), time.monotonic()
        expected, bits = self._expected(box)
        left = self.seconds - (time.monotonic() - started)
        batch_left = _BATCH_SHARE * left if self.batch_size > 1 else 0.0
        prompts = excerpt_prompts(box.excerpts, self.most_prompts, self.seed, _PREFIX)
        comparisons = self._decode(box, prompts, 1, left - batch_left)
        batches = self._decode(box, prompts, self.batch_size, batch_left) if self.batch_size > 1 else {}
        reports = []
        for kind, model in box.models.items():
            rows = [_with_expected(row, expected[kind, row.mode.name]) for row in comparisons[kind]]
            rows += [row.result for row in batches.get(kind, [])]
            reports.append(HeadReport.of(model, self._measured(model, rows, bits, box, before)))
        return reports, comparisons

    def _expected(self, box: Box) -> tuple[dict[tuple[str, str], ExpectedAcceptance], torch.Tensor]:
        """Return acceptance by head and way of decoding, and the bits per byte of the excerpts that were measured."""
        deadline = time.monotonic() + _EXPECTED_SHARE * self.seconds
        backbone, window = box.models["ff"], box.models["ff"].window
        found: dict[tuple[str, str], list[torch.Tensor]] = {}
        bits = []
        for ids in excerpt_windows(box.excerpts).split(_TEXTS_AT_ONCE):
            self.on_step(f"expected acceptance on held-out text, {len(bits) * _TEXTS_AT_ONCE} excerpts done")
            bits.append(window_bits(backbone, ids))
            for mode in MODES:
                if mode.temperature == 1.0:
                    places = TeacherForced.on_text(backbone, ids, window, batch_size=_TEXTS_AT_ONCE)
                else:
                    prefixes = ids[:, :_PREFIX]
                    places = TeacherForced.on_continuations(backbone, prefixes, window, mode, seed=self.seed)
                for kind, model in box.models.items():
                    found.setdefault((kind, mode.name), []).append(places.reached(model, mode))
            if time.monotonic() > deadline:
                break
        return {key: ExpectedAcceptance.of(torch.cat(parts)) for key, parts in found.items()}, torch.cat(bits)

    def _decode(self, box: Box, prompts: list[str], batch_size: int, seconds: float) -> dict[str, list[Comparison]]:
        words = "decoding by turns" if batch_size == 1 else f"decoding {batch_size} prompts at once"
        self.on_step(words)
        new_bytes = self.new_bytes if batch_size == 1 else min(self.new_bytes, _BATCH_BYTES)
        measurement = Measurement(prompts, new_bytes, batch_size, seconds, self.seed)
        modes = [replace(mode, options=mode.options | _ADAPTIVE) for mode in MODES] if batch_size > 1 else MODES
        return measurement.compare(
            box.models, box.tokenizer, modes, lambda done: self.on_step(f"{words}, {done} prompts done")
        )

    def _measured(
        self, model: EvaByteForMTPC, rows: list[DecodingResult], bits: torch.Tensor, box: Box, before: dict[str, Any]
    ) -> MeasuredResults:
        packages = sorted({excerpt.package for excerpt in box.excerpts})
        prompts = f"{len(rows[0].per_prompt)} prompt{'s' * (len(rows[0].per_prompt) > 1)}"
        error = float(bits.std()) / len(bits) ** 0.5
        return MeasuredResults(
            results=rows,
            dataset_name="held-out Python packages",
            dataset_description=f"Source of {', '.join(packages)}, of which nothing was trained on: {prompts} "
            f"of up to {_PREFIX} bytes, each completed with {self.new_bytes} bytes (in batches with at most "
            f"{_BATCH_BYTES}, and drafts as long as pays: the schedule `adaptive`); {len(bits)} excerpts of "
            f"{EXCERPT:,} bytes for the figures that are computed along a text.",
            hardware=hardware(),
            dtype=str(model.dtype).removeprefix("torch."),
            command=self.command,
            library_version=__version__,
            accepted_by_position=rows[0].accepted_by_position,
            bits_per_byte=float(bits.mean()),
            extra={
                "Standard error of the bits per byte": round(error, 4),
                "Drafted bytes": int(model.generation_config.num_assistant_tokens),
            },
            environment=before,
        )


def _with_expected(comparison: Comparison, expected: ExpectedAcceptance) -> DecodingResult:
    by_position = [round(share, 5) for share in expected.by_position]
    return replace(
        comparison.result,
        expected_tokens_per_call=round(expected.tokens_per_call, 5),
        expected_by_position=by_position,
    )
