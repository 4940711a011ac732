"""Circuits over the places of a block: CP, HMM and BTree, whose leaves read the token before them as Markov heads do.

Leaf logits of state z at place k are base_k + W A_z h_k, and the bias of the Markov head. At the first place they are
the same for all states: nothing stands before it that could tell them apart.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ....configuration.block import BlockDrafterConfig
from ...heads.circuit_head import circuit_from_logits, persistence
from ...heads.circuits import LatentDistribution
from .base import BlockLaw, Inner, RowTables
from .markov import MarkovLaw, MarkovTables


@lru_cache(maxsize=64)
def node_spans(window: int) -> list[tuple[int, int]]:
    """Return the places below every node of a BTree but the root, in level order.

    Example:
        >>> node_spans(5)
        [(0, 2), (2, 5), (3, 5)]
    """
    found, level = list[tuple[int, int]](), [(0, window)]
    while level:
        halves = [(low, low + (high - low) // 2, high) for low, high in level]
        level = [span for low, cut, high in halves for span in ((low, cut), (cut, high)) if span[1] - span[0] > 1]
        found += level
    return found


class CircuitLaw(BlockLaw):
    """A mixture over latent states of the places' laws.

    Args:
        config: Of the drafter.
        rank: Number of states.
        leaf_rank: Rank of what a state adds to the base logits.
        markov_rank: Rank of the bias of the token before a place; 0: none.
        markov_kind: `kind` of `MarkovLaw`.
        reads_last: Transitions read the last token; of an HMM with a Markov bias alone.

    Raises:
        ValueError: `reads_last` of another circuit, or without a Markov bias.
    """

    kind = ""

    def __init__(
        self,
        config: BlockDrafterConfig,
        rank: int = 4,
        leaf_rank: int = 64,
        markov_rank: int = 256,
        markov_kind: str = "vanilla",
        reads_last: bool = False,
    ) -> None:
        super().__init__(config)
        if reads_last and not (self.kind == "hmm" and markov_rank):
            raise ValueError(f"reads_last=True needs law='hmm' and a markov_rank, not {self.kind!r} and {markov_rank}")
        self.rank, self.leaf_rank, self.width = rank, leaf_rank, markov_rank
        self.state_maps = nn.Linear(config.hidden_size, rank * leaf_rank, bias=False)  # A_1 .. A_r
        self.state_leaves = nn.Linear(leaf_rank, self.num_columns, bias=False)  # W
        self.root = nn.Linear(config.hidden_size, rank)
        self.sums = nn.Linear(config.hidden_size, rank**2) if self.kind != "cp" else None
        self.markov_head = MarkovLaw(config, markov_rank, markov_kind) if markov_rank else None
        self.transitions = nn.Linear(markov_rank, rank**2, bias=False) if reads_last else None

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Draw sum weights as heads do (`std` is not read), and set W = 0: the law starts as independent places."""
        init.normal_(self.state_maps.weight, std=self.config.hidden_size**-0.5)
        init.zeros_(self.state_leaves.weight)
        for each in (self.root, self.sums):
            if each is not None:
                init.normal_(each.weight, std=0.5 * self.config.hidden_size**-0.5)
                init.zeros_(each.bias)
        if self.kind == "hmm" and self.sums is not None:
            init.copy_(self.sums.bias, persistence(self.rank) * torch.eye(self.rank).flatten())
        if self.transitions is not None:
            init.zeros_(self.transitions.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens) if self.markov_head is None else self.markov_head.embed(tokens)

    def inner(self, rows: Tensor, logits: Tensor) -> Inner:
        rows = rows.to(self.root.weight.dtype)
        states = self.state_maps(rows[..., 1:, :]).unflatten(-1, (self.rank, self.leaf_rank))  # [..., m - 1, r, R]
        later = logits[..., 1:, None, :] + self.state_leaves(states).to(logits.dtype)  # [..., m - 1, r, v]
        leaves = torch.cat([logits[..., :1, None, :].expand(*later.shape[:-3], 1, *later.shape[-2:]), later], -3)
        found = circuit_from_logits(
            self.kind,
            leaf_logits=leaves,
            root_logits=self.root(rows[..., 0, :]),
            dtype=logits.dtype,
            **self.sum_logits(rows),
        )
        assert isinstance(found, LatentDistribution)
        return found

    def sum_logits(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the logits of the sums besides the root, by name, from rows [..., m, d]."""
        return {}

    def _sums(self, states: Tensor) -> Tensor:
        assert self.sums is not None
        return self.sums(states).unflatten(-1, (self.rank, self.rank))  # [..., n, r, r]

    def tables(self, rows: Tensor, logits: Tensor, anchor: Tensor | None) -> RowTables | None:
        head = self.markov_head
        return None if head is None else MarkovTables(head, rows, anchor, self.transitions)


class CPLaw(CircuitLaw):
    """One state for all places."""

    kind = "cp"


class HMMLaw(CircuitLaw):
    """A chain of states; the row of a place moves its state."""

    kind = "hmm"

    def sum_logits(self, rows: Tensor) -> dict[str, Tensor]:
        return {"trans_logits": self._sums(rows[..., 1:, :])}


class BTreeLaw(CircuitLaw):
    """A balanced tree of states; the mean of the rows below a node decides its weights."""

    kind, needs_window = "btree", True

    def sum_logits(self, rows: Tensor) -> dict[str, Tensor]:
        spans = node_spans(rows.shape[-2])
        if not spans:
            return {}
        means = [rows[..., low:high, :].mean(-2) for low, high in spans]
        return {"node_logits": self._sums(torch.stack(means, -2))}
