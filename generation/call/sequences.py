"""Token ids of a batch whose sequences grow at their own pace, and what is counted of them. Knows no model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain

import torch
from torch import Tensor

from ..tensors.masks import cached_arange, cached_range

_GROWTH = 256


@dataclass(eq=False)
class NewTokens:
    """How many tokens each sequence gets in a cycle: known to the host, and copied to the device once, where read."""

    counts: list[int]  # per sequence, 0 where it had ended; empty: the host does not know them yet (`unread`)
    device: torch.device
    longest: int = field(init=False)  # the most of them
    is_even: bool = field(init=False)  # whether all sequences get the same number

    def __post_init__(self) -> None:
        self.longest, self.is_even = max(self.counts, default=0), len(set(self.counts)) == 1

    @classmethod
    def unread(cls, on_device: Tensor) -> NewTokens:
        """Return counts [B] int64 that only the device knows, as where shapes are fixed."""
        new = cls([], on_device.device)
        vars(new)["on_device"] = on_device
        return new

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

    Attributes:
        ids: [B, capacity] int64; sequence b, padding of its prompt included, is in its first `lengths[b]` columns.
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
        self.ids = torch.nn.functional.pad(prompt, (0, _GROWTH))  # [B, capacity]
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
    def longest(self) -> int:
        """The columns that hold all sequences."""
        return max(self.lengths)

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
            self.ids.scatter_(1, self.ends[:, None] + self.steps[: tokens.shape[1]], tokens)  # [B, k]

    def keep(self, new: NewTokens) -> None:
        """Count the first tokens of those written last to every sequence."""
        self._ends = None if self.is_even and new.is_even else self.ends + new.on_device
        self.lengths = [length + count for length, count in zip(self.lengths, new.counts)]

    def prefix(self, length: int, written: list[int], pad: int = 0) -> Tensor:
        """Return a copy of every sequence as it was when it had `length` ids, [B, length]; shorter ones follow `pad`.

        `written` tokens after every sequence belong to it, though they are not counted yet.
        """
        ends = [n + new for n, new in zip(self.lengths, written)]
        if min(ends) >= length:
            return self.ids[:, :length].clone()
        missing = (length - torch.tensor(ends, device=self.ids.device)).clamp(min=0)[:, None]  # [B, 1]
        steps = self.steps[:length]
        return self.ids.gather(1, (steps - missing).clamp(min=0)).masked_fill_(steps < missing, pad)  # [B, length]

    def last(self) -> Tensor:
        """Return the last token of every sequence, [B]."""
        return self.ids[:, self.lengths[0] - 1] if self.is_even else self.ids.gather(1, self.ends[:, None] - 1)[:, 0]

    def newest(self, count: int) -> Tensor:
        """Return the last `count` tokens of every sequence, [B, count]; arbitrary ids where a sequence has fewer."""
        if self.is_even and self.lengths[0] >= count:
            return self.ids[:, self.lengths[0] - count : self.lengths[0]]
        return self.at(self.ends[:, None] + cached_range(-count, count, self.ids.device))  # [B, count]

    def at(self, columns: Tensor) -> Tensor:
        """Return the ids in columns [B, n] of every sequence; arbitrary ids where it has no such column."""
        return self.ids.gather(1, columns.clamp(0, self.ids.shape[1] - 1))

    def columns(self, start: int, stop: int, pad: int, lengths: list[int] | None = None) -> Tensor:
        """Return columns start .. stop - 1 of all sequences, [B, stop - start], with `pad` after their `lengths`."""
        chosen = self.ids[:, start:stop]  # [B, stop - start]
        if min(lengths or self.lengths) >= stop:
            return chosen.clone()
        ends = self.ends if lengths is None else torch.tensor(lengths, device=self.ids.device)  # [B]
        return chosen.masked_fill(self.steps[start:stop] >= ends[:, None], pad)

    def shorten(self, lengths: list[int]) -> None:
        """Leave the first `lengths[b]` ids of sequence b."""
        self.lengths, self._ends = lengths, torch.tensor(lengths, device=self.ids.device)


class FixedSequences(Sequences):
    """Sequences in columns that are allocated once, whose ends the device knows first.

    The host's own numbers (`lengths`, `done`) follow when it has read the cycle. `hold` is `CacheView.held`.
    """

    def __init__(self, tokens: Sequences, capacity: int, hold: Callable[[str, Tensor], Tensor]) -> None:
        vars(self).update(vars(tokens))
        device = tokens.ids.device
        ids = torch.nn.functional.pad(tokens.ids, (0, capacity - tokens.ids.shape[1]))  # cut where it is negative
        self.ids, self._ends = hold("tokens.ids", ids), hold("tokens.ends", tokens.ends)
        self.ended = hold("tokens.ended", torch.tensor(tokens.done, device=device))
        self.steps = cached_arange(capacity, device)

    @property
    def is_even(self) -> bool:
        return False  # nothing is sliced at a length

    @property
    def longest(self) -> int:
        return self.ids.shape[1]  # all columns

    def write(self, tokens: Tensor) -> None:
        self.ids.scatter_(1, self.ends[:, None] + self.steps[: tokens.shape[1]], tokens)  # [B, k]

    def extend(self, new: NewTokens) -> None:
        """Count the first tokens of those written last to every sequence, on the device."""
        self.ends.add_(new.on_device)

    def end(self, done: list[bool]) -> None:
        """Note on the device which sequences have ended, where the host decided it."""
        self.ended.copy_(torch.tensor(done))

    def keep(self, new: NewTokens) -> None:
        """Count on the host what `extend` counts."""
        self.lengths = [length + count for length, count in zip(self.lengths, new.counts)]

    def columns(self, start: int, stop: int, pad: int, lengths: list[int] | None = None) -> Tensor:
        return super().columns(start, stop, pad, lengths or self.lengths)


@dataclass
class Graphs:
    """What of a call's cycles was recorded and replayed, as with `cache_implementation="static"` on an accelerator.

    Attributes:
        replayed: Cycles that were replayed, by region: `"cycle"`, or `"forward"` where draft and forward were.
        recorded: Recordings that this call made; 0 where an earlier one had made them.
        reasons: Why a region was not replayed, by region.
        buffer_bytes: Memory of the buffers that stay for the next call (`tokenahead.free_buffers`).
        buffers_made: Buffers that this call allocated.
    """

    replayed: dict[str, int] = field(default_factory=dict)
    recorded: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    buffer_bytes: int = 0
    buffers_made: int = 0


def acceptance_by_position(accepted: Sequence[int], length: int) -> list[float]:
    """Return, for draft positions 1 .. length, the share of all verifications that accept so many drafts."""
    return [sum(count >= position for count in accepted) / len(accepted) for position in range(1, length + 1)]


@dataclass
class Speculation:
    """Counts and times of one call of `generate`.

    Attributes:
        rows_accepted: Per sequence, accepted drafts of each verification (the prefill verifies none).
        rows_drafts: Per sequence, the drafted ids of each verification.
        backbone_calls: Forward passes of the backbone, the prefill included.
        new_tokens: Tokens generated, over all sequences.
        cycle_seconds: Time of all cycles, of what follows the prompt's own forward.
        draft_seconds: Time spent on drafting (on an accelerator: on launching it).
        verify_seconds: Time spent on verification and on waiting for the backbone's result.
        rows_depths: Per sequence, the longest path of each draft where drafts are trees; empty: all are chains.
        vocabulary_coverage: The share of the new tokens that a smaller draft vocabulary holds; None: it holds all.
        schedule: What chose the lengths of drafts: a `num_assistant_tokens_schedule`.
        graphs: What was recorded and replayed; None: the call asked for no static cache.
    """

    rows_accepted: list[list[int]]
    rows_drafts: list[list[list[int]]]
    backbone_calls: int = 0
    new_tokens: int = 0
    cycle_seconds: float = field(default=0.0, compare=False)
    draft_seconds: float = field(default=0.0, compare=False)
    verify_seconds: float = field(default=0.0, compare=False)
    rows_depths: list[list[int]] = field(default_factory=list)
    vocabulary_coverage: float | None = None
    schedule: str = "constant"
    graphs: Graphs | None = field(default=None, compare=False)

    def count(
        self, accepted: list[int], new: list[int], done: list[bool], drafts: list[list[int]], depths: list[int]
    ) -> None:
        """Add a verification: accepted drafts per sequence (-1: it was not asked), new tokens, and which have ended."""
        for index, draft in enumerate(drafts):
            if accepted[index] >= 0:
                self.rows_accepted[index].append(min(accepted[index], new[index] - (not done[index])))
                self.rows_drafts[index].append(draft)
                self.rows_depths[index].append(depths[index])

    def time(self, started: float, drafted: float, called: float, ended: float) -> None:
        """Add a cycle by its seconds: when it began, had its draft, had called the backbone, and ended."""
        self.cycle_seconds += ended - started
        self.draft_seconds += drafted - started
        self.verify_seconds += ended - called

    def cut(self, new_tokens: list[int]) -> None:
        """Leave the verifications of the first `new_tokens[b]` new tokens of sequence b."""
        for accepted, drafts, depths, count in zip(self.rows_accepted, self.rows_drafts, self.rows_depths, new_tokens):
            ends = list(accumulate((1 + each for each in accepted), initial=1))
            used = sum(end < count for end in ends[:-1])
            for of_sequence in (accepted, drafts, depths):
                del of_sequence[used:]
            if accepted:
                accepted[-1] = min(accepted[-1], count - ends[used - 1])

    @property
    def accepted(self) -> list:
        """Accepted drafts per verification: a list of ints for one sequence, else one list per sequence."""
        return self.rows_accepted[0] if len(self.rows_accepted) == 1 else self.rows_accepted

    @property
    def drafts(self) -> list:
        """Drafted ids per verification: a list of lists for one sequence, else one such list per sequence."""
        return self.rows_drafts[0] if len(self.rows_drafts) == 1 else self.rows_drafts

    @property
    def accepted_by_position(self) -> list[float]:
        """For draft positions 1, 2, ...: the share of all verifications that accept so many drafts; it falls."""
        return acceptance_by_position([*chain.from_iterable(self.rows_accepted)], max(self.lengths, default=0))

    @property
    def by_hundreds(self) -> list[dict[str, int]]:
        """For new tokens 0 to 99, 100 to 199, ... of the answers: `verifications` of all sequences whose drafts begin
        there, and the tokens that these `drafted` (of a tree, along its longest path) and `accepted`."""
        found = defaultdict[int, Counter[str]](lambda: Counter(verifications=0, drafted=0, accepted=0))
        depths = self.rows_depths or [map(len, drafts) for drafts in self.rows_drafts]
        for row, lengths in zip(self.rows_accepted, depths):
            starts = accumulate((1 + count for count in row), initial=1)  # the prefill gave the first token
            for start, accepted, drafted in zip(starts, row, lengths):
                found[start // 100].update(verifications=1, drafted=drafted, accepted=accepted)
        return [dict(found[at]) for at in range(max(found, default=-1) + 1)]

    @property
    def lengths(self) -> dict[int, int]:
        """How many verifications had drafts of each length, 0 among them: what was chosen, within what there was."""
        depths = self.rows_depths or [map(len, drafts) for drafts in self.rows_drafts]
        return dict(sorted(Counter(chain.from_iterable(depths)).items()))

    @property
    def counts(self) -> dict[str, int]:
        """What adds up over calls: new tokens, calls as in `rows_calls`, verifications, accepted drafts."""
        accepted = list(chain.from_iterable(self.rows_accepted))
        calls = {"calls": sum(self.rows_calls), "verifications": len(accepted), "accepted": sum(accepted)}
        return {"tokens": self.new_tokens} | calls

    @property
    def rows_calls(self) -> list[int]:
        """Per sequence, the forward passes before its end, the prefill included."""
        return [1 + len(accepted) for accepted in self.rows_accepted]

    @property
    def tokens_per_call(self) -> float:
        """New tokens per sequence and backbone call; a sequence that has ended counts in no further call."""
        return self.new_tokens / sum(self.rows_calls)
