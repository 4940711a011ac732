"""From the states of several heads to logits: with a matrix per head, or with the backbone's own."""

from __future__ import annotations

import torch
from torch import nn

from .backbone_parts import BackboneParts
from .ff import FFHead


class OwnUnembeddings(nn.Module):
    """A matrix [V, d] per head, and perhaps a bias.

    Args:
        count: K heads.
        hidden_size: d.
        vocab_size: V.
        bias: Whether logits get a bias [V] per head.
    """

    def __init__(self, count: int, hidden_size: int, vocab_size: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(FFHead(hidden_size, vocab_size, 1) for _ in range(count))
        self.bias = nn.Parameter(torch.zeros(count, vocab_size)) if bias else None

    def forward(self, states: torch.Tensor, index: int, backbone: BackboneParts | None = None) -> torch.Tensor:
        """Logits [..., V] of head `index` (from 0) at states [..., d]; the backbone is not needed."""
        logits = self.heads[index](states)[..., 0, :]
        return logits if self.bias is None else logits + self.bias[index]

    @torch.no_grad()
    def start_from(self, backbone: BackboneParts) -> None:
        """Copies the backbone's unembedding, whatever form it has: what it makes of the unit vectors."""
        weight = self.heads[0].weight
        unit = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
        for head in self.heads:
            head.weight.copy_(backbone.unembed(unit).T)


class SharedUnembedding(nn.Module):
    """The backbone's unembedding for every head: no parameters."""

    def forward(self, states: torch.Tensor, index: int, backbone: BackboneParts | None = None) -> torch.Tensor:
        """Logits [..., V] at states [..., d].

        Raises:
            RuntimeError: No backbone was given.
        """
        if backbone is None:
            raise RuntimeError("these heads share their backbone's unembedding: call attach(backbone) first")
        return backbone.unembed(states)

    def start_from(self, backbone: BackboneParts) -> None:
        """Nothing to copy."""


def next_token_logits(hidden_states: torch.Tensor, backbone: BackboneParts | None) -> torch.Tensor:
    """Position 1 of heads that leave it to the backbone: its logits [..., V] of last hidden states [..., d].

    Raises:
        RuntimeError: No backbone was given.
    """
    if backbone is None:
        raise RuntimeError(
            "position 1 of these heads is their backbone's own distribution: call attach(backbone) first"
        )
    return backbone.unembed(hidden_states)
