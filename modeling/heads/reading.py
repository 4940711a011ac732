"""What leaves read of the tokens before them: biases and moves, and drafts that look them up token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Given:
    """What known tokens add to a distribution whose leaves read them (`context`).

    Attributes:
        bias: [..., m, v], of the leaf logits of the first m positions, known ones included.
        moves: [..., m - 1, r, r], of the logits of transitions; None: they read nothing.
    """

    bias: Tensor
    moves: Tensor | None = None


class TokenReader:
    """The tokens of a draft so far, as the leaves and transitions after them read them.

    Args:
        look_up: From a token [...] to the biases of the next positions, side by side, [..., count v], in memory that
            nobody else reads, and that of the transition after it.
        size: v.

    Attributes:
        bias: [..., v], of the leaf logits of the next position; None: none.
        moves: [..., r, r], of the logits of the transitions after the tokens that are read; None: none.
    """

    def __init__(self, look_up: Callable[[Tensor], tuple[Tensor, Tensor | None]], size: int) -> None:
        self.look_up, self.size, self.bias, self.moves = look_up, size, None, list[Tensor | None]()
        self._ahead: Tensor | None = None  # [..., count v]

    def read(self, token: Tensor, moves: bool = True) -> None:
        """Append a token [...]; one before the window moves no state."""
        rows, move = self.look_up(token)
        is_one = rows.shape[-1] == self.size
        if not is_one and self._ahead is not None:  # what earlier tokens say of the same positions
            rows[..., : -self.size].add_(self._ahead[..., self.size :])
        self._ahead, self.bias = rows, rows if is_one else rows[..., : self.size]
        if moves:
            self.moves.append(move)


class ReadLeaves(Sequence[Tensor]):
    """Leaves [..., r, v] in linear space that read the tokens before them: each is looked up when these are read."""

    def __init__(self, logits: Sequence[Tensor], reader: TokenReader) -> None:
        self.logits, self.reader = logits, reader

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, index: Any) -> Any:
        assert index == len(self.reader.moves)
        logits, bias = self.logits[index], self.reader.bias
        return (logits if bias is None else logits + bias[..., None, :]).softmax(-1)


def raced(scores: Tensor, reader: TokenReader) -> tuple[Tensor, Tensor]:
    """Return the tokens [..., m] of the largest scores [..., m, v] with the bias of those before, and the biases."""
    tokens, found = list[Tensor](), list[Tensor]()
    for row in scores.unbind(-2):
        if tokens:
            reader.read(tokens[-1])
        bias = torch.zeros_like(row) if reader.bias is None else reader.bias
        tokens.append((row + bias).max(-1).indices)
        found.append(bias)
    return torch.stack(tokens, -1), torch.stack(found, -2)
