"""Where a row ends. Newly verified tokens are cut at the first hit of any criterion, so that nothing overshoots."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from .tokens import Sequences

Scores = Callable[[int], tuple[torch.Tensor, ...] | None]
"""From a number of new tokens to the scores of as many steps, [B, v] each, where the call records them."""


class Stopping:
    """Stopping criteria of one call of `generate`.

    End-of-sequence ids and the length limit are compared as plain integers. Other criteria (stop strings, time, the
    user's own) are asked at every new length in turn and are shown all B rows in their order: a row of another length
    as it was at that length, or whole behind padding where it is shorter; what they say of those is dropped.

    Args:
        criteria: The list that transformers prepared for this call.
        pad: An id of the vocabulary, shown where a row has no token.
        scores: What criteria are shown as scores.
    """

    def __init__(self, criteria: StoppingCriteriaList, pad: int = 0, scores: Scores = lambda count: None) -> None:
        self.eos, self.max_length, self.others = set(), None, []
        self.pad, self.scores = pad, scores
        for criterion in criteria:
            self._add(criterion)

    def _add(self, criterion: StoppingCriteria) -> None:
        if type(criterion) is EosTokenCriteria:
            self.eos |= set(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is MaxLengthCriteria:
            limit = criterion.max_length
            self.max_length = limit if self.max_length is None else min(limit, self.max_length)
        else:
            self.others.append(criterion)

    def room(self, length: int) -> int:
        """How many more tokens a row of `length` may take."""
        return 2**31 if self.max_length is None else self.max_length - length

    def cut(self, tokens: Sequences, new: list[list[int]], done: list[bool]) -> tuple[list[int], list[bool]]:
        """Decides how many new tokens each row keeps.

        Args:
            tokens: The rows; the new tokens are written behind them.
            new: Verified tokens per row.
            done: Rows that had ended before; they keep none.

        Returns:
            Tokens kept per row, and whether the row has now ended.
        """
        kept = [0 if ended else min(len(ids), self.room(n)) for ids, ended, n in zip(new, done, tokens.lengths)]
        kept = [self._until_eos(ids[:count]) for ids, count in zip(new, kept)]
        hits = self._first_hits(tokens, kept) if self.others else [None] * len(kept)
        kept = [count if hit is None else hit for hit, count in zip(hits, kept)]
        ended = [
            hit is not None or old or (count > 0 and ids[count - 1] in self.eos) or self.room(n + count) <= 0
            for hit, old, count, ids, n in zip(hits, done, kept, new, tokens.lengths)
        ]
        return kept, ended

    def _until_eos(self, ids: list[int]) -> int:
        return next((i + 1 for i, token in enumerate(ids) if token in self.eos), len(ids))

    def _first_hits(self, tokens: Sequences, kept: list[int]) -> list[int | None]:
        """For each row, how many new tokens there are when another criterion first holds."""
        hits: list[int | None] = [None] * len(kept)
        ask = StoppingCriteriaList(self.others)
        lengths = {n + count for n, most in zip(tokens.lengths, kept) for count in range(1, most + 1)}
        for length in sorted(lengths):
            asked = [
                row
                for row, (n, most) in enumerate(zip(tokens.lengths, kept))
                if n < length <= n + most and hits[row] is None
            ]
            if not asked:
                continue
            shown = tokens.prefix(length, kept, self.pad)
            answer = torch.as_tensor(ask(shown, self.scores(length - tokens.prompt_length))).expand(len(kept)).tolist()
            for row in asked:
                hits[row] = length - tokens.lengths[row] if answer[row] else None
        return hits
