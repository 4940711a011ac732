"""Independent heads that share the frozen unembedding of their backbone."""

from __future__ import annotations

import torch
from torch import nn
from transformers import initialization as init

from .backbone_parts import BackboneParts


class SharedHead(nn.Module):
    """Independent heads on a shared, frozen unembedding W: logits of head i are W A_i h, with A_i = I at the start.

    Memory: N d^2 parameters, whatever the vocabulary.

    Args:
        hidden_size: d.
        vocab_size: V.
        num_heads: N.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__()
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.maps = nn.Parameter(torch.eye(hidden_size).repeat(num_heads, 1, 1))

    def forward(
        self,
        hidden_states: torch.Tensor,
        num_heads: int | None = None,
        backbone: BackboneParts | None = None,
        start: int = 0,
    ) -> torch.Tensor:
        """Logits [..., num_heads - start, V] of hidden states [..., d]; see `FFHead.forward`.

        Raises:
            RuntimeError: No backbone was given whose unembedding could be used.
        """
        if backbone is None:
            raise RuntimeError("these heads share their backbone's unembedding: call attach(backbone) first")
        maps = self.maps[start:num_heads]
        return backbone.unembed(torch.einsum("...d,nde->...ne", hidden_states.to(maps.dtype), maps))

    def resize(self, vocab_size: int, std: float | None) -> None:
        """Changes the number of token ids, with the backbone's unembedding; maps know none."""
        self.vocab_size = vocab_size

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Makes every map the identity, whatever `std` is: then every head is the backbone's own."""
        init.copy_(self.maps, torch.eye(self.maps.shape[-1]).expand_as(self.maps))
