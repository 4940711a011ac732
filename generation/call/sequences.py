"""Token ids of a batch whose sequences grow at their own pace, and where each ends. Knows no model.

Newly verified tokens are cut at the first hit of any stopping criterion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

_GROWTH = 256


@dataclass(frozen=True)
class NewTokens:
    """How many tokens each sequence gets in a cycle: known to the host, and copied to the device once, where read.

    Attributes:
        counts: Tokens per sequence; 0 for sequences that had ended.
        device: That of the sequences.
    """

    counts: list[int]
    device: torch.device

    @cached_property
    def longest(self) -> int:
        """The most tokens that any sequence gets."""
        return max(self.counts)

    @cached_property
    def is_even(self) -> bool:
        """Whether all sequences get the same number."""
        return len(set(self.counts)) == 1

    @cached_property
    def on_device(self) -> Tensor:
        """[B] int64; the cycle's one copy from the host, and none where all sequences agree."""
        if self.is_even:
            return torch.full((len(self.counts),), self.counts[0], device=self.device)
        return torch.tensor(self.counts, device=self.device)

    def of(self, chosen: list[int], index: Tensor) -> NewTokens:
        """Return those of the `chosen` sequences; `index` is the same on the device."""
        part = NewTokens([self.counts[each] for each in chosen], self.device)
        if not part.is_even:
            vars(part)["on_device"] = self.on_device[index]
        return part


class Sequences:
    """The token ids of a batch, each sequence with its own length, in one tensor.

    Args:
        prompt: [B, L] int64, the ids of the prompt, padding included.

    Attributes:
        ids: [B, capacity] int64; sequence b holds tokens in its first `lengths[b]` columns.
        lengths: Tokens per sequence, padding of the prompt included, as processors and criteria of transformers count.
        done: Whether each sequence has ended.
        steps: 0, 1, 2, ... on the device, [capacity] int64: index tensors are slices of it.
        newest_on_host: The new tokens of every sequence in the last cycle; none where it had ended.
        drafted_on_host: How many tokens were drafted for every sequence in the last cycle.
    """

    def __init__(self, prompt: Tensor) -> None:
        self.prompt_length = prompt.shape[1]
        self.lengths = [prompt.shape[1]] * prompt.shape[0]
        self.done = [False] * prompt.shape[0]
        self.newest_on_host = [list[int]() for _ in self.lengths]
        self.drafted_on_host = [0] * prompt.shape[0]
        self._ends: Tensor | None = None
        self.ids = torch.nn.functional.pad(prompt, (0, _GROWTH))
        self.steps = torch.arange(self.ids.shape[1], device=prompt.device)

    @property
    def ends(self) -> Tensor:
        """`lengths` on the device, [B] int64."""
        if self._ends is None:
            self._ends = torch.full((len(self.lengths),), self.lengths[0], device=self.ids.device)
        return self._ends

    @property
    def is_even(self) -> bool:
        """Whether all sequences have the same length, so that slices replace gathers."""
        return len(set(self.lengths)) == 1

    @property
    def num_new(self) -> list[int]:
        """Tokens per sequence after the prompt."""
        return [length - self.prompt_length for length in self.lengths]

    def write(self, tokens: Tensor) -> None:
        """Write tokens [B, k] after every sequence without counting them; `keep` counts them."""
        end = max(self.lengths) + tokens.shape[1]
        if end > self.ids.shape[1]:
            self.ids = torch.nn.functional.pad(self.ids, (0, end - self.ids.shape[1] + _GROWTH))
            self.steps = torch.arange(self.ids.shape[1], device=self.ids.device)
        if self.is_even:
            self.ids[:, self.lengths[0] : end] = tokens
        else:
            self.ids.scatter_(1, self.ends[:, None] + self.steps[: tokens.shape[1]], tokens)

    def keep(self, new: NewTokens) -> None:
        """Count the first tokens of those written last to every sequence."""
        self._ends = None if self.is_even and new.is_even else self.ends + new.on_device
        self.lengths = [length + count for length, count in zip(self.lengths, new.counts)]

    def prefix(self, length: int, written: list[int], pad: int = 0) -> Tensor:
        """Return every sequence as it was when it had `length` ids, [B, length]: a copy, which the reader may keep.

        A shorter sequence is whole and begins after `pad`, as a prompt would.

        Args:
            length: Ids per sequence.
            written: Tokens written after every sequence that belong to it, though they are not counted yet.
            pad: Id for what is missing.
        """
        ends = [n + new for n, new in zip(self.lengths, written)]
        if min(ends) >= length:
            return self.ids[:, :length].clone()
        missing = (length - torch.tensor(ends, device=self.ids.device)).clamp(min=0)[:, None]
        steps = self.steps[:length]
        return self.ids.gather(1, (steps - missing).clamp(min=0)).masked_fill_(steps < missing, pad)

    def last(self) -> Tensor:
        """Return the last token of every sequence, [B]."""
        if self.is_even:
            return self.ids[:, self.lengths[0] - 1]
        return self.ids.gather(1, self.ends[:, None] - 1)[:, 0]

    def newest(self, count: int) -> Tensor:
        """Return the last `count` tokens of every sequence, [B, count]; arbitrary ids where a sequence has fewer."""
        if self.is_even and self.lengths[0] >= count:
            return self.ids[:, self.lengths[0] - count : self.lengths[0]]
        return self.ids.gather(1, (self.ends[:, None] - count + self.steps[:count]).clamp(min=0))

    def columns(self, start: int, stop: int, pad: int) -> Tensor:
        """Return columns start .. stop - 1 of all sequences, [B, stop - start], with `pad` after a sequence's end."""
        chosen = self.ids[:, start:stop]
        if min(self.lengths) >= stop:
            return chosen.clone()
        return chosen.masked_fill(self.steps[start:stop] >= self.ends[:, None], pad)


Scores = Callable[[int], tuple[Tensor, ...] | None]
"""From a number of new tokens to the scores of as many steps, [B, v] each, where the call records them."""


class Stopping:
    """Stopping criteria of one call of `generate`.

    End-of-sequence ids and the length limit are compared as plain integers. Other criteria (stop strings, time, the
    user's own) are called at every new length in turn with all B sequences in their order: a sequence of another length
    as it was at that length, or whole after padding where it is shorter; their result for those is dropped.

    Args:
        criteria: The list that transformers prepared for this call.
        pad: An id of the vocabulary, for where a sequence has no token.
        scores: The scores that criteria are called with.
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

    def tokens_left(self, length: int) -> int:
        """Return how many more tokens a sequence of `length` may get."""
        return 2**31 if self.max_length is None else self.max_length - length

    def cut(self, tokens: Sequences, new: list[list[int]], done: list[bool]) -> tuple[list[int], list[bool]]:
        """Decide how many new tokens each sequence gets.

        Args:
            tokens: The sequences; the new tokens are written after them.
            new: Verified tokens per sequence.
            done: Sequences that had ended before; they get none.

        Returns:
            New tokens per sequence, and whether the sequence has now ended.
        """
        counts = [0 if ended else self.tokens_left(n) for ended, n in zip(done, tokens.lengths)]
        counts = [self._until_eos(ids[:count]) for ids, count in zip(new, counts)]
        hits = self._first_hits(tokens, counts) if self.others else [None] * len(counts)
        counts = [count if hit is None else hit for hit, count in zip(hits, counts)]
        ended = [
            hit is not None or old or (count > 0 and ids[count - 1] in self.eos) or self.tokens_left(n + count) <= 0
            for hit, old, count, ids, n in zip(hits, done, counts, new, tokens.lengths)
        ]
        return counts, ended

    def _until_eos(self, ids: list[int]) -> int:
        return next((i + 1 for i, token in enumerate(ids) if token in self.eos), len(ids))

    def _first_hits(self, tokens: Sequences, counts: list[int]) -> list[int | None]:
        """Return per sequence how many of its new tokens there are when another criterion first holds."""
        hits: list[int | None] = [None] * len(counts)
        criteria = StoppingCriteriaList(self.others)
        spans = [range(n + 1, n + count + 1) for n, count in zip(tokens.lengths, counts)]
        for length in sorted(set().union(*spans)):
            open_now = [index for index, span in enumerate(spans) if length in span and hits[index] is None]
            if not open_now:
                continue
            prefix, scores = tokens.prefix(length, counts, self.pad), self.scores
            stops = criteria(prefix, scores and scores(length - tokens.prompt_length))
            stops = torch.as_tensor(stops).expand(len(counts)).tolist()
            for index in open_now:
                hits[index] = length - tokens.lengths[index] if stops[index] else None
        return hits
