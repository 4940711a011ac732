"""What speculation did in one call of `generate`.

Scores, logits and hidden states of a call, one entry per generated token, as transformers returns them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

if TYPE_CHECKING:  # every model imports this module by way of its package
    from ..target.target import TargetOutput


@dataclass
class Speculation:
    """Counts and times of one call of `generate`.

    Attributes:
        rows_accepted: Per row, accepted drafts of each verification (the prefill verifies none).
        rows_drafts: Per row, the drafted ids of each verification.
        backbone_calls: Forward passes of the backbone, the prefill included.
        new_tokens: Tokens generated, over all sequences.
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
        """Accepted drafts per verification: a list of ints for one row, else one list per sequence."""
        return self.rows_accepted[0] if len(self.rows_accepted) == 1 else self.rows_accepted

    @property
    def drafts(self) -> list:
        """Drafted ids per verification: a list of lists for one row, else one such list per sequence."""
        return self.rows_drafts[0] if len(self.rows_drafts) == 1 else self.rows_drafts

    @property
    def accepted_by_position(self) -> list[float]:
        """For draft positions 1, 2, ...: the share of all verifications that accept so many drafts; it falls."""
        depths = self.rows_depths or [[len(draft) for draft in row] for row in self.rows_drafts]
        longest = max((depth for row in depths for depth in row), default=0)
        accepted = [count for row in self.rows_accepted for count in row]
        return [sum(count >= position for count in accepted) / len(accepted) for position in range(1, longest + 1)]

    @property
    def tokens_per_call(self) -> float:
        """New tokens per sequence and backbone call."""
        return self.new_tokens / len(self.rows_accepted) / max(1, self.backbone_calls)


@dataclass
class GenerateSpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: transformers' output, and the statistics.

    Attributes:
        speculation: Counts and times of this call.
    """

    speculation: Speculation | None = None


Entries = tuple[torch.Tensor, ...] | None


class Records:
    """Collects what `output_scores`, `output_logits` and `output_hidden_states` ask for, and nothing else.

    Args:
        config: Prepared generation config.
        batch: Number of rows.
    """

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        returned = bool(config.return_dict_in_generate)
        self.wanted = {
            "scores": returned and bool(config.output_scores),
            "logits": returned and bool(config.output_logits),
            "hidden": returned and bool(config.output_hidden_states),
        }
        self.rows: dict[str, list[list[torch.Tensor]]] = {name: [[] for _ in range(batch)] for name in self.wanted}
        self.prompt: tuple[torch.Tensor | None, ...] | None = None

    def add(self, fed: TargetOutput, scores: torch.Tensor, counts: list[int], is_prefill: bool = False) -> None:
        """Takes the first `counts[b]` steps of sequence b.

        Args:
            fed: Raw logits [B, k, v] and hidden states per layer [B, k, D]; the prompt's [B, L, D] from the prefill.
            scores: [B, k, v] processed scores.
            counts: Steps per sequence.
            is_prefill: Whether the hidden states are the prompt's, which make the first entry.
        """
        values = {"scores": scores, "logits": fed.logits}
        if self.wanted["hidden"] and is_prefill:
            self.prompt = fed.hidden_states
        elif self.wanted["hidden"]:
            values["hidden"] = torch.stack([state for state in fed.hidden_states or () if state is not None], dim=2)
        for name, value in values.items():
            if self.wanted[name]:
                for row, steps in zip(self.rows[name], [v[:c] for v, c in zip(value, counts)]):
                    row.extend(steps.unbind(0))

    def cut(self, generated: list[int]) -> None:
        """Drops what was verified and then not kept: sequence b keeps its first `generated[b]` steps."""
        for name in self.wanted:
            for row, count in zip(self.rows[name], generated):
                del row[max(count - (name == "hidden"), 0) :]

    def scores_of(self, count: int) -> Entries:
        """Scores of the first `count` steps of every sequence, as stopping criteria are shown them; None if not
        recorded."""
        if not self.wanted["scores"]:
            return None
        rows = self.rows["scores"]
        return tuple(_stack([row[step] if step < len(row) else None for row in rows], None) for step in range(count))

    def per_token(self, generated: list[int], pad: int) -> tuple[Entries, Entries, tuple | None]:
        """scores and logits as tuples of [B, v], hidden states as a tuple (per token) of tuples (per layer).

        A sequence that ended early has, from then on, the distribution that puts `pad` for certain, and hidden states
        of 0.
        """
        longest = max(generated)
        scores, logits = (self._entries(name, longest, pad) for name in ("scores", "logits"))
        if not self.wanted["hidden"]:
            return scores, logits, None
        steps = [
            _stack([row[step] if step < len(row) else None for row in self.rows["hidden"]], None)
            for step in range(longest - 1)
        ]
        return scores, logits, (self.prompt, *(tuple(step[:, None].unbind(2)) for step in steps))

    def _entries(self, name: str, longest: int, pad: int) -> Entries:
        if not self.wanted[name]:
            return None
        rows = self.rows[name]
        return tuple(_stack([row[step] if step < len(row) else None for row in rows], pad) for step in range(longest))


def _stack(entries: list[torch.Tensor | None], pad: int | None) -> torch.Tensor:
    example = next(entry for entry in entries if entry is not None)
    filler = torch.zeros_like(example)
    if pad is not None:
        filler = torch.full_like(example, float("-inf"))
        if pad < len(filler):  # a padding id outside the vocabulary has no score
            filler[pad] = 0
    return torch.stack([filler if entry is None else entry for entry in entries])
