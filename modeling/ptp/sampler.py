"""The sampler head of masked prediction (Samragh et al. 2025, arXiv 2507.11851): slots hear of the token before."""

from __future__ import annotations

import torch
from torch import nn


class Sampler(nn.Sequential):
    """MLP([e(x_{i-1}); z_i]): two times Linear, SiLU, LayerNorm, the first from 2 d to d.

    The unembedding of what it gives is the distribution of x_i, so that the distributions of a group of slots are
    sequential.

    Args:
        hidden_size: d.
    """

    def __init__(self, hidden_size: int) -> None:
        blocks = [
            (nn.Linear(width, hidden_size), nn.SiLU(), nn.LayerNorm(hidden_size)) for width in _widths(hidden_size)
        ]
        super().__init__(*(layer for block in blocks for layer in block))

    def forward(self, states: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """What the unembedding reads.

        Args:
            states: [..., d] of the slots, after the final norm.
            before: [..., d] embeddings of the tokens before those that the slots predict; broadcast.

        Returns:
            [..., d] in the dtype of the states; computed in that of the weights.
        """
        both = torch.broadcast_tensors(before, states)
        read = torch.cat([part.to(self[0].weight.dtype) for part in both], dim=-1)
        return super().forward(read).to(states.dtype)


def _widths(hidden_size: int) -> tuple[int, int]:
    return 2 * hidden_size, hidden_size
