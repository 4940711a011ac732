"""Independent heads of residual blocks on the last hidden state (Medusa; blockwise parallel decoding)."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ...configuration import MTPHeadConfig
from .backbone_parts import BackboneParts, backbone_parts
from .blocks import FeedForwardBlock, Repeated, repeated
from .unembeddings import OwnUnembeddings, SharedUnembedding, next_token_logits


class MedusaHead(nn.Module):
    """Head k = 1..n-1 predicts the token k + 1 ahead: W_k block(...block(h)); position 1 is the backbone's own
    distribution.

    Args:
        config: Head options: `window`, `num_blocks`, `tied_blocks`, `unembed`, `block`, `block_size`.
        hidden_size: d.
        vocab_size: V.
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, count = vocab_size, config.window - 1
        self.blocks = nn.ModuleList(_blocks(config, hidden_size) for _ in range(count))
        own = config.unembed == "own"
        self.unembeddings = OwnUnembeddings(count, hidden_size, vocab_size) if own else SharedUnembedding()

    def forward(
        self,
        hidden_states: torch.Tensor,
        backbone: BackboneParts | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """`leaf_logits` [..., n, 1, V] of last hidden states [..., d], or those of the places start .. stop - 1.

        Raises:
            RuntimeError: No backbone was given.
        """
        places = range(len(self.blocks) + 1)[start:stop]
        logits = [self._logits(place, hidden_states, backbone) for place in places]
        dtype = torch.promote_types(logits[0].dtype, torch.float32)
        return {"leaf_logits": torch.stack([part.to(dtype) for part in logits], -2).unsqueeze(-2)}

    def _logits(self, place: int, hidden_states: torch.Tensor, backbone: BackboneParts | None) -> torch.Tensor:
        if place == 0:
            return next_token_logits(hidden_states, backbone)
        return self.unembeddings(self.blocks[place - 1](hidden_states), place - 1, backbone)

    def start_from(self, backbone: PreTrainedModel) -> None:
        """Every unembedding starts as the backbone's."""
        self.unembeddings.start_from(backbone_parts(backbone))


def _blocks(config: MTPHeadConfig, hidden_size: int) -> Repeated:
    if config.block == "residual":
        return repeated(config.num_blocks, config.tied_blocks, hidden_size)
    inner = config.block_size or 4 * hidden_size
    return Repeated([FeedForwardBlock(hidden_size, inner) for _ in range(config.num_blocks)], config.num_blocks)
