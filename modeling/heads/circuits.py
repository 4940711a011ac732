"""Circuits: mixtures over latent states whose every prefix marginal is exact (MtPC). Evaluation, not structure.

Layouts (softmax over the last axis, any leading batch dimensions): `leaf_logits` [..., n, r, v], `root_logits`
[..., r], `trans_logits` [..., n - 1 or 1, r, r] from row to column, `node_logits` [..., n - 2, r, r] from the parent's
state to the node's. Position i emits from the latent that owns it.

Texts are evaluated in log space, with gradients. Drafts are made in linear space, where every operation counts: on an
accelerator each is a launch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count
from typing import TypeVar

import torch
from torch import Tensor

from ...generation.tensors.sampling import exponentials
from .reading import Given, ReadLeaves, TokenReader, raced
from .window_distribution import (
    Choose,
    Note,
    WindowDistribution,
    largest,
    log_probs_at,
    logsumexp,
)

Walk = Generator[Tensor, Tensor, Tensor | None]
"""Yields the probabilities [..., v] of a position; is sent the chosen token [...]."""
Scale = Callable[[Tensor], Tensor]
Own = TypeVar("Own", bound="LatentDistribution")


@dataclass(frozen=True)
class Semiring:
    """The arithmetic of weights: `LOG` or `LINEAR`.

    Args:
        one: Weight of what is certain.
        times: Product of weights.
        cumulated: Products of all weights up to each.
        moved: Weights [..., r] times probabilities [..., r, r].
    """

    one: float
    times: Callable[[Tensor, Tensor], Tensor]
    cumulated: Callable[[Tensor, int], Tensor]
    moved: Callable[[Tensor, Tensor], Tensor]


def moved(weights: Tensor, steps: Tensor) -> Tensor:
    """weights @ steps, [..., r] by [..., r, s]; many prefixes of one distribution are one product."""
    if steps.dim() > 2 and steps.shape[-3] == 1 and weights.dim() > 1:
        return weights @ steps.squeeze(-3)
    return (weights[..., None, :] @ steps)[..., 0, :]


def log_moved(weights: Tensor, steps: Tensor) -> Tensor:
    """log(exp(weights) @ steps): no copy as large as the steps per text, unlike a logsumexp."""
    top = weights.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).min)  # [..., 1]
    total = moved((weights - top).exp(), steps)  # [..., s]
    empty = total == 0
    return torch.where(empty, -torch.inf, torch.where(empty, 1.0, total).log() + top)


LOG = Semiring(0.0, torch.add, torch.cumsum, log_moved)
LINEAR = Semiring(1.0, torch.mul, torch.cumprod, moved)

_RULED_OUT = -1e4, 1e-30
"""Least evidence of a bound token, as log and linear: where no state can emit it, all remain as likely as before."""
_RANGE = 60.0
"""Nats that weights may lose before they are scaled: half of what float32 has, for others in the sum are larger."""


class LatentDistribution(WindowDistribution):
    """What circuits share: all follows from the weight of the owner's state before each position.

    Args:
        root_logits: [..., r].
        leaf_logits: [..., n, r, v].

    Attributes:
        reader: The tokens that leaves read while drafting; None: they read none.
    """

    reader: TokenReader | None = None

    def __init__(self, root_logits: Tensor, leaf_logits: Tensor) -> None:
        self.root_logits, self.leaf_logits, self._all_leaves = root_logits, leaf_logits, leaf_logits
        self.window, self.rank, self.size = leaf_logits.shape[-3:]
        self._known: Tensor | None = None

    @abstractmethod
    def owner_weights(self, evidence: Tensor, ring: Semiring = LOG) -> Tensor:
        """q(z_owner(i), x_1..x_{i-1}) from leaves at the tokens [..., n, r], in the weights of `ring`: [..., n, r].

        Those of the first m positions, given their evidence alone, are exact.
        """

    @abstractmethod
    def _walk(self, leaves: Sequence[Tensor], known: list[Tensor], unit: Scale) -> Walk:
        """Yield the probabilities [..., v] of each position after the known ones; `unit` scales weights.

        A leaf is looked up once, when all tokens before it are chosen.
        """

    @abstractmethod
    def _tables(self, known: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Rows [..., R, r] from which states are drawn, for every state before them, and factors of them, if any."""

    @abstractmethod
    def _states(self, picks: Tensor, skipped: int) -> Tensor:
        """States [..., n - skipped] of the owners after what each row of `_tables` has picked [..., R]."""

    @cached_property
    def root(self) -> Tensor:
        """Probabilities [..., r] of the first state."""
        return self.root_logits.softmax(-1)

    def _root_of(self, ring: Semiring) -> Tensor:
        return self.root if ring is LINEAR else self.root_logits.log_softmax(-1)

    @property
    def _learns(self) -> bool:
        return torch.is_grad_enabled() and self._all_leaves.requires_grad

    @cached_property
    def _leaves(self) -> tuple[Tensor, Tensor]:
        """Leaves [..., n, r, v] in log space, and the log of what they sum to, [..., n, r] or 0.

        Where a gradient is wanted they are normalised: that is one kernel forwards and one back, a logsumexp is many.
        Elsewhere no copy as large as the logits is kept.
        """
        if self._learns:
            return self._all_leaves.log_softmax(-1), self._all_leaves.new_zeros(())
        return self._all_leaves, self._all_leaves.logsumexp(-1)

    @cached_property
    def _probs(self) -> Tensor:
        """Leaves [..., n, r, v] in linear space."""
        return self._all_leaves.softmax(-1)

    @property
    def bound(self) -> int:
        """Tokens that the distribution is conditioned on; the window follows them."""
        return 0 if self._known is None else self._known.shape[-1]

    def condition(self, first: Tensor) -> LatentDistribution:
        """Bind a token: evidence like any other, and computed with what comes."""
        rest, known = copy(self), first[..., None]  # [..., 1]
        rest._known = known if self._known is None else torch.cat([self._known, known], -1)  # [..., bound]
        rest.leaf_logits, rest.window = self.leaf_logits[..., 1:, :, :], self.window - 1  # [..., n - 1, r, v]
        return rest

    def given(self: Own, given: Given) -> Own:
        """Return the distribution with biased leaves."""
        other, bound = self._fresh(), self.bound
        other._all_leaves = self._all_leaves + given.bias[..., None, :]  # [..., n, r, v]
        other.leaf_logits = other._all_leaves[..., bound:, :, :]
        return other

    def _fresh(self: Own) -> Own:
        """Return a copy without what is computed of parameters."""
        other = copy(self)
        for name in ("_leaves", "_probs", "steps"):
            vars(other).pop(name, None)
        return other

    def _with_bound(self, tokens: Tensor) -> Tensor:
        known = self._known
        return tokens if known is None else torch.cat([known.expand(*tokens.shape[:-1], -1), tokens], -1)

    def _evidence(self, tokens: Tensor) -> Tensor:
        """log leaf_i[z, x_i] of bound tokens and of tokens [..., n] after them; 0 for those without a column."""
        tokens, bound = self._with_bound(tokens), self.bound
        if self._learns and "_leaves" not in vars(self):  # no leaf is read elsewhere
            found = log_probs_at(self._all_leaves, self._index(tokens, self._all_leaves))
        else:
            leaves, norm = self._leaves
            found = self._at(leaves, tokens) - norm  # [..., n, r]
        if self.codes is not None:
            found = found.masked_fill((tokens >= self.size)[..., None], 0)
        if not bound:
            return found
        return torch.cat([found[..., :bound, :].clamp_min(_RULED_OUT[0]), found[..., bound:, :]], -2)

    def _seen(self, tokens: Tensor, probs: Tensor | None = None) -> Tensor:
        """Leaves [..., m, r] of the first m tokens, which are possible, in linear space; `probs` are those leaves."""
        probs = self._probs[..., : tokens.shape[-1], :, :] if probs is None else probs  # [..., m, r, v]
        found = self._at(probs, tokens).clamp_min(_RULED_OUT[1])  # [..., m, r]
        return found if self.codes is None else found.masked_fill((tokens >= self.size)[..., None], 1)

    def _at(self, leaves: Tensor, tokens: Tensor) -> Tensor:
        """Entries [..., n, r] of leaves [..., n, r, v] at tokens [..., n]; any at codes from v on."""
        index = self._index(tokens, leaves)
        return leaves.expand(*index.shape, -1).gather(-1, index[..., None])[..., 0]  # [..., n, r]

    def _index(self, tokens: Tensor, leaves: Tensor) -> Tensor:
        """Where leaves [..., n, r, v] hold tokens [..., n]: [..., n, r]."""
        tokens, shape = tokens if self.codes is None else tokens.clamp(max=self.size - 1), leaves.shape[-3:]
        batch = torch.broadcast_shapes(tokens.shape[:-1], leaves.shape[:-3])
        return tokens.expand(*batch, -1)[..., None].expand(*batch, *shape[:-1])

    def prefix_log_prob(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        """log q(x_1..x_i), summing out the owner of position i; an unknown token is no evidence."""
        evidence, bound = self._evidence(tokens), self.bound
        if unknown is not None:
            evidence = evidence.masked_fill(torch.nn.functional.pad(unknown, (bound, 0))[..., None], 0)
        found = logsumexp(self.owner_weights(evidence) + evidence, -1)  # [..., n]
        return found[..., bound:] - found[..., bound - 1 : bound] if bound else found  # given the bound

    def conditional_log_probs(self, tokens: Tensor) -> Tensor:
        """Return the posterior of each owner applied to its leaf."""
        bound, (leaves, norm) = self.bound, self._leaves
        weights = self.owner_weights(self._evidence(tokens))[..., bound:, :]  # [..., n, r]
        norm = norm[..., bound:, :] if norm.dim() else norm
        mixed = logsumexp(leaves[..., bound:, :, :] + (weights - norm)[..., None], -2)  # [..., n, v]
        total = logsumexp(weights, -1)[..., None]  # [..., n, 1]
        return mixed - torch.where(total.isfinite(), total, torch.zeros_like(total))

    def next_log_probs(self, prefix: Tensor, given: Given | None = None) -> Tensor:
        """One mixture of leaves: the weights do not depend on what follows the prefix."""
        evidence = self._seen(self._with_bound(prefix))  # [..., m, r]
        position, tiny = evidence.shape[-2], torch.finfo(evidence.dtype).tiny
        norms = None if given is None else self._norms(given.bias).clamp_min(tiny)  # [..., m + 1, r]
        evidence = evidence if norms is None else evidence / norms[..., :-1, :]
        evidence = evidence / evidence.amax(-1, keepdim=True)  # the largest is 1
        weights = self.owner_weights(torch.nn.functional.pad(evidence, (0, 0, 0, 1), value=1.0), LINEAR)[..., -1, :]
        weights = weights.clamp_min(tiny)  # where all underflow, they are equal
        weights = weights if norms is None else weights / norms[..., -1, :]
        mixed = (weights[..., None, :] @ self._probs[..., position, :, :])[..., 0, :].log()
        return mixed if given is None else mixed + given.bias[..., -1, :]

    def _norms(self, bias: Tensor) -> Tensor:
        """Sums [..., m, r] of leaves times exp(bias), up to a factor per position: no leaf is made for every prefix."""
        factors = (bias - bias.amax(-1, keepdim=True)).exp().to(self._probs.dtype)  # [..., m, v]
        return torch.einsum("...mrv,...mv->...mr", self._probs[..., : bias.shape[-2], :, :], factors)

    def draft(self, choose: Choose, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Exact conditionals one after the other, in linear space (each is normalised, so nothing underflows)."""
        tokens, probs = self._along(choose, length, _unit)
        return torch.stack(tokens, -1), torch.stack(probs, -2)

    def greedy(self, length: int | None = None, note: Note | None = None) -> Tensor:
        """Argmax of each exact conditional in turn; an argmax needs no normalisation, but for what would underflow."""
        return torch.stack(
            self._along(partial(largest, note), length, never if self._is_short else _now_and_then())[0], -1
        )

    def sample_with_probs(self, length: int) -> tuple[Tensor, Tensor]:
        """Draw the states, then all tokens at once, and compute the exact conditionals along them."""
        if self.bound > 1:
            return super().sample_with_probs(length)
        own, known = self._probs[..., self.bound : self.bound + length, :, :], self._known_probs()
        rows = self._raced(own, known)  # [..., length, v]
        if self.reader is None:
            tokens = rows.argmax(-1)  # [..., length]
        else:  # leaves are those at the tokens
            tokens, bias = raced(rows.log_(), self.reader)
            own = (self.leaf_logits[..., :length, :, :] + bias[..., None, :]).softmax(-1)
        evidence = self._at(own, tokens)  # [..., length, r]
        evidence = torch.cat([known[0][..., None, :], evidence], -2) if known else evidence
        if not self._is_short:
            evidence = evidence / evidence.amax(-1, keepdim=True)
        weights = _unit(self.owner_weights(evidence, LINEAR)[..., self.bound :, :])  # [..., length, r]
        return tokens, (weights[..., None, :] @ own)[..., 0, :]  # [..., length, v]

    def _raced(self, own: Tensor, known: list[Tensor]) -> Tensor:
        """Return the leaves [..., m, v] of states that are drawn, raced: their argmaxes are an ancestral sample.

        A race argmax w / E with E ~ Exp(1) draws for every state what would come next; then it is looked up.
        """
        length, (tables, factors) = own.shape[-3], self._tables(known)
        sizes = tables.shape[-2:].numel(), length * self.size
        arrivals = exponentials((*tables.shape[:-2], sum(sizes)), tables.dtype, tables.device)
        early, late = arrivals.split(sizes, -1)
        early = early.unflatten(-1, tables.shape[-2:])  # [..., R, r]
        early = early if factors is None else early.div_(factors)
        states = self._states((tables / early).argmax(-1), self.bound)[..., :length]  # [..., length]
        rows = own.gather(-2, states[..., None, None].expand(*own.shape[:-2], 1, self.size))[..., 0, :]
        return rows / late.unflatten(-1, (length, self.size))

    def _known_probs(self) -> list[Tensor]:
        """Leaves [..., r] of bound tokens."""
        return [] if self._known is None else list(self._seen(self._known).unbind(-2))

    @property
    def _is_short(self) -> bool:
        """Whether weights can take the probabilities of a whole window, which are seldom below chance."""
        return self.full_window * math.log(self.size) < _RANGE

    @cached_property
    def counts_launches(self) -> bool:
        """Whether a launch costs more than small products do: on accelerators."""
        return self._all_leaves.device.type != "cpu"

    @property
    def full_window(self) -> int:
        """n, bound tokens included."""
        return self._all_leaves.shape[-3]

    def _along(self, choose: Choose, length: int | None, unit: Scale) -> tuple[list[Tensor], list[Tensor]]:
        """Tokens and distributions that `choose` gives in turn."""
        stop, tokens, probs, reader = None if length is None else self.bound + length, [], [], self.reader
        if reader is None:
            leaves, known = self._probs[..., :stop, :, :].unbind(-3), self._known_probs()
        else:
            leaves, known = ReadLeaves(self._all_leaves[..., :stop, :, :].unbind(-3), reader), []
            for token in () if self._known is None else self._known.unbind(-1):
                known.append(self._seen(token[..., None], leaves[len(known)][..., None, :, :])[..., 0, :])
                reader.read(token)
        walk = self._walk(leaves, known, unit)
        shown = next(walk)
        for position in range(len(known), len(leaves)):
            token, distribution = choose(shown)
            tokens.append(token)
            probs.append(distribution)
            if position + 1 < len(leaves):
                if reader is not None:
                    reader.read(token)
                shown = walk.send(token)
        return tokens, probs


class MixtureDistribution(LatentDistribution):
    """CP: q(x) = sum_z root[z] prod_i leaf_i[z, x_i]."""

    def owner_weights(self, evidence: Tensor, ring: Semiring = LOG) -> Tensor:
        """Return the root times all evidence before i."""
        root = self._root_of(ring)[..., None, :].expand_as(evidence[..., :1, :])  # [..., 1, r]
        return ring.cumulated(torch.cat([root, evidence[..., :-1, :]], dim=-2), -2)  # [..., n, r]

    def _walk(self, leaves: Sequence[Tensor], known: list[Tensor], unit: Scale) -> Walk:
        return (yield from stepwise(self.root, leaves, known, unit, lambda position, weights: weights))

    def _tables(self, known: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return (self.root * known[0] if known else self.root)[..., None, :], None  # [..., 1, r]

    def _states(self, picks: Tensor, skipped: int) -> Tensor:
        return picks.expand(*picks.shape[:-1], self.window)


def stepwise(
    weights: Tensor, leaves: Sequence[Tensor], known: list[Tensor], unit: Scale, step: Callable[[int, Tensor], Tensor]
) -> Walk:
    """Walk along a chain of states with weights [..., r]: `step` moves them from a position to the next."""
    for position in range(len(leaves)):
        if position < len(known):
            found = known[position]
        else:
            leaf = leaves[position]
            found = column(leaf, (yield moved(weights, leaf)))
        if position + 1 < len(leaves):
            weights = step(position, unit(weights * found))
    return None


def column(table: Tensor, token: Tensor) -> Tensor:
    """Return the column [..., r] of a table [..., r, v] at a token [...]."""
    return table.gather(-1, token[..., None, None].expand(*table.shape[:-1], 1))[..., 0]


def _unit(weights: Tensor) -> Tensor:
    """Return the weights divided by their sum; zeros stay zeros."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def never(weights: Tensor) -> Tensor:
    """Return the weights as they are."""
    return weights


def _now_and_then() -> Scale:
    """`_unit` at every fourth call: what is left in between is the probability of four tokens, far from underflow."""
    calls = count(1)
    return lambda weights: weights if next(calls) % 4 else _unit(weights)
