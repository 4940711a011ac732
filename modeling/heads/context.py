"""Leaves that read the tokens before them: a bias by tables, exact for independent positions and for every circuit.

At position k the leaf of state z is the softmax over y of

    logits_k[z, y] + sum_j B_j[y] . e(x_{k-j}),    j = 1 .. `context`

where x_{k-j} are tokens of the window; those before it, the hidden state has read. Whatever they are, a leaf sums to 1
over y, so positions sum out from the last to the first, whatever the tree of latents: all conditionals are those of the
circuit whose leaves are taken at the known tokens. Only a token that is unknown before a known one cannot be summed
out. Transitions of an HMM may read the last token, too: the filter moves by softmax(logits + G e(x_k)).

B and G start at 0, so that a head without them goes on unchanged.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...configuration.heads import MTPHeadConfig
from ...generation.tensors.sampling import exponentials
from ...generation.tensors.wrapped_models import gather
from .circuits import LatentDistribution, raced
from .window_distribution import (
    Choose,
    FactorisedDistribution,
    Given,
    Note,
    TokenReader,
    WindowDistribution,
    refuse_gaps,
)

_PAIRS = 2**20
"""Entries of a table of all pairs of tokens up to which it is kept: a draft then looks its biases up."""


class LeafContext(nn.Module):
    """The tables e, B and G.

    Args:
        config: Head options: `context`, `context_rank`, `transition_context`, `rank`.
        vocab_size: V, tokens that may be read.
        draft_size: v, tokens that have a column.
    """

    def __init__(self, config: MTPHeadConfig, vocab_size: int, draft_size: int) -> None:
        super().__init__()
        self.count, self.rank, width = config.context, config.rank, config.context_rank
        self._table: tuple[Hashable, Tensor] | None = None
        self.embedding = nn.Parameter(torch.zeros(vocab_size, width))
        self.weight = nn.Parameter(torch.zeros(draft_size, self.count * width))  # B_1 .. B_count, next to each other
        wide = config.transition_context
        self.transition = nn.Parameter(torch.zeros(self.rank**2, width)) if wide else None
        self.reset_head(config.initializer_range)

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Draw e with entries of deviation 1 (`std` is not read); B and G are 0: no distribution is changed."""
        init.normal_(self.embedding, std=1.0)
        init.zeros_(self.weight)
        if self.transition is not None:
            init.zeros_(self.transition)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return e of token ids [...], [..., R]."""
        return nn.functional.embedding(tokens, self.embedding)

    def bias(self, before: Tensor) -> Tensor:
        """Return the bias [..., v] of a position from e of tokens before it, the last first, [..., up to count R]."""
        width = before.shape[-1]
        return nn.functional.linear(before, self.weight if width == self.weight.shape[1] else self.weight[:, :width])

    def table(self) -> Tensor | None:
        """Return the biases B_j[y] . e(x) of all pairs of tokens, [V, count v], made once for the same weights.

        None where they are many, or where gradients are wanted.
        """
        if torch.is_grad_enabled() or self.embedding.shape[0] * self.weight.shape[0] * self.count > _PAIRS:
            return None
        marks = ((p.data_ptr(), 0 if p.is_inference() else p._version, p.dtype) for p in (self.embedding, self.weight))
        key = (*marks, torch.is_inference_mode_enabled())
        if self._table is None or self._table[0] != key:
            parts = [self.embedding @ part.T for part in self.weight.chunk(self.count, 1)]  # [V, v] each
            self._table = key, torch.cat(parts, 1)
        return self._table[1]

    def move(self, embedded: Tensor) -> Tensor | None:
        """Return the bias [..., r, r] of the transitions after tokens of embeddings [..., R]; None without G."""
        if self.transition is None:
            return None
        return nn.functional.linear(embedded, self.transition).unflatten(-1, (self.rank, self.rank))

    def given(self, tokens: Tensor) -> Given:
        """Return the biases of the first m + 1 positions from the ids [..., m] of the first m tokens."""
        embedded = self.embed(tokens)  # [..., m, R]
        last = nn.functional.pad(embedded, (0, 0, self.count, 0))  # [..., count + m, R]
        size = tokens.shape[-1] + 1
        before = [last[..., self.count - j : self.count - j + size, :] for j in range(1, self.count + 1)]
        return Given(self.bias(torch.cat(before, -1)), self.move(embedded))

    @torch.no_grad()
    def resize(self, vocab_size: int, std: float | None) -> None:
        """Change the number of token ids; see `FFHead.resize`."""
        for name, rows in (("embedding", self.embedding), ("weight", self.weight)):
            new = rows.mean(0, keepdim=True).repeat(max(vocab_size - len(rows), 0), 1)  # [more, ...]
            new = new if std is None else torch.randn_like(new) * std
            setattr(self, name, nn.Parameter(torch.cat([rows[:vocab_size], new]), rows.requires_grad))

    @torch.no_grad()
    def take(self, other: LeafContext) -> None:
        """Copy other tables, as far as these have the same shapes."""
        for name, own in self.named_parameters():
            found = dict(other.named_parameters()).get(name)
            if found is not None and found.shape == own.shape:
                own.copy_(found)


def tables_of(head: nn.Module) -> LeafContext | None:
    """Return the tables of a head; None where its leaves read no token."""
    tables = getattr(head, "context", None)
    return tables if isinstance(tables, LeafContext) else None


def context_of(config: MTPHeadConfig, draft_size: int) -> LeafContext | None:
    """Return new tables of a head with so many columns; None where its leaves read no token."""
    return LeafContext(config, config.vocab_size or draft_size, draft_size) if config.context else None


def add_tables(head: nn.Module, config: MTPHeadConfig, count: int, rank: int, transitions: bool) -> None:
    """Give a head tables, and its config their options; see `WindowHeadMixin.add_context`."""
    if config.context:
        raise ValueError(f"context={config.context} exists; make a new head for another number")
    changes = {"context": count, "context_rank": rank, "transition_context": transitions}
    checked = MTPHeadConfig.from_dict(config.to_dict() | changes)
    own, tables = next(head.parameters()), context_of(checked, cast(int, head.vocab_size))
    if tables is None:
        raise ValueError(f"count={count} adds nothing; choose 1 to 3")
    head.context = tables.to(device=own.device, dtype=own.dtype)
    for name, value in changes.items():
        setattr(config, name, value)


def with_context(
    distribution: WindowDistribution, head: nn.Module, config: MTPHeadConfig, known: Tensor | None = None
) -> WindowDistribution:
    """Return a distribution whose leaves read tokens, by the tables of a head; itself where the config has none.

    `known` [..., j] are the first tokens of the window where the distribution begins after them.
    """
    if not config.context:
        return distribution
    gather([head])
    tables = tables_of(head)
    assert tables is not None and isinstance(distribution, FactorisedDistribution | LatentDistribution)
    return ContextDistribution(distribution, tables, known)


class ContextDistribution(WindowDistribution):
    """A distribution whose leaves read the tokens before them.

    Given tokens, it is the distribution within, with biased leaves.

    Args:
        inner: Independent positions or a circuit; without any token, or after those that are known.
        tables: The tables.
        known: Ids [..., j] of tokens before the window that is still free.
    """

    def __init__(
        self, inner: FactorisedDistribution | LatentDistribution, tables: LeafContext, known: Tensor | None = None
    ) -> None:
        self.inner, self.tables, self.known, self.window = inner, tables, known, inner.window

    @property
    def leaf_logits(self) -> Tensor:
        """Return those without any bias."""
        return self.inner.leaf_logits

    def _given(self, tokens: Tensor) -> Given:
        """Return the biases up to the position after free tokens [..., m]."""
        if self.known is not None:
            tokens = torch.cat([self.known.expand(*tokens.shape[:-1], -1), tokens], -1)
        return self.tables.given(self._ids(tokens))

    def _ids(self, tokens: Tensor) -> Tensor:
        return tokens if self.codes is None else self.codes.tokens(tokens)

    def _within(self) -> FactorisedDistribution | LatentDistribution:
        inner = copy(self.inner)
        inner.codes = self.codes
        return inner

    def _along(self, tokens: Tensor, unknown: Tensor | None = None) -> WindowDistribution:
        """Return the distribution with leaves taken at tokens [..., n]."""
        refuse_gaps(unknown)
        return self._within().given(self._given(tokens[..., :-1]))

    def prefix_log_prob(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        """Return those of the distribution at the tokens.

        Raises:
            ValueError: An unknown token that a known one follows.
        """
        return self._along(tokens, unknown).prefix_log_prob(tokens, unknown)

    def token_log_probs(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        """Return those of the distribution at the tokens.

        Raises:
            ValueError: An unknown token that a known one follows.
        """
        return self._along(tokens, unknown).token_log_probs(tokens, unknown)

    def conditional_log_probs(self, tokens: Tensor) -> Tensor:
        """Return those of the distribution at the tokens."""
        return self._along(tokens).conditional_log_probs(tokens)

    def next_log_probs(self, prefix: Tensor) -> Tensor:
        """Return the next conditional, with leaves taken at the prefix."""
        return self._within().next_log_probs(prefix, self._given(prefix))

    def condition(self, first: Tensor) -> ContextDistribution:
        """Bind a token, which the leaves after it read."""
        token = first[..., None]  # [..., 1]
        known = token if self.known is None else torch.cat([self.known.expand(*token.shape[:-1], -1), token], -1)
        rest = ContextDistribution(self._within().condition(first), self.tables, known)
        rest.codes = self.codes
        return rest

    def draft(self, choose: Choose, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Draft one token after the other; each is read by the leaves after it."""
        return self._reading().draft(choose, length)

    def greedy(self, length: int | None = None, note: Note | None = None) -> Tensor:
        """Return the argmax of each conditional in turn."""
        return self._reading().greedy(length, note)

    def sample_with_probs(self, length: int) -> tuple[Tensor, Tensor]:
        """Draw by races that are run before the first token is known, and states before tokens.

        Only where a state reads a token, each is drawn in turn.
        """
        inner, reader = self._within(), _Reader(self, self.known)
        if isinstance(inner, FactorisedDistribution):
            logits = inner.leaf_logits[..., :length, 0, :]  # [..., length, v]
            arrivals = exponentials(logits.shape, logits.dtype, logits.device)
            tokens, bias = raced(logits - arrivals.log_(), reader)
            return tokens, (logits + bias).softmax(-1)
        if self.tables.transition is not None:
            return super().sample_with_probs(length)
        inner.reader = reader
        return inner.sample_with_probs(length)

    def _reading(self) -> FactorisedDistribution | LatentDistribution:
        inner = self._within()
        inner.reader = _Reader(self, self.known)
        return inner


class _Reader(TokenReader):
    """The tokens of a draft so far, and what leaves read of them."""

    def __init__(self, distribution: ContextDistribution, known: Tensor | None) -> None:
        self.tables, self.ids, self.count = distribution.tables, distribution._ids, distribution.tables.count
        self.table, self.read_ids = self.tables.table(), list[Tensor]()
        self.found = list[Tensor]()  # embeddings [..., R], or rows of the table, [..., v] or [..., count, v]
        for token in () if known is None else known.unbind(-1):
            self.read(token)

    def read(self, token: Tensor) -> None:
        self.read_ids.append(self.ids(token))

    def _look_up(self, ids: Tensor) -> Tensor:
        if self.table is None:
            return self.tables.embed(ids)
        rows = nn.functional.embedding(ids, self.table)  # [..., count v]
        return rows if self.count == 1 else rows.unflatten(-1, (self.count, -1))

    def bias(self, position: int) -> Tensor | None:
        while len(self.found) < position:
            self.found.append(self._look_up(self.read_ids[len(self.found)]))
        if not position:
            return None
        if self.count == 1:
            last = self.found[position - 1]
            return self.tables.bias(last) if self.table is None else last
        before = self.found[max(position - self.count, 0) : position][::-1]
        if self.table is not None:
            return reduce(torch.add, [rows[..., j, :] for j, rows in enumerate(before)])
        return self.tables.bias(torch.cat(before, -1))

    def move(self, position: int) -> Tensor | None:
        if self.tables.transition is None:
            return None
        return self.tables.move(self.tables.embed(self.read_ids[position]))

    def __len__(self) -> int:
        return len(self.read_ids)
