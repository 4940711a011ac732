"""Token ids of a batch whose rows grow at their own pace. Knows no model.

Where a row ends. Newly verified tokens are cut at the first hit of any criterion, so that nothing overshoots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

_GROWTH = 256


@dataclass(frozen=True)
class NewTokens:
    """How many tokens each sequence keeps of a cycle: known to the host, and copied to the device once, where asked
    for.

    Attributes:
        counts: Tokens per sequence; 0 for sequences that had ended.
        device: Where the rows live.
    """

    counts: list[int]
    device: torch.device

    @cached_property
    def longest(self) -> int:
        """The most tokens that any sequence keeps."""
        return max(self.counts)

    @cached_property
    def is_even(self) -> bool:
        """Whether all sequences keep the same number."""
        return len(set(self.counts)) == 1

    @cached_property
    def on_device(self) -> torch.Tensor:
        """[B] int64; the cycle's one copy from the host, and none where all sequences agree."""
        if self.is_even:
            return torch.full((len(self.counts),), self.counts[0], device=self.device)
        return torch.tensor(self.counts, device=self.device)

    def of(self, rows: list[int], index: torch.Tensor) -> NewTokens:
        """Return those of some sequences, `index` being the same rows on the device."""
        chosen = NewTokens([self.counts[row] for row in rows], self.device)
        if not chosen.is_even:
            vars(chosen)["on_device"] = self.on_device[index]
        return chosen


class Sequences:
    """Rows of token ids, each with its own length, in one tensor.

    Args:
        prompt: [B, L] int64, the ids that `generate` was given, padding included.

    Attributes:
        ids: [B, capacity] int64; sequence b holds tokens in its first `lengths[b]` columns.
        lengths: Tokens per sequence, padding of the prompt included, as processors and criteria of transformers count
            them.
        done: Whether each sequence has ended.
        steps: 0, 1, 2, ... on the device, [capacity] int64: index tensors are slices of it.
        newest_on_host: What every sequence got in the last cycle; nothing where it had ended.
        drafted_on_host: How many tokens were drafted for every sequence in the last cycle.
    """

    def __init__(self, prompt: torch.Tensor) -> None:
        self.prompt_length = prompt.shape[1]
        self.lengths = [prompt.shape[1]] * prompt.shape[0]
        self.done = [False] * prompt.shape[0]
        self.newest_on_host = [list[int]() for _ in self.lengths]
        self.drafted_on_host = [0] * prompt.shape[0]
        self._ends: torch.Tensor | None = None
        self.ids = torch.nn.functional.pad(prompt, (0, _GROWTH))
        self.steps = torch.arange(self.ids.shape[1], device=prompt.device)

    @property
    def ends(self) -> torch.Tensor:
        """`lengths` on the device, [B] int64."""
        if self._ends is None:
            self._ends = torch.full((len(self.lengths),), self.lengths[0], device=self.ids.device)
        return self._ends

    @property
    def is_even(self) -> bool:
        """Whether all sequences have the same length, so that slices do for gathers."""
        return len(set(self.lengths)) == 1

    def write(self, tokens: torch.Tensor) -> None:
        """Puts tokens [B, k] after every sequence without counting them; `keep` decides how many stay."""
        end = max(self.lengths) + tokens.shape[1]
        if end > self.ids.shape[1]:
            self.ids = torch.nn.functional.pad(self.ids, (0, end - self.ids.shape[1] + _GROWTH))
            self.steps = torch.arange(self.ids.shape[1], device=self.ids.device)
        if self.is_even:
            self.ids[:, self.lengths[0] : end] = tokens
        else:
            self.ids.scatter_(1, self.ends[:, None] + self.steps[: tokens.shape[1]], tokens)

    def keep(self, kept: NewTokens) -> None:
        """Counts the first tokens written last to every sequence."""
        ends = None if self.is_even and kept.is_even else self.ends + kept.on_device
        self.lengths = [length + count for length, count in zip(self.lengths, kept.counts)]
        self._ends = ends

    def prefix(self, length: int, written: list[int], pad: int = 0) -> torch.Tensor:
        """Every sequence as it was when it had `length` ids, [B, length]: a copy, which who is shown it may keep.

        A row that is shorter is shown whole after `pad` on its left, as a prompt would be.

        Args:
            length: Ids to show.
            written: Tokens written after every sequence that belong to it, though they are not counted yet.
            pad: Id for what is missing.
        """
        ends = [n + new for n, new in zip(self.lengths, written)]
        if min(ends) >= length:
            return self.ids[:, :length].clone()
        missing = (length - torch.tensor(ends, device=self.ids.device)).clamp(min=0)[:, None]
        steps = self.steps[:length]
        return self.ids.gather(1, (steps - missing).clamp(min=0)).masked_fill_(steps < missing, pad)

    def last(self) -> torch.Tensor:
        """The last token of every sequence, [B]."""
        if self.is_even:
            return self.ids[:, self.lengths[0] - 1]
        return self.ids.gather(1, self.ends[:, None] - 1)[:, 0]

    def newest(self, count: int) -> torch.Tensor:
        """The last `count` tokens of every sequence, [B, count]; arbitrary ids where a row has fewer."""
        if self.is_even and self.lengths[0] >= count:
            return self.ids[:, self.lengths[0] - count : self.lengths[0]]
        return self.ids.gather(1, (self.ends[:, None] - count + self.steps[:count]).clamp(min=0))

    def columns(self, start: int, stop: int, pad: int) -> torch.Tensor:
        """Columns start .. stop - 1 of all sequences, [B, stop - start], with `pad` after a sequence's end."""
        chosen = self.ids[:, start:stop]
        if min(self.lengths) >= stop:
            return chosen.clone()
        return chosen.masked_fill(self.steps[start:stop] >= self.ends[:, None], pad)


Scores = Callable[[int], tuple[torch.Tensor, ...] | None]
"""From a number of new tokens to the scores of as many steps, [B, v] each, where the call records them."""


class Stopping:
    """Stopping criteria of one call of `generate`.

    End-of-sequence ids and the length limit are compared as plain integers. Other criteria (stop strings, time, the
    user's own) are asked at every new length in turn and are shown all B rows in their order: a row of another length
    as it was at that length, or whole after padding where it is shorter; what they say of those is dropped.

    Args:
        criteria: The list that transformers prepared for this call.
        pad: An id of the vocabulary, shown where a row has no token.
        scores: What criteria are shown as scores.
    """

    def __init__(self, criteria: StoppingCriteriaList, pad: int = 0, scores: Scores | None = None) -> None:
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
        """Decides how many new tokens each sequence keeps.

        Args:
            tokens: The rows; the new tokens are written after them.
            new: Verified tokens per sequence.
            done: Sequences that had ended before; they keep none.

        Returns:
            Tokens kept per sequence, and whether the row has now ended.
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
        """For each sequence, how many new tokens there are when another criterion first holds."""
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
            answer = (
                torch.as_tensor(ask(shown, self.scores and self.scores(length - tokens.prompt_length)))
                .expand(len(kept))
                .tolist()
            )
            for row in asked:
                hits[row] = length - tokens.lengths[row] if answer[row] else None
        return hits
