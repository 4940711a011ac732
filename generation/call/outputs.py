"""The statistics of a call of `generate`; its scores, logits and hidden states per token, as in transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

if TYPE_CHECKING:  # every model imports this module by way of its package
    from ..backbone.target import TargetOutput


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


Entries = tuple[Tensor, ...] | None


class Records:
    """Collects the steps that `output_scores`, `output_logits` and `output_hidden_states` of a prepared config
    request."""

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        requested = {"scores": config.output_scores, "logits": config.output_logits}
        requested["hidden"] = config.output_hidden_states
        is_returned = bool(config.return_dict_in_generate)
        self.steps: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in range(batch)] for name, value in requested.items() if is_returned and value
        }
        self.prompt: tuple[Tensor | None, ...] | None = None

    def add(self, outputs: TargetOutput, scores: Tensor, counts: list[int], is_prefill: bool = False) -> None:
        """Add the first `counts[b]` steps of sequence b: logits and scores [B, k, v], hidden states per layer [B, k,
        D].

        In the prefill, hidden states are the prompt's [B, L, D], which make the first entry.
        """
        values = {"scores": scores, "logits": outputs.logits}
        if "hidden" in self.steps and is_prefill:
            self.prompt = outputs.hidden_states
        elif "hidden" in self.steps:
            values["hidden"] = torch.stack([state for state in outputs.hidden_states or () if state is not None], dim=2)
        for name in self.steps.keys() & values.keys():
            for steps, value, count in zip(self.steps[name], values[name], counts):
                steps.extend(value[:count].unbind(0))

    def cut(self, generated: list[int]) -> None:
        """Leave the first `generated[b]` steps of sequence b: drafts after its end were verified, too."""
        for name, sequences in self.steps.items():
            for steps, count in zip(sequences, generated):
                del steps[max(count - (name == "hidden"), 0) :]

    def scores_of(self, count: int) -> Entries:
        """Return the scores of the first `count` steps of every sequence for stopping criteria; None: not recorded."""
        return self._entries("scores", count, None)

    def per_token(self, generated: list[int], pad: int) -> tuple[Entries, Entries, tuple | None]:
        """Return scores and logits as tuples of [B, v], hidden states as a tuple per token of tuples per layer.

        A sequence that ended early has, from then on, the distribution that puts `pad` for certain, and hidden states
        of 0.
        """
        longest = max(generated)
        scores, logits = (self._entries(name, longest, pad) for name in ("scores", "logits"))
        hidden = self._entries("hidden", longest - 1, None)
        if hidden is None:
            return scores, logits, None
        return scores, logits, (self.prompt, *(tuple(step[:, None].unbind(2)) for step in hidden))

    def _entries(self, name: str, count: int, pad: int | None) -> Entries:
        if name not in self.steps:
            return None
        sequences = self.steps[name]
        return tuple(
            _stack([steps[index] if index < len(steps) else None for steps in sequences], pad) for index in range(count)
        )


def _stack(entries: list[Tensor | None], pad: int | None) -> Tensor:
    example = next(entry for entry in entries if entry is not None)
    filler = torch.zeros_like(example)
    if pad is not None:
        filler = torch.full_like(example, float("-inf"))
        if pad < len(filler):  # a padding id outside the vocabulary has no score
            filler[pad] = 0
    return torch.stack([filler if entry is None else entry for entry in entries])
