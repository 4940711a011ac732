"""Logits that are made when they are asked for, a few rows at a time: large vocabularies never stand as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ...modeling.heads.chunks import LOGITS_PER_CHUNK
from .columns import at_columns


@dataclass(frozen=True)
class Scores:
    """Rows of logits.

    Attributes:
        states: [B, ..., D], what the head makes logits of; the logits themselves where there is no head.
        head: A module from [..., D] to [..., v], or None.
        size: v.
    """

    states: torch.Tensor
    head: nn.Module | None
    size: int

    @classmethod
    def of_logits(cls, logits: torch.Tensor) -> Scores:
        """Logits that exist already."""
        return cls(logits, None, logits.shape[-1])

    def at(self, columns: torch.Tensor) -> Scores:
        """Rows of chosen columns [B, ...] of scores [B, T]."""
        return Scores(at_columns(self.states, columns), self.head, self.size)

    def __getitem__(self, index: object) -> Scores:
        """Rows of an index that leaves the last axis alone."""
        return Scores(self.states[index], self.head, self.size)

    def replaced(self, places: torch.Tensor, other: Scores) -> Scores:
        """With those of another in some places [G] of axis 1; as logits, where they are not states of the same head."""
        if self.head is other.head:
            return Scores(self.states.index_copy(1, places, other.states), self.head, self.size)
        mine, others = (part.logits(part.states) for part in (self, other))
        return Scores.of_logits(mine.index_copy(1, places, others.to(mine.dtype)))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[..., v] of some states."""
        return states if self.head is None else self.head(states)

    @torch.no_grad()
    def mapped(self, function: Callable[..., tuple[torch.Tensor, ...]], *given: torch.Tensor) -> list[torch.Tensor]:
        """What a function makes of all rows, piece by piece.

        Args:
            function: From logits [n, v] and pieces [n] of `given` to several tensors [n, ...].
            *given: [B, ...] each, one number per row.

        Returns:
            [B, ...] each.
        """
        shape, rows = self.states.shape[:-1], max(1, LOGITS_PER_CHUNK // self.size)
        pieces = zip(self.states.flatten(0, -2).split(rows), *(part.flatten().split(rows) for part in given))
        found = [function(self.logits(states), *parts) for states, *parts in pieces]
        return [torch.cat(parts).unflatten(0, shape) for parts in zip(*found)]
