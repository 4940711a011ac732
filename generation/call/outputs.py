"""The statistics of a call of `generate`, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain

from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class Graphs:
    """What of a call's cycles was recorded and replayed, as with `cache_implementation="static"` on an accelerator.

    Attributes:
        replayed: Cycles that were replayed, by region: `"cycle"` where all of it was, `"forward"` where draft and
            forward were.
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
    graphs: Graphs | None = field(default=None, compare=False)

    def count(self, accepted: list[int], new: list[int], done: list[bool], drafts: list[list[int]], depth: int) -> None:
        """Add a verification: accepted drafts per sequence (-1: it was not asked), new tokens, and which have ended."""
        for index, draft in enumerate(drafts):
            if accepted[index] >= 0:
                self.rows_accepted[index].append(min(accepted[index], new[index] - (not done[index])))
                self.rows_drafts[index].append(draft)
                self.rows_depths[index].append(min(depth, len(draft)))

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
        depths = self.rows_depths or [map(len, drafts) for drafts in self.rows_drafts]
        longest = max(chain.from_iterable(depths), default=0)
        accepted = list(chain.from_iterable(self.rows_accepted))
        return [sum(count >= position for count in accepted) / len(accepted) for position in range(1, longest + 1)]

    @property
    def rows_calls(self) -> list[int]:
        """Per sequence, the forward passes before its end, the prefill included."""
        return [1 + len(accepted) for accepted in self.rows_accepted]

    @property
    def tokens_per_call(self) -> float:
        """New tokens per sequence and backbone call; a sequence that has ended counts in no further call."""
        return self.new_tokens / sum(self.rows_calls)


@dataclass
class GenerateSpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: transformers' output, and the statistics.

    Attributes:
        speculation: Counts and times of this call.
    """

    speculation: Speculation | None = None
