"""Distributions over a window of n tokens: the contract, independent positions, and products of conditionals (Hydra).

A distribution computes in the dtype of its logits: float32 from models of every dtype, float64 for exact
work. -inf logits are legal: they are safe in value and in gradient. A head of any family makes one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...generation.tensors.sampling import draw
from ..common.draft_vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Given:
    """What known tokens add to a distribution whose leaves read them (`context`): biases of logits."""

    bias: Tensor  # [..., m, v], of the leaves of the first m positions, known ones included
    moves: Tensor | None = None  # [..., m - 1, r, r], of transitions


class TokenReader:
    """The tokens of a draft so far, as the leaves and transitions after them read them.

    `look_up` makes of a token [...] the biases of the next positions, side by side, [..., count v], in memory that
    nobody else reads, and that of the transition after it. `bias` [..., v] is of the leaf logits of the next position,
    `moves` [..., r, r] of the logits of the transitions after the tokens that are read.
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


Note = Callable[[Tensor], None]
"""Takes a number per token [...], which is NaN or infinite where its distribution is none."""
Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From probabilities [..., v] to tokens [...] and the probabilities [..., v] that they were really drawn from."""
NextLogits = Callable[[Tensor], Tensor]
"""From the embeddings [..., k, d] of the first k tokens of the window to the logits [..., V] of the next one."""


class WindowDistribution(ABC):
    """A probability distribution q over windows x_1..x_n of token ids."""

    window: int
    """n, the number of positions that are still free."""
    leaf_logits: Tensor
    """[..., n, r, v], unnormalised."""
    codes: DraftVocabulary | None = None
    """Tokens are codes of it: those from v on have no column and are no evidence of latent states."""

    @abstractmethod
    def prefix_log_prob(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        """Return log q(x_1..x_i) for every i and tokens [..., n]: [..., n]; `unknown` tokens are summed out."""

    @abstractmethod
    def conditional_log_probs(self, tokens: Tensor) -> Tensor:
        """Return log q(X_i = . | x_1..x_{i-1}) for tokens [..., n]: [..., n, v]."""

    @abstractmethod
    def next_log_probs(self, prefix: Tensor) -> Tensor:
        """Return log q(X_{j+1} = . | x_1..x_j) for prefixes [..., j], j < n: [..., v], up to a constant per prefix.

        Many prefixes of one distribution broadcast: a distribution with axes [B, 1] takes prefixes [B, k, j].
        """

    @abstractmethod
    def condition(self, first: Tensor) -> WindowDistribution:
        """Return the distribution of x_2..x_n given x_1 = `first` [...], in the same family."""

    @abstractmethod
    def draft(self, choose: Choose, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Return `length` tokens (None: all) that `choose` picks from exact conditionals, and their distributions."""

    def token_log_probs(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        """Return log q(x_i | x_1..x_{i-1}) for tokens [..., n]: [..., n]; 0 at `unknown` ones, which are summed out."""
        prefix = self.prefix_log_prob(tokens) if unknown is None else self.prefix_log_prob(tokens, unknown)
        before = torch.nn.functional.pad(prefix[..., :-1], (1, 0))
        return prefix - torch.where(before.isfinite(), before, torch.zeros_like(before))  # -inf - -inf is NaN

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Return log q(x) for tokens [..., n]: [...]."""
        return self.prefix_log_prob(tokens)[..., -1]

    def greedy(self, length: int | None = None, note: Note | None = None) -> Tensor:
        """Return the argmax of each exact conditional in turn, [..., n] or the first `length` of them."""
        return self.draft(partial(largest, note), length)[0]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Return one window per batch element by ancestral sampling, [..., n]."""
        return self.draft(lambda probs: (draw(probs, generator), probs))[0]

    def sample_with_probs(self, length: int) -> tuple[Tensor, Tensor]:
        """Return an ancestral sample and the distributions of its tokens, [..., length] and [..., length, v]."""
        return self.draft(lambda probs: (draw(probs), probs), length)


class _ConditionalsDistribution(WindowDistribution):
    """A distribution that is defined by its conditionals."""

    @abstractmethod
    def _all_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits [..., n, v] of all conditionals along tokens [..., n]."""

    def conditional_log_probs(self, tokens: Tensor) -> Tensor:
        return self._all_logits(tokens).log_softmax(-1).expand(*tokens.shape, -1)  # [..., n, v]

    def token_log_probs(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        chosen = log_probs_at(self._all_logits(tokens), tokens)
        return chosen if unknown is None else chosen.masked_fill(unknown, 0)

    def prefix_log_prob(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        return self.token_log_probs(tokens, unknown).cumsum(-1)


class FactorisedDistribution(_ConditionalsDistribution):
    """FF: q(x) = prod_i leaf_i[x_i] (Gloeckle et al. 2024), from leaf_logits [..., n, 1, v]."""

    def __init__(self, leaf_logits: Tensor) -> None:
        self.leaf_logits = leaf_logits
        self.window = leaf_logits.shape[-3]

    def _all_logits(self, tokens: Tensor) -> Tensor:
        return self.leaf_logits[..., 0, :]

    def given(self, given: Given) -> FactorisedDistribution:
        """Return the distribution with biased leaves."""
        return FactorisedDistribution(self.leaf_logits + given.bias[..., -self.window :, None, :])

    def next_log_probs(self, prefix: Tensor, given: Given | None = None) -> Tensor:
        leaf = self.leaf_logits[..., prefix.shape[-1], 0, :]  # [..., v]
        if given is not None:
            return leaf + given.bias[..., -1, :]
        return leaf.expand(*torch.broadcast_shapes(prefix.shape[:-1], leaf.shape[:-1]), -1)

    def condition(self, first: Tensor) -> FactorisedDistribution:
        return FactorisedDistribution(self.leaf_logits[..., 1:, :, :])

    def draft(self, choose: Choose, length: int | None = None) -> tuple[Tensor, Tensor]:
        return choose(self.leaf_logits[..., :length, 0, :].softmax(-1))

    def greedy(self, length: int | None = None, note: Note | None = None) -> Tensor:
        return largest(note, self.leaf_logits[..., :length, 0, :])[0]


class SequentialDistribution(_ConditionalsDistribution):
    """q(x) = prod_k softmax(next_logits(e(x_1), .., e(x_{k-1})))[x_k], where `embed` is e from ids [...] to [..., d].

    `known` [..., j, d] are the embeddings of bound tokens. `together`, where that is cheaper than one by one, is from
    embeddings [..., m, d] and j to the conditionals [..., m + 1 - j, V] after the first j, .., m of them.
    """

    def __init__(
        self,
        next_logits: NextLogits,
        embed: Callable[[Tensor], Tensor],
        window: int,
        known: Tensor,
        together: Callable[[Tensor, int], Tensor] | None = None,
    ) -> None:
        self.next_logits, self.embed, self.window, self.known = next_logits, embed, window, known
        self.together = together

    @property
    def leaf_logits(self) -> Tensor:
        """Logits of the first free position, [..., 1, 1, V]."""
        return self._logits(self.known)[..., None, None, :]

    def _all_logits(self, tokens: Tensor) -> Tensor:
        prefix = self._extended(tokens[..., :-1])  # [..., j + n - 1, d]
        bound = self.known.shape[-2]
        if self.together is not None:
            return exact(self.together(prefix, bound))
        steps = [self._logits(prefix[..., : bound + i, :]) for i in range(self.window)]  # n of [..., V]
        return torch.stack(torch.broadcast_tensors(*steps), -2)

    def next_log_probs(self, prefix: Tensor) -> Tensor:
        return self._logits(self._extended(prefix))

    def token_log_probs(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        refuse_gaps(unknown)
        return super().token_log_probs(tokens, unknown)

    def condition(self, first: Tensor) -> SequentialDistribution:
        known = self._extended(first[..., None])
        return SequentialDistribution(self.next_logits, self.embed, self.window - 1, known, self.together)

    def draft(self, choose: Choose, length: int | None = None) -> tuple[Tensor, Tensor]:
        distribution, drafted = self, list[tuple[Tensor, Tensor]]()
        for _ in range(self.window if length is None else min(length, self.window)):
            drafted.append(choose(distribution._logits(distribution.known).softmax(-1)))
            distribution = distribution.condition(drafted[-1][0])
        tokens, probs = zip(*drafted)
        return torch.stack(tokens, -1), torch.stack(probs, -2)  # [..., length], [..., length, V]

    def _logits(self, prefix: Tensor) -> Tensor:
        return exact(self.next_logits(prefix))

    def _extended(self, tokens: Tensor) -> Tensor:
        new = self.embed(tokens).to(self.known.dtype)  # [..., k, d]
        batch = torch.broadcast_shapes(new.shape[:-2], self.known.shape[:-2])
        return torch.cat([self.known.expand(*batch, -1, -1), new.expand(*batch, -1, -1)], -2)  # [..., j + k, d]


class PartialDistribution(WindowDistribution):
    """A distribution whose columns are the tokens of a draft vocabulary, over all token ids: 0 for the others.

    A token without a column may come first, as verification may add any token, or be in a sequence to evaluate.
    """

    def __init__(self, inner: WindowDistribution, vocabulary: DraftVocabulary) -> None:
        inner.codes = vocabulary
        self.inner, self.vocabulary, self.window = inner, vocabulary, inner.window

    @property
    def leaf_logits(self) -> Tensor:
        return self.inner.leaf_logits

    def prefix_log_prob(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        """Return -inf from the first known token on that is never drafted."""
        codes, others = self._codes(tokens, unknown)
        return self.inner.prefix_log_prob(codes, unknown).masked_fill(others.long().cumsum(-1).bool(), -torch.inf)

    def token_log_probs(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        """Return -inf at known tokens that are never drafted."""
        codes, others = self._codes(tokens, unknown)
        return self.inner.token_log_probs(codes, unknown).masked_fill(others, -torch.inf)

    def conditional_log_probs(self, tokens: Tensor) -> Tensor:
        return self.vocabulary.spread(self.inner.conditional_log_probs(self.vocabulary.codes(tokens)), -torch.inf)

    def next_log_probs(self, prefix: Tensor) -> Tensor:
        return self.vocabulary.spread(self.next_columns(prefix), -torch.inf)

    def next_columns(self, prefix: Tensor) -> Tensor:
        """Return `next_log_probs` of the columns alone."""
        return self.inner.next_log_probs(self.vocabulary.codes(prefix))

    def condition(self, first: Tensor) -> PartialDistribution:
        return PartialDistribution(self.inner.condition(self.vocabulary.codes(first)), self.vocabulary)

    def draft(self, choose: Choose, length: int | None = None) -> tuple[Tensor, Tensor]:

        def column(probs: Tensor) -> tuple[Tensor, Tensor]:
            token, chosen = choose(self.vocabulary.spread(probs))
            return self.vocabulary.codes(token), chosen

        codes, probs = self.inner.draft(column, length)
        return self.vocabulary.tokens(codes), probs

    def greedy(self, length: int | None = None, note: Note | None = None) -> Tensor:
        return self.vocabulary.tokens(self.inner.greedy(length, note))

    def sample_with_probs(self, length: int) -> tuple[Tensor, Tensor]:
        codes, probs = self.inner.sample_with_probs(length)
        return self.vocabulary.tokens(codes), self.vocabulary.spread(probs)

    def _codes(self, tokens: Tensor, unknown: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return codes [..., n], and which of them are known and never drafted."""
        codes = self.vocabulary.codes(tokens)
        others = codes >= len(self.vocabulary)
        return codes, others if unknown is None else others & ~unknown


def refuse_gaps(unknown: Tensor | None) -> None:
    """Refuse an unknown token that a known one follows, of a distribution that reads the tokens before."""
    if unknown is not None and bool((unknown[..., :-1] & ~unknown[..., 1:]).any()):
        raise ValueError("unknown: a sequential distribution can sum tokens out at the end of the window only")


def largest(note: Note | None, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the argmax [...] of weights [..., v], and the weights."""
    best = weights.max(-1)
    if note is not None:
        note(best.values)
    return best.indices, weights


def at_tokens(log_probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the entries [...] of log-probabilities [..., v] at tokens [...]; any at codes from v on."""
    return log_probs.gather(-1, tokens[..., None].clamp(max=log_probs.shape[-1] - 1))[..., 0]


def log_probs_at(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the entries [...] of log_softmax(logits [..., v]) at tokens [...]; any at codes from v on."""
    if torch.is_grad_enabled() and logits.requires_grad and logits.shape[:-1] == tokens.shape:
        index = tokens[..., None].clamp(max=logits.shape[-1] - 1)
        return cast(Tensor, _LogProbsAt.apply(logits, index))[..., 0]
    batch = torch.broadcast_shapes(logits.shape[:-1], tokens.shape)
    return at_tokens(logits.log_softmax(-1).expand(*batch, -1), tokens.expand(batch))


class _LogProbsAt(torch.autograd.Function):
    """Its gradient is made in one tensor as large as the logits, where autograd's own takes two and more passes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor) -> Tensor:
        log_probs = logits.log_softmax(-1)
        ctx.save_for_backward(log_probs, index)
        return log_probs.gather(-1, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return g (1[v = index] - softmax(logits)_v) for a gradient g [..., 1]."""
        log_probs, index = ctx.saved_tensors
        return log_probs.exp().mul_(-gradient).scatter_add_(-1, index, gradient), None


def logsumexp(values: Tensor, dim: int) -> Tensor:
    """Return log sum exp over one axis; where all values are -inf, -inf with the gradient 0 (torch's is NaN)."""
    if not (torch.is_grad_enabled() and values.requires_grad):
        return values.logsumexp(dim)
    top = values.detach().amax(dim, keepdim=True)  # 1 in the axis
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    total = (values - top).exp().sum(dim)
    empty = total == 0
    return torch.where(empty, float("-inf"), torch.where(empty, 1.0, total).log() + top.squeeze(dim))


def exact(logits: Tensor) -> Tensor:
    """Return the logits in float32 (float64 stays)."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
