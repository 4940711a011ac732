"""Laws: joint distributions over the tokens of a block, from the rows that predict them.

The window of a law is the block's m drafts; the token before it, b, is known. All laws are independent places or a
circuit over them, and what stands before a place can bias its logits, by tables that read rows, too (`RowTables`). So
each is a distribution of `modeling.heads`, with its drafts, trees and losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ....configuration.block import BlockDrafterConfig
from ...common.draft_vocabulary import DraftVocabulary
from ...heads.circuits import LatentDistribution
from ...heads.context import ContextDistribution
from ...heads.window_distribution import FactorisedDistribution, Given, TokenReader, WindowDistribution, exact

Inner = FactorisedDistribution | LatentDistribution


class RowTables(ABC):
    """Biases of the places of a block by the tokens before them and by the rows that predict them.

    The first token that is read is b; place k, from 0 on, is the one behind k + 1 tokens.
    """

    moves_states = False
    size: int
    """v."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Return what is read of token ids [...], [..., R]."""

    @abstractmethod
    def bias(self, embedded: Tensor, place: int, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the biases [..., j, v] of places from `place` on, and the state after them, if there is any.

        `embedded` [..., j, R] are the tokens just before them, `state` what the places before have left.
        """

    def move(self, embedded: Tensor) -> Tensor | None:
        """Return the biases [..., r, r] of the transitions after tokens [..., R]; None: they read nothing."""
        return None

    def __call__(self, tokens: Tensor) -> Given:
        """Return the biases of the first m places from ids [..., m]: b and the first m - 1 tokens of the block."""
        embedded = self.embed(tokens)
        return Given(self.bias(embedded, 0, None)[0], self.move(embedded[..., 1:, :]))

    def reader(self, ids: Callable[[Tensor], Tensor] | None) -> TokenReader:
        """Return a reader of a draft whose tokens have these `ids` (None: they are ids)."""
        place, state = 0, None

        def look_up(token: Tensor) -> tuple[Tensor, Tensor | None]:
            nonlocal place, state
            embedded = self.embed(token if ids is None else ids(token))
            bias, state = self.bias(embedded[..., None, :], place, state)
            place += 1
            return bias[..., 0, :], self.move(embedded)

        return TokenReader(look_up, self.size)


class BlockLaw(nn.Module, ABC):
    """A joint distribution over the m tokens of a block.

    Args:
        config: Of the drafter: d, V, v and m are read.

    Attributes:
        module_name: Name under which a drafter holds it.
        needs_window: Whether the law of the first places changes where fewer than m are given.
        width: R, width of its embeddings of tokens; 0: it has none.
    """

    module_name = "law_head"
    needs_window = False
    width = 0

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def num_columns(self) -> int:
        """v, the tokens that have a column."""
        return self.config.draft_vocab_size or self.config.vocab_size

    def embed(self, tokens: Tensor) -> Tensor:
        """Return its embeddings of token ids [...], [..., R]."""
        raise ValueError(f"law={self.config.law!r} has no embeddings of tokens")

    @abstractmethod
    def inner(self, rows: Tensor, logits: Tensor) -> Inner:
        """Return the distribution without what tokens add, from rows [..., m, d] and exact logits [..., m, v]."""

    def tables(self, rows: Tensor, logits: Tensor, anchor: Tensor | None) -> RowTables | None:
        """Return what tokens add; None: nothing. For `anchor` see `distribution`."""
        return None

    def distribution(
        self,
        rows: Tensor,
        logits: Tensor,
        last: Tensor,
        anchor: Tensor | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> WindowDistribution:
        """Return the distribution of the tokens of a block over their columns.

        Args:
            rows: [..., m, d], the states of the rows that draft.
            logits: [..., m, v], their base logits.
            last: [...] int64, id of the token b before the block.
            anchor: [..., d], the state of b's own row where that drafts nothing.
            vocabulary: The tokens of the columns; None: all. Tokens of the distribution are its codes.
        """
        logits = exact(logits)
        tables, inner = self.tables(rows, logits, anchor), self.inner(rows, logits)
        if tables is None:
            return inner
        known = last if vocabulary is None else vocabulary.codes(last)
        found = ContextDistribution(inner, tables, known[..., None])
        found.codes = vocabulary
        return found


class IndependentLaw(BlockLaw):
    """Independent places (DFlash)."""

    def inner(self, rows: Tensor, logits: Tensor) -> Inner:
        return FactorisedDistribution(logits[..., None, :])  # [..., m, 1, v]


def scattered(values: Tensor, columns: Tensor, size: int) -> Tensor:
    """Return values [..., K] at their columns [..., K], and 0 elsewhere, [..., size]."""
    shape = torch.broadcast_shapes(values.shape, columns.shape)
    whole = values.new_zeros(*shape[:-1], size)
    return whole.scatter(-1, columns.expand(shape), values.expand(shape))
