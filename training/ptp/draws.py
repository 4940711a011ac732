"""What a step leaves to chance: where completions start, and where in its interval a uniform lies.

Training draws anew in every step. Evaluation takes points of a low-discrepancy sequence that depend on nothing but a
token's place in its row: the same loss every time, however the data are batched, and no generator is touched.
"""

from __future__ import annotations

import torch

from ...modeling.uniforms import beta_shares

_GOLDEN = 0.6180339887498949
_SILVER = 0.7548776662466927  # the plastic number's inverse: a second sequence, independent of the first


class RandomDraws:
    """From torch's global generator.

    Args:
        concentration: b of the shares z ~ Beta(b, b).
    """

    def __init__(self, concentration: float) -> None:
        self.concentration = concentration

    def keys(self, documents: torch.Tensor) -> torch.Tensor:
        """Sort keys of columns, [B, T] in [0, 1)."""
        return torch.rand(documents.shape, device=documents.device)

    def shares(self, starts: torch.Tensor, length: int) -> torch.Tensor:
        """Shares of intervals, [B, C, length] float64."""
        return beta_shares(starts[..., None].expand(*starts.shape, length), self.concentration)

    def gaps(self, starts: torch.Tensor, most: int) -> torch.Tensor:
        """Whole numbers in 1..most, [B, C]."""
        return torch.randint(1, most + 1, starts.shape, device=starts.device)


class FixedDraws:
    """The same for a token wherever its row stands; shares are uniform.

    Args:
        documents: [B, T] int64, 0 for padding.
    """

    def __init__(self, documents: torch.Tensor) -> None:
        self.places = (documents > 0).long().cumsum(1)

    def keys(self, documents: torch.Tensor) -> torch.Tensor:
        """See `RandomDraws`."""
        return (self.places.double() * _GOLDEN).frac()

    def shares(self, starts: torch.Tensor, length: int) -> torch.Tensor:
        """See `RandomDraws`."""
        order = torch.arange(1, length + 1, device=starts.device)
        first = self.places.gather(1, starts).double()[..., None] * _GOLDEN
        return (first + order * _SILVER).frac()

    def gaps(self, starts: torch.Tensor, most: int) -> torch.Tensor:
        """See `RandomDraws`."""
        return 1 + self.places.gather(1, starts) % most
