"""Token ids of a batch whose rows grow at their own pace. Knows no model."""

from __future__ import annotations

import torch

_GROWTH = 256


class TokenRows:
    """Rows of token ids, each with its own length, in one tensor.

    Args:
        prompt: [B, L] int64, the ids that `generate` was given, padding included.

    Attributes:
        ids: [B, capacity] int64; row b holds tokens in its first `lengths[b]` columns.
        lengths: Tokens per row, padding of the prompt included, as processors and criteria of transformers count them.
    """

    def __init__(self, prompt: torch.Tensor) -> None:
        self.prompt_length = prompt.shape[1]
        self.lengths = [prompt.shape[1]] * prompt.shape[0]
        self.ids = torch.nn.functional.pad(prompt, (0, _GROWTH))

    def write(self, tokens: torch.Tensor) -> None:
        """Puts tokens [B, k] behind every row without counting them; `keep` decides how many stay."""
        end = max(self.lengths) + tokens.shape[1]
        if end > self.ids.shape[1]:
            self.ids = torch.nn.functional.pad(self.ids, (0, end - self.ids.shape[1] + _GROWTH))
        if len(set(self.lengths)) == 1:
            self.ids[:, self.lengths[0] : end] = tokens
        else:
            start = torch.tensor(self.lengths, device=self.ids.device)[:, None]
            self.ids.scatter_(1, start + torch.arange(tokens.shape[1], device=self.ids.device), tokens)

    def keep(self, counts: list[int]) -> None:
        """Counts the first `counts[b]` tokens written last to row b."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts)]

    def groups(self, done: list[bool]) -> list[tuple[list[int], int]]:
        """Rows of equal length that are not done, as (rows, length)."""
        by_length: dict[int, list[int]] = {}
        for row, length in enumerate(self.lengths):
            if not done[row]:
                by_length.setdefault(length, []).append(row)
        return [(rows, length) for length, rows in by_length.items()]

    def prefix(self, rows: list[int], length: int) -> torch.Tensor:
        """A copy of the first `length` ids of some rows, [len(rows), length]: who is shown it may keep it."""
        return self.ids[rows, :length]

    def last(self) -> torch.Tensor:
        """The last token of every row, [B]."""
        if len(set(self.lengths)) == 1:
            return self.ids[:, self.lengths[0] - 1]
        return self.ids.gather(1, torch.tensor(self.lengths, device=self.ids.device)[:, None] - 1)[:, 0]

    def newest(self, count: int) -> torch.Tensor:
        """The last `count` tokens of every row, [B, count]; arbitrary ids where a row has fewer."""
        if len(set(self.lengths)) == 1 and self.lengths[0] >= count:
            return self.ids[:, self.lengths[0] - count : self.lengths[0]]
        ends = torch.tensor(self.lengths, device=self.ids.device)[:, None]
        return self.ids.gather(1, (ends + torch.arange(-count, 0, device=self.ids.device)).clamp(min=0))

    def columns(self, start: int, stop: int, pad: int) -> torch.Tensor:
        """Columns start .. stop - 1 of all rows, [B, stop - start], with `pad` behind a row's end."""
        chosen = self.ids[:, start:stop]
        if min(self.lengths) >= stop:
            return chosen.clone()
        beyond = torch.arange(start, stop) >= torch.tensor(self.lengths)[:, None]
        return chosen.masked_fill(beyond.to(self.ids.device), pad)
