"""Small blocks between a hidden state and an unembedding (Medusa, Hydra, blockwise parallel decoding)."""

from __future__ import annotations

import torch
from torch import nn
from transformers import initialization as init


class ResidualBlock(nn.Module):
    """u + SiLU(A u + a), with A = 0 at the start (Medusa).

    Args:
        width: d.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., d] to [..., d]."""
        return states + nn.functional.silu(self.linear(states))

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """A = 0 and a uniform in +-1/sqrt(d), whatever `std` is."""
        _reset(self.linear)


class ConcatBlock(nn.Module):
    """B u + b + SiLU(A u + a) from a wider u (Hydra); at the start B picks u's first `width` numbers.

    Args:
        inputs: Width of u.
        width: d.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear, self.res_connection = nn.Linear(inputs, width), nn.Linear(inputs, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., d]."""
        return self.res_connection(states) + nn.functional.silu(self.linear(states))

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """A = 0, a uniform in +-1/sqrt(inputs), B = [I, 0] and b = 0, whatever `std` is."""
        _reset(self.linear)
        init.copy_(self.res_connection.weight, torch.eye(*self.res_connection.weight.shape))
        init.zeros_(self.res_connection.bias)


class FeedForwardBlock(nn.Module):
    """u + C relu(A u + a) + c, with C = 0 and c = 0 at the start (Stern et al. 2018).

    Args:
        width: d.
        inner: Width of the hidden layer.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., d] to [..., d]."""
        return states + self.down(nn.functional.relu(self.up(states)))

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """The second matrix and its bias become 0; the first stays drawn from N(0, std^2)."""
        init.zeros_(self.down.weight)
        init.zeros_(self.down.bias)


class Repeated(nn.ModuleList):
    """Blocks one after the other; where there is only one for several places, it is used again (tied weights).

    Args:
        blocks: The blocks that exist.
        places: How often a block is applied.
    """

    def __init__(self, blocks: list[nn.Module], places: int) -> None:
        super().__init__(blocks)
        self.places = places

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """[..., d] to [..., d]."""
        for place in range(self.places):
            states = self[min(place, len(self) - 1)](states)
        return states


def repeated(count: int, tied: bool, width: int) -> Repeated:
    """`count` residual blocks, of which one exists where they are tied."""
    return Repeated([ResidualBlock(width) for _ in range(min(count, 1) if tied else count)], count)


def _reset(linear: nn.Linear) -> None:
    init.zeros_(linear.weight)
    bound = linear.in_features**-0.5
    init.uniform_(linear.bias, -bound, bound)
