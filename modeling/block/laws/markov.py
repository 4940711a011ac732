"""Markov heads (DSpark, 2607.05147): a bias of every place by the token before it, of low rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ....configuration.block import BlockDrafterConfig
from ...heads.window_distribution import exact
from .base import IndependentLaw, RowTables

MARKOV_KINDS = ("vanilla", "gated", "rnn")


class MarkovLaw(IndependentLaw):
    """Places that are independent given the token before each: base logits and biases W2 phi(e(y), h).

    y is the token before a place, h the row that drafts it. `"vanilla"`: phi = e. `"gated"`: e, gated by h and e.
    `"rnn"`: a gated recurrence over the tokens of the block.

    Args:
        config: Of the drafter.
        rank: R, width of e.
        kind: One of `MARKOV_KINDS`.

    Raises:
        ValueError: Another kind.
    """

    module_name = "markov_head"

    def __init__(self, config: BlockDrafterConfig, rank: int = 256, kind: str = "vanilla") -> None:
        super().__init__(config)
        if kind not in MARKOV_KINDS:
            raise ValueError(f"kind={kind!r} is unknown; choose one of {', '.join(MARKOV_KINDS)}")
        self.kind, self.width, size = kind, rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, self.num_columns, bias=False)
        self.gate_proj = nn.Linear(size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + size, 3 * rank) if kind == "rnn" else None

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Draw e with entries of deviation 1 (`std` is not read); W2 is 0: the law starts without any bias."""
        init.normal_(self.markov_w1.weight, std=1.0)
        init.zeros_(self.markov_w2.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.markov_w1(tokens)

    def tables(self, rows: Tensor, logits: Tensor, anchor: Tensor | None) -> RowTables:
        return MarkovTables(self, rows, anchor)

    def read(self, embedded: Tensor, rows: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return phi [..., j, R] of e [..., j, R] and rows [..., j, d], and the state after them."""
        if self.joint_proj is not None:
            return self._walk(self.joint_proj, embedded, rows, state)
        if self.gate_proj is None:
            return embedded, None
        return embedded * self.gate_proj(joined(rows, embedded)).sigmoid(), None

    def _walk(self, joint: nn.Linear, embedded: Tensor, rows: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        found, last = list[Tensor](), torch.zeros_like(embedded[..., 0, :]) if state is None else state
        for token, row in zip(embedded.unbind(-2), rows.unbind(-2)):
            gate, new, out = joint(joined(last, token, row)).chunk(3, -1)
            gate = gate.sigmoid()
            last = gate * last + (1 - gate) * new.tanh()
            found.append(out.tanh())
        return torch.stack(torch.broadcast_tensors(*found), -2), last


class MarkovTables(RowTables):
    """The biases of a Markov head for the rows of a block.

    Args:
        head: The head.
        rows: [..., m, d].
        anchor: [..., d], b's own row, which a recurrence reads before the others; None: it does not.
        transitions: From e to the bias of an HMM's transitions, R to r^2; None: they read no token.
    """

    def __init__(
        self, head: MarkovLaw, rows: Tensor, anchor: Tensor | None = None, transitions: nn.Linear | None = None
    ) -> None:
        self.head, self.rows, self.transitions = head, rows.to(head.markov_w2.weight.dtype), transitions
        self.anchor = anchor if head.kind == "rnn" else None
        self.moves_states, self.size = transitions is not None, head.markov_w2.out_features

    def embed(self, ids: Tensor) -> Tensor:
        return self.head.embed(ids)

    def bias(self, embedded: Tensor, place: int, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if place == 0 and self.anchor is not None:
            anchor = self.anchor[..., None, :].to(self.rows.dtype)
            _, state = self.head.read(embedded[..., :1, :], anchor, None)
        rows = self.rows[..., place : place + embedded.shape[-2], :]
        found, state = self.head.read(embedded, rows, state)
        return self.head.markov_w2(found), state

    def move(self, embedded: Tensor) -> Tensor | None:
        if self.transitions is None:
            return None
        rank = round(self.transitions.out_features**0.5)
        return self.transitions(embedded).unflatten(-1, (rank, rank))


class ConfidenceHead(nn.Module):
    """Estimates, before a token is drawn, how likely it is to be accepted (DSpark).

    Args:
        config: Of the drafter.
        width: Width of the embeddings of tokens that are read, too; 0: none.
    """

    def __init__(self, config: BlockDrafterConfig, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + width, 1)

    def forward(self, rows: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """Return logits [..., m] of rows [..., m, d], with the embeddings [..., m, R] of the tokens before them."""
        inputs = rows if embeddings is None else joined(rows, embeddings)
        return exact(self.proj(inputs.to(self.proj.weight.dtype))[..., 0])


def joined(*parts: Tensor) -> Tensor:
    """Return parts [..., n_i] side by side, [..., sum n_i], in the last one's dtype; leading axes broadcast."""
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.to(parts[-1].dtype).expand(*shape, -1) for part in parts], -1)
