"""Parts of Medusa and Hydra heads: blocks between a hidden state and an unembedding, and unembeddings."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...configuration.heads import MTPHeadConfig
from ...generation.tensors.tensor_files import Tensors
from ..common.backbone_parts import BackboneParts, required
from .ff import FFHead


class ResidualBlock(nn.Module):
    """u + SiLU(A u + a), with A = 0 at the start (Medusa)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        """Map [..., d] to [..., d]."""
        return states + nn.functional.silu(self.linear(states))

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Set A = 0 and draw a from +-1/sqrt(d); `std` is not read."""
        _reset(self.linear)


class ConcatBlock(nn.Module):
    """B u + b + SiLU(A u + a) from a wider u (Hydra); at the start B picks u's first `width` numbers."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear, self.res_connection = nn.Linear(inputs, width), nn.Linear(inputs, width)

    def forward(self, states: Tensor) -> Tensor:
        """Map [..., inputs] to [..., d]."""
        return self.res_connection(states) + nn.functional.silu(self.linear(states))

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Set A = 0, B = [I, 0] and b = 0, and draw a from +-1/sqrt(inputs); `std` is not read."""
        _reset(self.linear)
        init.copy_(self.res_connection.weight, torch.eye(*self.res_connection.weight.shape))
        init.zeros_(self.res_connection.bias)


class FeedForwardBlock(nn.Module):
    """u + C relu(A u + a) + c, with C = 0 and c = 0 at the start (Stern et al. 2018)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, states: Tensor) -> Tensor:
        """Map [..., d] to [..., d]."""
        return states + self.down(nn.functional.relu(self.up(states)))

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Set the second matrix and its bias to 0; the first is drawn from N(0, std^2)."""
        init.zeros_(self.down.weight)
        init.zeros_(self.down.bias)


class Repeated(nn.ModuleList):
    """Blocks one after the other, `count` times; a single one is used repeatedly (tied weights)."""

    def __init__(self, blocks: list[nn.Module], count: int) -> None:
        super().__init__(blocks)
        self.count = count

    def forward(self, states: Tensor) -> Tensor:
        """Map [..., d] to [..., d]."""
        for index in range(self.count):
            states = self[min(index, len(self) - 1)](states)
        return states


def repeated(count: int, tied: bool, width: int) -> Repeated:
    """Return `count` residual blocks; tied ones are one module."""
    return Repeated([ResidualBlock(width) for _ in range(min(count, 1) if tied else count)], count)


class OwnUnembeddings(nn.Module):
    """A matrix [V, d] per head, and optionally a bias [V]."""

    def __init__(self, count: int, hidden_size: int, vocab_size: int, bias: bool = False) -> None:
        super().__init__()
        self.heads = nn.ModuleList(FFHead(hidden_size, vocab_size, 1) for _ in range(count))
        self.bias = nn.Parameter(torch.zeros(count, vocab_size)) if bias else None

    def forward(self, states: Tensor, index: int) -> Tensor:
        """Return the logits [..., V] of head `index` (from 0) at states [..., d]."""
        logits = self.heads[index](states)[..., 0, :]  # [..., V]
        return logits if self.bias is None else logits + self.bias[index]

    @torch.no_grad()
    def start_from(self, backbone: BackboneParts) -> None:
        """Copy the backbone's unembedding, in any form: its output for unit vectors."""
        for head in self.heads.children():
            weight = cast(Tensor, head.weight)
            unit = torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)  # [d, d]
            weight.copy_(backbone.unembed(unit).T)  # [V, d]


class BlockHead(nn.Module):
    """What Medusa and Hydra heads share: position 1 is the backbone's own distribution; `unembeddings` of the others.

    Args:
        config: Head options: `window`, `unembedding`.
        hidden_size: d.
        vocab_size: V.
        bias: Whether the heads' own unembeddings have biases.
    """

    def __init__(self, config: MTPHeadConfig, hidden_size: int, vocab_size: int, bias: bool = False) -> None:
        super().__init__()
        self.vocab_size, owns, count = vocab_size, config.unembedding == "own", config.num_drafts
        self.unembeddings = OwnUnembeddings(count, hidden_size, vocab_size, bias) if owns else None

    def unembed(self, states: Tensor, index: int, backbone: BackboneParts | None) -> Tensor:
        """Return the logits [..., V] of head `index` (from 0) at states [..., d]."""
        return required(backbone).unembed(states) if self.unembeddings is None else self.unembeddings(states, index)

    def start_from(self, backbone: BackboneParts) -> None:
        """Copy the backbone's unembedding into every own one."""
        if self.unembeddings is not None:
            self.unembeddings.start_from(backbone)


def untied(tensors: Tensors, heads: int, blocks: int) -> tuple[bool, Tensors]:
    """Return whether the blocks of every head are copies of one, and the tensors without the copies."""
    copies = _copies(heads, blocks)
    pairs = [(tensors.get(first), tensors.get(copy)) for copy, first in copies.items()]
    if not pairs or not all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs):
        return False, tensors
    return True, {name: tensor for name, tensor in tensors.items() if name not in copies}


def with_copies(tensors: Tensors, heads: int, blocks: int) -> Tensors:
    """Revert `untied`: return the tensors with a block for every j."""
    return {copy: tensors[first] for copy, first in _copies(heads, blocks).items() if first in tensors} | tensors


def _copies(heads: int, blocks: int) -> dict[str, str]:
    """Return the names of the blocks j > 0 of all heads k, and those of the first blocks."""
    indices = ((k, j, part) for k in range(heads) for j in range(1, blocks) for part in ("weight", "bias"))
    return {f"blocks.{k}.{j}.linear.{part}": f"blocks.{k}.0.linear.{part}" for k, j, part in indices}


def _reset(linear: nn.Linear) -> None:
    init.zeros_(linear.weight)
    bound = linear.in_features**-0.5
    init.uniform_(linear.bias, -bound, bound)
