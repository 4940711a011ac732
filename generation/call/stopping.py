"""Where the sequences of a batch end: newly verified tokens are cut at the first hit of any stopping criterion."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

from ..contract import VerificationResult
from ..tensors.masks import cached_arange
from .sequences import FixedSequences, Sequences

Scores = Callable[[int], tuple[Tensor, ...] | None]
"""From a number of new tokens to the scores of as many steps, [B, v] each, where the call records them."""
_BY_SEQUENCE = (StopStringCriteria, MaxTimeCriteria)
"""Criteria that remember nothing, and decide for every sequence by its own ids."""


class Stopping:
    """Stopping criteria of one call of `generate`.

    End-of-sequence ids and the length limit are compared as plain integers; stop strings and time are asked at every
    new length of a sequence. Where the call has any other criterion, which may decide for a batch or remember, all are
    asked as in plain decoding: once for every column, in order, when all open sequences have it. Others have run ahead
    by then, unless `in_step` `holds`, and what they have beyond their end is dropped after the call.
    """

    eos_ids: Tensor  # [E] int64 on the device
    limit: Tensor  # [] on the device

    def __init__(self, criteria: StoppingCriteriaList, pad: int = 0, scores: Scores | None = None) -> None:
        self.eos, self.max_length, self.others = set[int](), None, StoppingCriteriaList()
        self.pad, self.scores = pad, scores
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos |= set(criterion.eos_token_id.flatten().tolist())
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(criterion.max_length, self.max_length or criterion.max_length)
            else:
                self.others.append(criterion)
        self.in_step = any(type(criterion) not in _BY_SEQUENCE for criterion in self.others)
        # without them, plain decoding goes on with sequences that have ended, until all have
        self.has_ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self.holds, self.shown = False, 0  # columns that were shown
        self.ends, self.finished = list[int](), list[bool]()  # ids per sequence, as far as it is decided

    def tokens_left(self, length: int) -> int:
        """Return how many more tokens a sequence of `length` may get."""
        return 2**31 if self.max_length is None else self.max_length - length

    def most_left(self, lengths: list[int], done: list[bool]) -> int:
        """Return how many more tokens the shortest of the open sequences may get; 1 where all have ended."""
        return max([self.tokens_left(n) for n, over in zip(lengths, done) if not over], default=1)

    def hold(self, hold: Callable[[str, Tensor], Tensor], device: torch.device) -> None:
        """Keep what `counts` compares with at constant addresses (`CacheView.held`)."""
        self.eos_ids = hold("stopping.eos", torch.tensor(sorted(self.eos), dtype=torch.long, device=device))  # [E]
        self.limit = hold("stopping.limit", torch.tensor(self.tokens_left(0), device=device))  # []

    def counts(self, tokens: FixedSequences, result: VerificationResult, sound: Tensor | None) -> Tensor:
        """Return `cut`'s counts [B] by eos and the length limit alone, on the device, and note there who has ended.

        Where an open sequence is not `sound` [B] bool, none gets a token.
        """
        width, is_open = result.tokens.shape[1], ~tokens.ended
        is_end = (result.tokens[..., None] == self.eos_ids).any(-1)  # [B, k + 1]
        until_eos = cached_arange(width + 2, is_end.device)[1:-1].masked_fill(~is_end, width + 1).amin(1)  # [B]
        left = self.limit - tokens.ends  # [B]
        counts = torch.minimum(torch.minimum(result.num_accepted + 1, until_eos), left)  # [B]
        is_sound = is_open if sound is None else is_open & (sound | tokens.ended).all()
        counts = counts * is_sound
        tokens.ended.logical_or_((until_eos == counts) | (left <= counts))
        return counts

    def cut(self, tokens: Sequences, new: list[list[int]], done: list[bool]) -> tuple[list[int], list[bool]]:
        """Return how many of its verified tokens each sequence gets, and whether it has now ended.

        `new` are written after the sequences; those that were `done` before get none.
        """
        counts = [0 if ended else self.tokens_left(n) for ended, n in zip(done, tokens.lengths)]
        counts = [self._until_eos(ids[:count]) for ids, count in zip(new, counts)]
        if self.in_step:
            return self._cut_in_step(tokens, counts, new, done)
        hits = self._first_hits(tokens, counts) if self.others else [None] * len(counts)
        counts = [count if hit is None else hit for hit, count in zip(hits, counts)]
        ended = self._ended(tokens, counts, new, done)
        return counts, [hit is not None or over for hit, over in zip(hits, ended)]

    def _ended(self, tokens: Sequences, counts: list[int], new: list[list[int]], done: list[bool]) -> list[bool]:
        """Return which sequences have ended by themselves, or by their length."""
        return [
            old or (count > 0 and ids[count - 1] in self.eos) or self.tokens_left(n + count) <= 0
            for old, count, ids, n in zip(done, counts, new, tokens.lengths)
        ]

    def _until_eos(self, ids: list[int]) -> int:
        return next((i + 1 for i, token in enumerate(ids) if token in self.eos), len(ids))

    def _first_hits(self, tokens: Sequences, counts: list[int]) -> list[int | None]:
        """Return per sequence how many of its new tokens there are when another criterion first holds."""
        hits: list[int | None] = [None] * len(counts)
        spans = [range(n + 1, n + count + 1) for n, count in zip(tokens.lengths, counts)]
        for length in sorted(set().union(*spans)):
            open_now = [index for index, span in enumerate(spans) if length in span and hits[index] is None]
            if not open_now:
                continue
            stops = self._asked(self.others, tokens.prefix(length, counts), length - tokens.prompt_length)
            for index in open_now:
                hits[index] = length - tokens.lengths[index] if stops[index] else None
        return hits

    def _asked(self, criteria: Callable[..., Tensor], ids: Tensor, count: int) -> list[bool]:
        """Return what criteria decide for every sequence, after `count` new tokens."""
        return criteria(ids, self.scores and self.scores(count)).tolist()

    def _cut_in_step(
        self, tokens: Sequences, counts: list[int], new: list[list[int]], done: list[bool]
    ) -> tuple[list[int], list[bool]]:
        """Return what `cut` does, from new tokens up to ends of sequences alone."""
        if not self.ends:
            self.shown, self.ends, self.finished = tokens.prompt_length, list(tokens.lengths), list(done)
        ended = self._ended(tokens, counts, new, done)
        written = [n + count for n, count in zip(tokens.lengths, counts)]
        self.ends = [end if old else length for old, end, length in zip(done, self.ends, written)]
        self._show(tokens, ended)
        if self.holds:
            ended = [over and end <= self.shown for over, end in zip(ended, self.ends)]
            self.ends = [min(end, self.shown) for end in self.ends]
        kept = [max(0, min(count, end - n)) for count, end, n in zip(counts, self.ends, tokens.lengths)]
        return kept, ended

    def _show(self, tokens: Sequences, ended: list[bool]) -> None:
        """Ask about one column after the other, as far as all open sequences have come; note where sequences end."""
        while not all(self.finished):
            column = self.shown + 1
            if any(end < column and not over for end, over in zip(self.ends, ended)):
                return
            ids = tokens.columns(0, column, self.pad, self.ends)
            stops = self._asked(self.others, ids, column - tokens.prompt_length)
            self.shown = column
            for index, stop in enumerate(stops):
                if stop and not self.finished[index] and self.has_ends:
                    self.ends[index], ended[index] = column, True
                self.finished[index] |= stop or (ended[index] and self.ends[index] <= column)
        self.ends = [min(end, self.shown) for end in self.ends]
        ended[:] = self.finished
