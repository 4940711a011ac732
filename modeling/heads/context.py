"""Leaves that read the tokens before them: a bias by tables, exact for independent positions and for every circuit.

At position k the leaf of state z is the softmax over y of

    logits_k[z, y] + sum_j B_j[y] . e(x_{k-j}),    j = 1 .. `context`

where x_{k-j} are tokens of the window. Whatever they are, a leaf sums to 1 over y, so positions sum out from the last:
all conditionals are those of the circuit whose leaves are taken at the known tokens. Only a token that is unknown
before a known one cannot be summed out. Transitions of an HMM may read the last token, too: softmax(logits + G e(x_k)).
B and G start at 0, so that a head without them goes on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...configuration.heads import MTPHeadConfig
from ...generation.backbone.wrapped_models import gather
from ...generation.tensors.sampling import exponentials
from .circuits import LatentDistribution
from .window_distribution import (
    Choose,
    FactorisedDistribution,
    Given,
    Note,
    TokenReader,
    WindowDistribution,
    largest,
    raced,
    refuse_gaps,
)

_TABLE = 2**20
"""Entries of a table of what is read of every token, up to which it is kept: a draft then looks it up."""


class TokenTables(Protocol):
    """What makes biases of tokens; it may read states of the head, too.

    A call returns the biases of all positions up to the one after known tokens of ids [..., m]. A reader is of a draft
    whose tokens have these `ids` (None: they are ids). `moves_states`: transitions read the last token.
    """

    @property
    def moves_states(self) -> bool: ...

    def __call__(self, tokens: Tensor) -> Given: ...

    def reader(self, ids: Callable[[Tensor], Tensor] | None) -> TokenReader: ...


class LeafContext(nn.Module):
    """The tables e, B and G, where V = `vocab_size` tokens may be read and v = `draft_size` have a column."""

    def __init__(self, config: MTPHeadConfig, vocab_size: int, draft_size: int) -> None:
        super().__init__()
        self.count, self.rank, width = config.context, config.rank, config.context_rank
        self._table_of: Hashable = None
        self._table: Tensor | None = None  # its address says whether a recording still holds
        self.embedding = nn.Parameter(torch.zeros(vocab_size, width))
        self.weight = nn.Parameter(torch.zeros(self.count, draft_size, width))  # B_1 .. B_count
        wide = config.transition_context
        self.transition = nn.Parameter(torch.zeros(self.rank**2, width)) if wide else None
        self.reset_head(config.initializer_range)

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        init.normal_(self.embedding, std=1.0)
        init.zeros_(self.weight)
        if self.transition is not None:
            init.zeros_(self.transition)

    def forward(self, tokens: Tensor, each: bool = False) -> Given:
        """Return the biases of the first m + 1 positions from the ids [..., m] of the first m tokens.

        With `each`, return for every token by itself, [...], those of the positions after it, [..., count, v], and of
        the transition after it, [..., r, r].
        """
        embedded = nn.functional.embedding(tokens, self.embedding)  # [..., m, R]
        move = None if self.transition is None else nn.functional.linear(embedded, self.transition)
        move = None if move is None else move.unflatten(-1, (self.rank, self.rank))
        if each:
            bias = nn.functional.linear(embedded, self.weight.flatten(0, 1))
            return Given(bias.unflatten(-1, self.weight.shape[:2]), move)
        last = nn.functional.pad(embedded, (0, 0, self.count, 0))  # [..., count + m, R]
        size = tokens.shape[-1] + 1
        before = [last[..., self.count - j : self.count - j + size, :] for j in range(1, self.count + 1)]
        weight = self.weight.transpose(0, 1).flatten(1)  # [v, count R]: one product for all
        return Given(nn.functional.linear(torch.cat(before, -1), weight), move)

    def table(self) -> Tensor | None:
        """Return what `forward` says of every token by itself, [V, count v + r r], made once for the same weights.

        None where that is much, where weights are offloaded, or where gradients are wanted.
        """
        embedding, weight, transition = self.embedding, self.weight, self.transition
        if torch.is_grad_enabled() or embedding.is_meta or embedding.shape[0] * self.count * weight.shape[1] > _TABLE:
            return None
        own = (embedding, weight) if transition is None else (embedding, weight, transition)
        marks = [(p.data_ptr(), 0 if p.is_inference() else p._version, p.dtype) for p in own]
        key = (*marks, torch.is_inference_mode_enabled())
        if self._table is None or self._table_of != key:
            with torch.autocast(embedding.device.type, enabled=False):  # later calls may run without
                self._table = embedding @ torch.cat([rows.flatten(0, -2) for rows in own[1:]]).T
            self._table_of = key
        return self._table

    @property
    def moves_states(self) -> bool:
        return self.transition is not None

    def reader(self, ids: Callable[[Tensor], Tensor] | None) -> TokenReader:
        table, (count, size), rank = self.table(), self.weight.shape[:2], self.rank
        has_moves = self.moves_states

        def look_up(token: Tensor) -> tuple[Tensor, Tensor | None]:
            token = token if ids is None else ids(token)
            if table is None:
                given = self(token, each=True)
                return given.bias.flatten(-2), given.moves
            rows = torch.embedding(table, token)
            if not has_moves:
                return rows, None
            return rows[..., : count * size], rows[..., count * size :].unflatten(-1, (rank, rank))

        return TokenReader(look_up, size)

    def resize(self, vocab_size: int, std: float | None) -> None:
        self.embedding = resized(self.embedding, vocab_size, std)
        self.weight = resized(self.weight, vocab_size, std)

    @torch.no_grad()
    def take(self, other: LeafContext) -> None:
        """Copy other tables, as far as these have the same shapes."""
        for name, own in self.named_parameters():
            found = dict(other.named_parameters()).get(name)
            if found is not None and found.shape == own.shape:
                own.copy_(found)


@torch.no_grad()
def resized(rows: Tensor, vocab_size: int, std: float | None) -> nn.Parameter:
    """Return rows [..., V, R] of so many token ids; new ones are drawn, or the mean of the rows (None)."""
    new = rows.mean(-2, keepdim=True).expand(*rows.shape[:-2], max(vocab_size - rows.shape[-2], 0), -1)
    new = new if std is None else torch.randn_like(new) * std
    return nn.Parameter(torch.cat([rows[..., :vocab_size, :], new], -2), rows.requires_grad)


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
    """Return a distribution whose leaves read tokens, by the tables of a head; itself where the config has none."""
    if not config.context:
        return distribution
    gather([head])
    tables = tables_of(head)
    assert tables is not None and isinstance(distribution, FactorisedDistribution | LatentDistribution)
    return ContextDistribution(distribution, tables, known)


class ContextDistribution(WindowDistribution):
    """A distribution whose leaves read the tokens before them: given these, `inner` with biased leaves.

    `known` are ids [..., j] of tokens before the window that is still free.
    """

    def __init__(
        self, inner: FactorisedDistribution | LatentDistribution, tables: TokenTables, known: Tensor | None = None
    ) -> None:
        self.inner, self.tables, self.known, self.window = inner, tables, known, inner.window

    @property
    def leaf_logits(self) -> Tensor:
        return self.inner.leaf_logits

    def _given(self, tokens: Tensor) -> Given:
        tokens = self._with_known(tokens)
        return self.tables(tokens if self.codes is None else self.codes.tokens(tokens))

    def _with_known(self, tokens: Tensor) -> Tensor:
        return tokens if self.known is None else torch.cat([self.known.expand(*tokens.shape[:-1], -1), tokens], -1)

    def _within(self) -> FactorisedDistribution | LatentDistribution:
        inner = copy(self.inner)
        inner.codes = self.codes
        return inner

    def _along(self, tokens: Tensor, unknown: Tensor | None = None) -> WindowDistribution:
        refuse_gaps(unknown)
        return self._within().given(self._given(tokens[..., :-1]))

    def prefix_log_prob(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        return self._along(tokens, unknown).prefix_log_prob(tokens, unknown)

    def token_log_probs(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        return self._along(tokens, unknown).token_log_probs(tokens, unknown)

    def conditional_log_probs(self, tokens: Tensor) -> Tensor:
        return self._along(tokens).conditional_log_probs(tokens)

    def next_log_probs(self, prefix: Tensor) -> Tensor:
        return self._within().next_log_probs(prefix, self._given(prefix))

    def condition(self, first: Tensor) -> ContextDistribution:
        rest = ContextDistribution(self._within().condition(first), self.tables, self._with_known(first[..., None]))
        rest.codes = self.codes
        return rest

    def draft(self, choose: Choose, length: int | None = None) -> tuple[Tensor, Tensor]:
        inner = self._within()
        if isinstance(inner, LatentDistribution):
            inner.reader = self._reader(inner.bound)
            return inner.draft(choose, length)
        tokens, probs = self._in_turn(lambda logits: choose(logits.softmax(-1)), length)
        return torch.stack(tokens, -1), torch.stack(probs, -2)  # [..., length], [..., length, v]

    def greedy(self, length: int | None = None, note: Note | None = None) -> Tensor:
        inner = self._within()
        if isinstance(inner, LatentDistribution):
            inner.reader = self._reader(inner.bound)
            return inner.greedy(length, note)
        return torch.stack(self._in_turn(partial(largest, note), length)[0], -1)

    def sample_with_probs(self, length: int) -> tuple[Tensor, Tensor]:
        """Draw by races that are run before the first token is known; where a state reads a token, draw in turn."""
        inner = self._within()
        if isinstance(inner, FactorisedDistribution):
            logits = inner.leaf_logits[..., :length, 0, :]  # [..., length, v]
            arrivals = exponentials(logits.shape, logits.dtype, logits.device)
            tokens, bias = raced(logits - arrivals.log_(), self._reader())
            return tokens, (logits + bias).softmax(-1)
        if self.tables.moves_states or inner.bound > 1:
            return super().sample_with_probs(length)
        inner.reader = self._reader()
        return inner.sample_with_probs(length)

    def _reader(self, bound: int = 0) -> TokenReader:
        """Return a reader that has read the known tokens but for the last `bound`, which a circuit reads itself."""
        reader = self.tables.reader(None if self.codes is None else self.codes.tokens)
        known = () if self.known is None else self.known.unbind(-1)
        for token in known[: len(known) - bound]:
            reader.read(token, moves=False)
        return reader

    def _in_turn(self, choose: Choose, length: int | None) -> tuple[list[Tensor], list[Tensor]]:
        """Return what `choose` gives in turn from logits [..., v] of independent positions."""
        tokens, values, reader = list[Tensor](), list[Tensor](), self._reader()
        for logits in self.inner.leaf_logits[..., :length, 0, :].unbind(-2):
            if tokens:
                reader.read(tokens[-1])
            token, value = choose(logits if reader.bias is None else logits + reader.bias)
            tokens.append(token)
            values.append(value)
        return tokens, values
