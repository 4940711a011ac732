"""What speculation did in one call of `generate`."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers.generation import GenerateDecoderOnlyOutput


@dataclass
class Speculation:
    """Counts and times of one call of `generate`.

    Attributes:
        rows_accepted: Per row, accepted drafts of each verification (the prefill verifies none).
        rows_drafts: Per row, the drafted ids of each verification.
        backbone_calls: Forward passes of the backbone, the prefill included.
        new_tokens: Tokens generated, over all rows.
        draft_seconds: Time spent on drafting (on an accelerator: on launching it).
        verify_seconds: Time spent on verification and on waiting for the backbone's result.
        rows_depths: Per row, the longest path of each draft where drafts are trees; empty: all drafts are chains.
        vocabulary_coverage: The share of the new tokens that a smaller draft vocabulary holds; None: drafts may be of
            any token.
    """

    rows_accepted: list[list[int]]
    rows_drafts: list[list[list[int]]]
    backbone_calls: int = 0
    new_tokens: int = 0
    draft_seconds: float = field(default=0.0, compare=False)
    verify_seconds: float = field(default=0.0, compare=False)
    rows_depths: list[list[int]] = field(default_factory=list)
    vocabulary_coverage: float | None = None

    @property
    def accepted(self) -> list:
        """Accepted drafts per verification: a list of ints for one row, else one list per row."""
        return self.rows_accepted[0] if len(self.rows_accepted) == 1 else self.rows_accepted

    @property
    def drafts(self) -> list:
        """Drafted ids per verification: a list of lists for one row, else one such list per row."""
        return self.rows_drafts[0] if len(self.rows_drafts) == 1 else self.rows_drafts

    @property
    def accepted_by_position(self) -> list[float]:
        """For draft positions 1, 2, ...: the share of verifications that drafted so far and accepted so far."""
        depths = self.rows_depths or [[len(draft) for draft in row] for row in self.rows_drafts]
        pairs = [pair for row in zip(self.rows_accepted, depths) for pair in zip(*row)]
        longest = max((drafted for _, drafted in pairs), default=0)
        shares = []
        for position in range(1, longest + 1):
            reached = [accepted >= position for accepted, drafted in pairs if drafted >= position]
            shares.append(sum(reached) / len(reached))
        return shares

    @property
    def tokens_per_call(self) -> float:
        """New tokens per row and backbone call."""
        return self.new_tokens / len(self.rows_accepted) / max(1, self.backbone_calls)


@dataclass
class GenerateSpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: transformers' output, and the statistics.

    Attributes:
        speculation: Counts and times of this call.
    """

    speculation: Speculation | None = None
