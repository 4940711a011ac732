"""From hidden states to logits, as the main model's own forward does it behind its decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..wrapped_models import call


class Readout:
    """The head and what a family does to its logits: z = factor W h / divisor, and then cap tanh(z / cap).

    Greedy drafts do not feel it; losses, confidences and the distributions that drafts are drawn from do.

    Args:
        main: The main model, whose head is looked up at every call.
    """

    def __init__(self, main: PreTrainedModel) -> None:
        config = main.config
        self.main = main
        self.divisor = _number(config, "logits_scaling")
        self.factor = _number(config, "logit_scale")
        self.cap = _number(config, "final_logit_softcapping")

    def parameters(self) -> Iterator[nn.Parameter]:
        """The head's."""
        return self.main.get_output_embeddings().parameters()

    def modules(self) -> Iterator[nn.Module]:
        """The head's."""
        return self.main.get_output_embeddings().modules()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of states [..., H] that went through their norm."""
        return self.finish(call(self.main.get_output_embeddings(), states))

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """What the family does to logits that leave the head, of all tokens or of some."""
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.factor is not None:
            logits = logits * self.factor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return None if value is None else float(value)
