"""The arithmetic of the figures: from counts and log-probabilities to what a report says. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..results import DEGENERATE_SHARE

REPEATED_GRAM = 16
"""Ids of a passage that counts as repeated if it stands in a text twice."""


def tokens_per_call(accepted: Sequence[int], new_tokens: int | None = None) -> float:
    """New tokens per call of the backbone for one row.

    Args:
        accepted: Accepted drafts of each verification. The prefill, which verifies none, is one more call.
        new_tokens: Tokens that were kept; None: one of the prefill's, and each verification's drafts and its own token
            (an end may have cut the last verification short).
    """
    kept = 1 + sum(accepted) + len(accepted) if new_tokens is None else new_tokens
    return kept / (1 + len(accepted))


def acceptance_by_position(accepted: Sequence[int], drafted: Sequence[int]) -> list[float]:
    """For draft positions 1, 2, ...: of the verifications that drafted so far, the share that accepted so far.

    Args:
        accepted: Accepted drafts of each verification.
        drafted: Length of each draft.
    """
    pairs = list(zip(accepted, drafted, strict=True))
    shares = []
    for position in range(1, max(drafted, default=0) + 1):
        reached = [kept >= position for kept, length in pairs if length >= position]
        shares.append(sum(reached) / len(reached))
    return shares


def bits_per_byte(nats: Sequence[float], count: int | None = None) -> float:
    """Cross-entropy in bits per byte.

    Args:
        nats: -log p of each token of a text.
        count: Bytes of the text; None: a token is a byte.
    """
    return math.fsum(nats) / math.log(2) / (len(nats) if count is None else count)


def repeated_share(ids: Sequence[int], gram: int = REPEATED_GRAM) -> float:
    """Share of a text that is covered by passages of `gram` ids which stand in it more than once."""
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - gram + 1):
        places.setdefault(tuple(ids[start : start + gram]), []).append(start)
    covered = {start + i for starts in places.values() if len(starts) > 1 for start in starts for i in range(gram)}
    return len(covered) / max(1, len(ids))


def is_degenerate(share: float) -> bool:
    """Whether so much of a text repeats itself that its speed-up says nothing."""
    return share > DEGENERATE_SHARE
