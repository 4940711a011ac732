"""Parts of modules of models with hyper-connections, whose residual is several streams of hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class OneStream(nn.Module):
    """A substitute for a hyper-connection in a layer with one stream, to which the layer's output is added.

    Args:
        mixes: The layer also multiplies its streams with a matrix.
    """

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes = mixes

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        """Return weights [B, R, 1] of the output, all 1, and the stream [B, R, H] of streams [B, R, 1, H].

        Between them is the matrix [B, R, 1, 1], 1, where streams are mixed.
        """
        ones = streams.new_ones(streams.shape[:-1])
        return (ones, ones[..., None], streams.squeeze(-2)) if self.mixes else (ones, streams.squeeze(-2))


class StreamProjection(nn.Module):
    """Linear maps of an embedding and of N streams of a hidden state; the embedding's is added to every stream's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.e_proj, self.h_proj = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)

    def forward(self, joined: Tensor) -> Tensor:
        """Map [B, R, H + N H], the embedding first, to [B, R, N H]."""
        embeds, *streams = joined.split(self.e_proj.in_features, dim=-1)
        added = self.e_proj(embeds)
        return torch.cat([self.h_proj(stream) + added for stream in streams], dim=-1)


class StreamHead(nn.Module):
    """The head's input from N streams: a mixer makes one of them (`DeepseekV4HyperHead`), a norm follows."""

    def __init__(self, mixer: nn.Module, norm: nn.Module, count: int) -> None:
        super().__init__()
        self.hc_head, self.out_norm, self.count = mixer, norm, count

    def forward(self, streams: Tensor) -> Tensor:
        """Map [..., N H] to [..., H]."""
        mixed = self.hc_head(streams.reshape(1, -1, self.count, streams.shape[-1] // self.count))
        return self.out_norm(mixed).view(*streams.shape[:-1], mixed.shape[-1])
