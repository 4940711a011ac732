"""Scores, logits and hidden states per token, as transformers returns them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..contract import TargetOutput

Entries = tuple[Tensor, ...] | None


class Records:
    """Collects the steps that `output_scores`, `output_logits` and `output_hidden_states` of a config request."""

    copies = False  # whether the next cycle writes to the tensors of this one

    def __init__(self, config: GenerationConfig, batch: int) -> None:
        requested = {"scores": config.output_scores, "logits": config.output_logits}
        requested["hidden"] = config.output_hidden_states
        is_returned = bool(config.return_dict_in_generate)
        self.steps: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in range(batch)] for name, value in requested.items() if is_returned and value
        }
        self.prompt: tuple[Tensor | None, ...] | None = None

    def add(self, outputs: TargetOutput, scores: Tensor, counts: list[int], is_prefill: bool = False) -> None:
        """Add the first `counts[b]` steps of sequence b: logits and scores [B, k, v], hidden states [B, k, D]."""
        values = {"scores": scores, "logits": outputs.logits}
        if "hidden" in self.steps and is_prefill:
            self.prompt = outputs.hidden_states
        elif "hidden" in self.steps:
            values["hidden"] = torch.stack([state for state in outputs.hidden_states or () if state is not None], dim=2)
        for name in self.steps.keys() & values.keys():
            for steps, value, count in zip(self.steps[name], values[name], counts):
                steps.extend((value[:count].clone() if self.copies else value[:count]).unbind(0))

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

        A sequence that ended early has, from then on, the one-hot distribution of `pad`, and hidden states of 0.
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
    return torch.stack([filler if entry is None else entry for entry in entries])  # [B, ...]
