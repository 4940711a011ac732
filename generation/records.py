"""Scores, logits and hidden states of a call, one entry per generated token, as transformers returns them."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

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

    def add(
        self,
        logits: torch.Tensor,
        scores: torch.Tensor,
        hidden_states: tuple[torch.Tensor, ...],
        kept: list[int],
        is_prefill: bool = False,
    ) -> None:
        """Keeps the first `kept[b]` positions of row b.

        Args:
            logits: [B, k, v] raw logits.
            scores: [B, k, v] processed scores.
            hidden_states: Per layer [B, k, D]; the prompt's [B, L, D] from the prefill.
            kept: Tokens that each row keeps.
            is_prefill: Whether the hidden states are the prompt's, which make the first entry.
        """
        values = {"scores": scores, "logits": logits}
        if self.wanted["hidden"] and is_prefill:
            self.prompt = hidden_states
        elif self.wanted["hidden"]:
            values["hidden"] = torch.stack(hidden_states, dim=2)
        for name, value in values.items():
            if self.wanted[name]:
                for row, count in zip(self.rows[name], [v[:c] for v, c in zip(value, kept)]):
                    row.extend(count.unbind(0))

    def per_token(self, generated: list[int], pad: int) -> tuple[Entries, Entries, tuple | None]:
        """scores and logits as tuples of [B, v], hidden states as a tuple (per token) of tuples (per layer).

        A row that ended early has, from then on, the law that puts `pad` for certain, and hidden states of 0.
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
