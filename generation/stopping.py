"""Where a row ends. Newly verified tokens are cut at the first hit of any criterion, so that nothing overshoots."""

from __future__ import annotations

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from .tokens import TokenRows


class Stopping:
    """Stopping criteria of one call of `generate`.

    End-of-sequence ids and the length limit are compared as plain integers; other criteria (stop strings, time, the
    user's own) are asked about every new token in turn, with each row's own ids.

    Args:
        criteria: The list that transformers prepared for this call.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        self.eos, self.max_length, self.others = set(), None, []
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

    def cut(self, tokens: TokenRows, new: list[list[int]], done: list[bool]) -> tuple[list[int], list[bool]]:
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
        if self.others:
            hits = self._first_hits(tokens, kept, done)
            ended = [hit or False for hit in hits]
            kept = [hit or count for hit, count in zip(hits, kept)]
        else:
            ended = [False] * len(kept)
        for row, count in enumerate(kept):
            last = new[row][count - 1] if count else None
            over = done[row] or last in self.eos or self.room(tokens.lengths[row] + count) <= 0
            ended[row] = bool(ended[row]) or over
        return kept, ended

    def _until_eos(self, ids: list[int]) -> int:
        return next((i + 1 for i, token in enumerate(ids) if token in self.eos), len(ids))

    def _first_hits(self, tokens: TokenRows, kept: list[int], done: list[bool]) -> list[int | None]:
        """For each row, how many new tokens there are when another criterion first holds."""
        hits: list[int | None] = [None] * len(kept)
        ask = StoppingCriteriaList(self.others)
        for rows, length in tokens.groups(done):
            for count in range(1, max(kept[row] for row in rows) + 1):
                open_rows = [row for row in rows if hits[row] is None and kept[row] >= count]
                if not open_rows:
                    break
                answer = torch.as_tensor(ask(tokens.prefix(open_rows, length + count), None)).expand(len(open_rows))
                for row, hit in zip(open_rows, answer.tolist()):
                    hits[row] = count if hit else None
        return hits
