"""Laws: joint distributions over the tokens of a block, from the rows that predict them.

The window of a law is the block's m drafts; the token before it, b, is known. All laws are independent places or a
circuit over them, and what stands before a place can bias its logits, by tables that read rows, too (`RowTables`). So
each is a distribution of `modeling.heads`, with its drafts, trees and losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ...configuration.block import BlockDrafterConfig
from ..common.draft_vocabulary import DraftVocabulary
from ..heads.circuit_head import circuit_from_logits, persistence
from ..heads.circuits import LatentDistribution
from ..heads.context import ContextDistribution
from ..heads.window_distribution import FactorisedDistribution, Given, TokenReader, WindowDistribution, exact

Inner = FactorisedDistribution | LatentDistribution
Embeddings = Callable[[Tensor], Tensor]
"""From token ids [...] to the drafter's embeddings, [..., d]."""


class RowTables(ABC):
    """Biases of places of a block, k from 0 on, by the k + 1 tokens before them, b first, and by the rows there."""

    moves_states = False
    size: int  # v

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Return what is read of token ids [...], [..., R]."""

    @abstractmethod
    def bias(self, embedded: Tensor, place: int, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return biases [..., j, v] from `place` on, behind tokens `embedded` [..., j, R] and a state; and its next."""

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
    """A joint distribution over the m tokens of a block; of the drafter's config d, V, v and m are read."""

    module_name = "law_head"  # under which a drafter holds it
    needs_window = False  # whether the law of the first places changes where fewer than m are given
    width = 0  # R, of its embeddings of tokens; 0: it has none

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

    def tables(
        self, rows: Tensor, logits: Tensor, anchor: Tensor | None, embeddings: Embeddings | None
    ) -> RowTables | None:
        """Return what tokens add; None: nothing. For `anchor` and `embeddings` see `distribution`."""
        return None

    def distribution(
        self,
        rows: Tensor,
        logits: Tensor,
        last: Tensor,
        anchor: Tensor | None = None,
        vocabulary: DraftVocabulary | None = None,
        embeddings: Embeddings | None = None,
    ) -> WindowDistribution:
        """Return the distribution of a block's tokens over their columns, behind b, whose id is `last` [...].

        The rows [..., m, d] draft with base logits [..., m, v]; `anchor` [..., d] is b's own row where that drafts
        nothing. Tokens of the distribution are codes of the `vocabulary` of its columns; None: all tokens have one.
        A law without embeddings of its own may read tokens by those of the drafter, `embeddings`.
        """
        logits = exact(logits)
        tables, inner = self.tables(rows, logits, anchor, embeddings), self.inner(rows, logits)
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


class MarkovLaw(IndependentLaw):
    """Places that are independent given the token before each: base logits and biases W2 phi(e(y), h).

    y is the token before a place, h the row that drafts it. `"vanilla"`: phi = e. `"gated"`: e, gated by h and e.
    `"rnn"`: a gated recurrence over the tokens of the block. `rank` is R, the width of e.
    """

    module_name = "markov_head"

    def __init__(self, config: BlockDrafterConfig, rank: int = 256, kind: str = "vanilla") -> None:
        super().__init__(config)
        if kind not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"kind={kind!r} is unknown; choose 'vanilla', 'gated' or 'rnn'")
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

    def tables(self, rows: Tensor, logits: Tensor, anchor: Tensor | None, embeddings: Embeddings | None) -> RowTables:
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
    """The biases of a Markov head for the rows of a block, and by `transitions` [R -> r^2] those of an HMM's moves."""

    def __init__(
        self, head: MarkovLaw, rows: Tensor, anchor: Tensor | None = None, transitions: nn.Linear | None = None
    ) -> None:
        self.head, self.rows, self.transitions = head, rows.to(head.markov_w2.weight.dtype), transitions
        self.anchor = anchor if head.kind == "rnn" else None
        self.moves_states, self.size = transitions is not None, head.markov_w2.out_features

    def embed(self, ids: Tensor) -> Tensor:
        return self.head.embed(ids)

    def bias(self, embedded: Tensor, place: int, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if place == 0 and self.anchor is not None:  # b's own row, which a recurrence reads before the others
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
    """Estimates, before a token is drawn, how likely it is to be accepted (DSpark); `width` is that of embeddings."""

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


@lru_cache(maxsize=64)
def node_spans(window: int) -> list[tuple[int, int]]:
    """Return the places below every node of a BTree but the root, in level order: of 5, (0, 2), (2, 5) and (3, 5)."""
    found, level = list[tuple[int, int]](), [(0, window)]
    while level:
        halves = [(low, low + (high - low) // 2, high) for low, high in level]
        level = [span for low, cut, high in halves for span in ((low, cut), (cut, high)) if span[1] - span[0] > 1]
        found += level
    return found


class CircuitLaw(BlockLaw):
    """A mixture over latent states of the places' laws.

    `"cp"`: one state for all places; `"hmm"`: a chain, whose state the row of a place moves; `"btree"`: a balanced tree
    of states, where the mean of the rows below a node decides its weights. There are `rank` states, each of which adds
    to the base logits by a map of `leaf_rank`; the token before a place does as in `MarkovLaw` (`markov_rank` 0: not).
    With `reads_last` it moves the states of an HMM, too.
    """

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
        self.kind, self.needs_window = config.law, config.law == "btree"
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
        logits_of = {"leaf_logits": leaves, "root_logits": self.root(rows[..., 0, :])} | self._sum_logits(rows)
        found = circuit_from_logits(self.kind, dtype=logits.dtype, **logits_of)
        assert isinstance(found, LatentDistribution)
        return found

    def _sum_logits(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the logits [..., n, r, r] of the sums besides the root, by name, from rows [..., m, d]."""
        spans = node_spans(rows.shape[-2]) if self.kind == "btree" else []
        if self.sums is None or (self.kind == "btree" and not spans):
            return {}
        means = [rows[..., low:high, :].mean(-2) for low, high in spans]
        states = torch.stack(means, -2) if spans else rows[..., 1:, :]
        name = "node_logits" if spans else "trans_logits"
        return {name: self.sums(states).unflatten(-1, (self.rank, self.rank))}

    def tables(
        self, rows: Tensor, logits: Tensor, anchor: Tensor | None, embeddings: Embeddings | None
    ) -> RowTables | None:
        head = self.markov_head
        return None if head is None else MarkovTables(head, rows, anchor, self.transitions)


class SelectorLaw(BlockLaw):
    """The K likeliest tokens of every place, each chosen given the token before it (DFlash 2).

    A candidate y behind y' has its base logit and sum_r A[y']_r (H h)_r B[y]_r, where h is the row that drafts it;
    `rank` is R, `top_k` K.
    """

    module_name = "candidate_selector"

    def __init__(self, config: BlockDrafterConfig, rank: int = 256, top_k: int = 16) -> None:
        super().__init__(config)
        self.top_k, self.width = min(top_k, self.num_columns), rank
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(self.num_columns, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.reset_head(0.02)

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Draw codebooks whose products vary by 1 (`std` is not read); H is 0: no token says anything."""
        for codebook in (self.predecessor_codebook, self.successor_codebook):
            init.normal_(codebook, std=codebook.shape[1] ** -0.25)
        init.zeros_(self.hidden_projection.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.predecessor_codebook)

    def scores(self, before: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the scores [..., K] of columns [..., K], behind e [..., R] of the tokens before, at rows [..., d]."""
        weights = before * self.hidden_projection(rows.to(before.dtype))  # [..., R]
        return (self.successor_codebook[columns] @ weights[..., None])[..., 0]

    def inner(self, rows: Tensor, logits: Tensor) -> Inner:
        candidates = self._candidates(logits)
        kept = torch.full_like(logits, -torch.inf).scatter(-1, candidates, logits.gather(-1, candidates))
        return FactorisedDistribution(kept[..., None, :])  # [..., m, 1, v]

    def tables(self, rows: Tensor, logits: Tensor, anchor: Tensor | None, embeddings: Embeddings | None) -> RowTables:
        return SelectorTables(self, rows, self._candidates(logits), logits.shape[-1])

    def _candidates(self, logits: Tensor) -> Tensor:
        return logits.detach().topk(self.top_k, -1).indices  # [..., m, K]

    def choice_terms(self, rows: Tensor, logits: Tensor, before: Tensor, labels: Tensor) -> Tensor:
        """Return -log q of labels [..., m] among candidates, one of which each is, given ids `before` [..., m].

        The weakest candidate makes room for a label that is none; labels are columns.
        """
        candidates = self._candidates(logits)  # [..., m, K], the weakest last
        is_label = candidates == labels[..., None]
        weakest = torch.where(is_label.any(-1), candidates[..., -1], labels)
        candidates = torch.cat([candidates[..., :-1], weakest[..., None]], -1)
        scores = logits.gather(-1, candidates) + self.scores(self.embed(before), rows, candidates)
        log_q = scores.log_softmax(-1)
        return -log_q.masked_fill(candidates != labels[..., None], 0).sum(-1)


class SelectorTables(RowTables):
    """The scores of a selector for the rows of a block, at their candidates [..., m, K]."""

    def __init__(self, selector: SelectorLaw, rows: Tensor, candidates: Tensor, size: int) -> None:
        self.selector, self.rows, self.candidates, self.size = selector, rows, candidates, size

    def embed(self, ids: Tensor) -> Tensor:
        return self.selector.embed(ids)

    def bias(self, embedded: Tensor, place: int, state: Tensor | None) -> tuple[Tensor, None]:
        places = slice(place, place + embedded.shape[-2])
        columns = self.candidates[..., places, :]
        scores = self.selector.scores(embedded, self.rows[..., places, :], columns)  # [..., j, K]
        columns = columns.expand(scores.shape)
        return scores.new_zeros(*scores.shape[:-1], self.size).scatter(-1, columns, scores), None


class PrefixGRU(nn.Module):
    """A gated recurrent unit without biases, under the names of tensors that `torch.nn.GRU` has.

    It is made of linear maps, whose gradients chunks of blocks add up in place, and its states broadcast.
    """

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        for weight in self.parameters():
            init.uniform_(weight, -(size**-0.5), size**-0.5)  # as torch draws them

    def forward(self, inputs: Tensor, state: Tensor | None = None) -> Tensor:
        """Return the states after inputs [..., j, d], [..., j, H], behind a state [..., H] (None: 0)."""
        size, found = self.weight_hh_l0.shape[1], list[Tensor]()
        state = inputs.new_zeros(*inputs.shape[:-2], size) if state is None else state
        for new in nn.functional.linear(inputs, self.weight_ih_l0).unbind(-2):
            old = nn.functional.linear(state, self.weight_hh_l0)  # [..., 3 H]
            reset, keep = (new + old)[..., : 2 * size].sigmoid().chunk(2, -1)
            fresh = (new[..., 2 * size :] + reset * old[..., 2 * size :]).tanh()
            state = (1 - keep) * fresh + keep * state
            found.append(state)
        return torch.stack(found, -2)


class DominoLaw(IndependentLaw):
    """Places whose logits read all tokens before them: base logits and W2 silu(W1 [h, g]) (Domino, 2605.29707).

    h is the row that drafts a place, g [`state_size`] the state of a GRU over the drafter's embeddings of b and of the
    tokens before the place. `rank` is that of W1; the first `free_places` have their base logits alone.
    """

    module_name = "domino_head"

    def __init__(
        self, config: BlockDrafterConfig, rank: int = 256, state_size: int = 1024, free_places: int = 0
    ) -> None:
        super().__init__(config)
        self.free_places, size = free_places, config.hidden_size
        self.prefix_gru = PrefixGRU(size, state_size)
        self.embed_proj = nn.Sequential(
            nn.Linear(size + state_size, rank, bias=False), nn.SiLU(), nn.Linear(rank, self.num_columns, bias=False)
        )

    def tables(self, rows: Tensor, logits: Tensor, anchor: Tensor | None, embeddings: Embeddings | None) -> RowTables:
        assert embeddings is not None
        return DominoTables(self, rows, embeddings)


class DominoTables(RowTables):
    """The biases of Domino's head for the rows of a block; the state is that of its GRU."""

    def __init__(self, law: DominoLaw, rows: Tensor, embeddings: Embeddings) -> None:
        self.law, self.embeddings, self.size = law, embeddings, law.num_columns
        self.rows = rows.to(law.prefix_gru.weight_ih_l0.dtype)

    def embed(self, ids: Tensor) -> Tensor:
        return self.embeddings(ids).to(self.rows)

    def bias(self, embedded: Tensor, place: int, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        states, count = self.law.prefix_gru(embedded, state), embedded.shape[-2]  # [..., j, H]
        free = min(max(self.law.free_places - place, 0), count)
        inputs = joined(self.rows[..., place : place + count, :], states)[..., free:, :]
        return nn.functional.pad(self.law.embed_proj(inputs), (0, 0, free, 0)), states[..., -1, :]


LAWS: dict[str, type[BlockLaw]] = {
    "independent": IndependentLaw,
    "markov": MarkovLaw,
    "domino": DominoLaw,
    "selector": SelectorLaw,
    **dict.fromkeys(("cp", "hmm", "btree"), CircuitLaw),
}
