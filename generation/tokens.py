"""Token ids of a batch whose rows grow at their own pace. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

_GROWTH = 256


@dataclass(frozen=True)
class NewTokens:
    """How many tokens each row keeps of a cycle: known to the host, and copied to the device once, where asked for.

    Attributes:
        counts: Tokens per row; 0 for rows that had ended.
        device: Where the rows live.
    """

    counts: list[int]
    device: torch.device

    @cached_property
    def longest(self) -> int:
        """The most tokens that any row keeps."""
        return max(self.counts)

    @cached_property
    def is_even(self) -> bool:
        """Whether all rows keep the same number."""
        return len(set(self.counts)) == 1

    @cached_property
    def on_device(self) -> torch.Tensor:
        """[B] int64; the cycle's one copy from the host, and none where all rows agree."""
        if self.is_even:
            return torch.full((len(self.counts),), self.counts[0], device=self.device)
        return torch.tensor(self.counts, device=self.device)


class Sequences:
    """Rows of token ids, each with its own length, in one tensor.

    Args:
        prompt: [B, L] int64, the ids that `generate` was given, padding included.

    Attributes:
        ids: [B, capacity] int64; row b holds tokens in its first `lengths[b]` columns.
        lengths: Tokens per row, padding of the prompt included, as processors and criteria of transformers count them.
        steps: 0, 1, 2, ... on the device, [capacity] int64: index tensors are slices of it.
    """

    def __init__(self, prompt: torch.Tensor) -> None:
        self.prompt_length = prompt.shape[1]
        self.lengths = [prompt.shape[1]] * prompt.shape[0]
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
        """Whether all rows have the same length, so that slices do for gathers."""
        return len(set(self.lengths)) == 1

    def write(self, tokens: torch.Tensor) -> None:
        """Puts tokens [B, k] behind every row without counting them; `keep` decides how many stay."""
        end = max(self.lengths) + tokens.shape[1]
        if end > self.ids.shape[1]:
            self.ids = torch.nn.functional.pad(self.ids, (0, end - self.ids.shape[1] + _GROWTH))
            self.steps = torch.arange(self.ids.shape[1], device=self.ids.device)
        if self.is_even:
            self.ids[:, self.lengths[0] : end] = tokens
        else:
            self.ids.scatter_(1, self.ends[:, None] + self.steps[: tokens.shape[1]], tokens)

    def keep(self, kept: NewTokens) -> None:
        """Counts the first tokens written last to every row."""
        ends = None if self.is_even and kept.is_even else self.ends + kept.on_device
        self.lengths = [length + count for length, count in zip(self.lengths, kept.counts)]
        self._ends = ends

    def prefix(self, length: int, written: list[int], pad: int = 0) -> torch.Tensor:
        """Every row as it was when it had `length` ids, [B, length]: a copy, which who is shown it may keep.

        A row that is shorter is shown whole behind `pad` on its left, as a prompt would be.

        Args:
            length: Ids to show.
            written: Tokens written behind every row that belong to it, though they are not counted yet.
            pad: Id for what is missing.
        """
        ends = [n + new for n, new in zip(self.lengths, written)]
        if min(ends) >= length:
            return self.ids[:, :length].clone()
        missing = (length - torch.tensor(ends, device=self.ids.device)).clamp(min=0)[:, None]
        steps = self.steps[:length]
        return self.ids.gather(1, (steps - missing).clamp(min=0)).masked_fill_(steps < missing, pad)

    def last(self) -> torch.Tensor:
        """The last token of every row, [B]."""
        if self.is_even:
            return self.ids[:, self.lengths[0] - 1]
        return self.ids.gather(1, self.ends[:, None] - 1)[:, 0]

    def newest(self, count: int) -> torch.Tensor:
        """The last `count` tokens of every row, [B, count]; arbitrary ids where a row has fewer."""
        if self.is_even and self.lengths[0] >= count:
            return self.ids[:, self.lengths[0] - count : self.lengths[0]]
        return self.ids.gather(1, (self.ends[:, None] - count + self.steps[:count]).clamp(min=0))

    def columns(self, start: int, stop: int, pad: int) -> torch.Tensor:
        """Columns start .. stop - 1 of all rows, [B, stop - start], with `pad` behind a row's end."""
        chosen = self.ids[:, start:stop]
        if min(self.lengths) >= stop:
            return chosen.clone()
        return chosen.masked_fill(self.steps[start:stop] >= self.ends[:, None], pad)
