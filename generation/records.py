"""Scores, logits and hidden states of a call, one entry per generated token, as transformers returns them."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from .targets import TargetOutput

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
        self.prompt: tuple[torch.Tensor, ...] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anything is collected."""
        return any(self.wanted.values())

    def add(self, fed: TargetOutput, scores: torch.Tensor, counts: list[int], is_prefill: bool = False) -> None:
        """Takes the first `counts[b]` steps of row b.

        Args:
            fed: Raw logits [B, k, v] and hidden states per layer [B, k, D]; the prompt's [B, L, D] from the prefill.
            scores: [B, k, v] processed scores.
            counts: Steps per row.
            is_prefill: Whether the hidden states are the prompt's, which make the first entry.
        """
        values = {"scores": scores, "logits": fed.logits}
        if self.wanted["hidden"] and is_prefill:
            self.prompt = fed.hidden_states
        elif self.wanted["hidden"]:
            values["hidden"] = torch.stack(fed.hidden_states, dim=2)
        for name, value in values.items():
            if self.wanted[name]:
                for row, steps in zip(self.rows[name], [v[:c] for v, c in zip(value, counts)]):
                    row.extend(steps.unbind(0))

    def cut(self, generated: list[int]) -> None:
        """Drops what was verified and then not kept: row b keeps its first `generated[b]` steps."""
        for name in self.wanted:
            for row, count in zip(self.rows[name], generated):
                del row[max(count - (name == "hidden"), 0) :]

    def scores_of(self, count: int) -> Entries:
        """Scores of the first `count` steps of every row, as stopping criteria are shown them; None if not recorded."""
        if not self.wanted["scores"]:
            return None
        rows = self.rows["scores"]
        return tuple(_stack([row[step] if step < len(row) else None for row in rows], None) for step in range(count))

    def per_token(self, generated: list[int], pad: int) -> tuple[Entries, Entries, tuple | None]:
        """scores and logits as tuples of [B, v], hidden states as a tuple (per token) of tuples (per layer).

        A row that ended early has, from then on, the distribution that puts `pad` for certain, and hidden states of 0.
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
