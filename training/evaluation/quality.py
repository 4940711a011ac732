"""Scores of answers by references: exact match of the number that GSM8K asks for, BLEU of everything else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..utils import needs_extra

EXACT, BLEU = "exact match", "BLEU"
"""Names of the scores, of 0 to 100."""
_ANSWER = "####"  # stands before the number in a reference of GSM8K
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def quality_of(answers: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Return the scores of answers beside their references.

    Args:
        answers: Pairs of an answer and its reference. Where the reference ends as in GSM8K (`#### 42`), the last
            number of the answer must be that one; all others go into one BLEU of the corpus (sacrebleu's).

    Returns:
        By name, 0 to 100; a score without answers is absent.

    Raises:
        MissingExtraError: sacrebleu is not installed, where BLEU is needed.
    """
    numbers, texts = [], []
    for answer, reference in answers:
        (numbers if _ANSWER in reference else texts).append((answer, reference))
    scores = {}
    if numbers:
        right = [_last_number(answer) == _last_number(reference) for answer, reference in numbers]
        scores[EXACT] = 100 * sum(right) / len(right)
    if texts:
        scores[BLEU] = float(_sacrebleu().corpus_bleu([text for text, _ in texts], [[text for _, text in texts]]).score)
    return scores


def _sacrebleu() -> Any:
    with needs_extra("eval", "--quality with references that are texts"):
        import sacrebleu
    return sacrebleu


def _last_number(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
