"""The YAML head of a card: tags, library, and the measured figures as `model-index` entries. Renders no text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..training.results import DecodingResult, MeasuredResults
from .facts import ModelFacts

TAGS = ("tokenahead", "multi-token-prediction", "speculative-decoding")
"""Tags of every card."""


def card_metadata(facts: ModelFacts, results: MeasuredResults | None, model_name: str, **fields: Any) -> ModelCardData:
    """Fills the metadata of a card.

    The library is `transformers` only if the model's own code travels with it: otherwise the Hub would offer a line
    of code that cannot load the model without `import tokenahead`.

    Args:
        facts: What the model is.
        results: What was measured, if anything.
        model_name: The name that the measured figures are filed under.
        fields: Further fields of `ModelCardData`; those that are None are left out, `tags` are added to ours.

    Returns:
        The metadata.
    """
    tags = [*TAGS, facts.model_type, *(fields.pop("tags", None) or ())]
    defaults = {
        "library_name": "transformers" if facts.remote_code == "bundle" else "tokenahead",
        "pipeline_tag": "text-generation",
        "model_name": model_name,
        "eval_results": list(_entries(results)) if results else None,
    }
    if facts.heads_only and fields.get("base_model"):
        defaults["base_model_relation"] = "adapter"
    return ModelCardData(tags=tags, **defaults | {key: value for key, value in fields.items() if value is not None})


def _entries(results: MeasuredResults) -> Iterator[EvalResult]:
    """One entry per figure: three per way of decoding, then the cross-entropy."""
    for row in results.results:
        for metric, label, value in _figures(row, results.unit):
            yield _entry(results, metric, f"{label}, {row.name}", value)
    if results.bits_per_byte is not None:
        yield _entry(results, "bits_per_byte", "Bits per byte", results.bits_per_byte)


def _figures(row: DecodingResult, unit: str) -> list[tuple[str, str, float]]:
    """(metric id, label, value) of one way of decoding; text that repeats itself earns no speed-up."""
    figures = [
        ("tokens_per_call", f"{unit.capitalize()}s per backbone call", row.tokens_per_call),
        ("tokens_per_second", f"{unit.capitalize()}s per second", row.tokens_per_second),
    ]
    if row.expected_tokens_per_call is not None:
        label = f"Expected {unit}s per backbone call, teacher-forced"
        figures.append(("expected_tokens_per_call", label, row.expected_tokens_per_call))
    if row.repeated_share is not None:
        figures.append(("repetition", "Share of repeated text", row.repeated_share))
    if row.is_degenerate:
        return figures
    return [*figures, ("speed_up", f"Speed-up over one {unit} at a time", row.speed_up)]


def _entry(results: MeasuredResults, metric: str, name: str, value: float) -> EvalResult:
    return EvalResult(
        task_type="text-generation",
        dataset_type=re.sub(r"[^a-z0-9]+", "-", results.dataset_name.lower()).strip("-") or "text",
        dataset_name=results.dataset_name,
        metric_type=metric,
        metric_name=name,
        metric_value=round(value, 4),
    )
