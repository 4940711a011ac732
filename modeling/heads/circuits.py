"""Circuits: mixtures over latent states whose every prefix marginal is exact (MtPC). Evaluation, not structure.

Layouts (softmax over the last axis, any leading batch dimensions): `leaf_logits` [..., n, r, v], `root_logits`
[..., r], `trans_logits` [..., n - 1 or 1, r, r] from row to column, `node_logits` [..., n - 2, r, r] from the parent's
state to the node's. Position i emits from the latent that owns it.

A mixture (CP) has one latent, an HMM a chain of them, a BTree a balanced binary tree. Its nodes are numbered in level
order, 0 being the root; a span of m positions splits into floor(m / 2) and the rest, and a position hangs on the latent
of the node that splits it off. Texts are evaluated in log space, with gradients; drafts are made in linear space.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Generator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import count
from typing import Self

import torch
from torch import Tensor

from ...generation.tensors.masks import made_once, numbers
from ...generation.tensors.sampling import exponentials
from .window_distribution import (
    Choose,
    Given,
    Note,
    ReadLeaves,
    TokenReader,
    WindowDistribution,
    largest,
    log_probs_at,
    logsumexp,
    raced,
)

Walk = Generator[Tensor, Tensor, Tensor | None]
"""Yields the probabilities [..., v] of a position; is sent the chosen token [...]."""
Scale = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Semiring:
    """The arithmetic of weights, `LOG` or `LINEAR`; `moved` takes weights [..., r] times probabilities [..., r, r]."""

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
    """What circuits share: all follows from the weight of the owner's state before each position."""

    reader: TokenReader | None = None
    """The tokens that leaves read while drafting."""

    def __init__(self, root_logits: Tensor, leaf_logits: Tensor) -> None:
        self.root_logits, self.leaf_logits, self._all_leaves = root_logits, leaf_logits, leaf_logits
        self.window, self.rank, self.size = leaf_logits.shape[-3:]
        self._known: Tensor | None = None

    @abstractmethod
    def owner_weights(self, evidence: Tensor, ring: Semiring = LOG) -> Tensor:
        """q(z_owner(i), x_1..x_{i-1}) [..., n, r] in `ring`, of the first n positions from leaves at their tokens."""

    @abstractmethod
    def _walk(self, leaves: Sequence[Tensor], known: list[Tensor], unit: Scale) -> Walk:
        """Yield the probabilities [..., v] of positions after the known ones, whose leaves are looked up in turn."""

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
        """Leaves [..., n, r, v] in log space, and logs of their sums [..., n, r]; normalised where they learn."""
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
        rest, known = copy(self), first[..., None]  # [..., 1]
        rest._known = known if self._known is None else torch.cat([self._known, known], -1)  # [..., bound]
        rest.leaf_logits, rest.window = self.leaf_logits[..., 1:, :, :], self.window - 1  # [..., n - 1, r, v]
        return rest

    def given(self, given: Given) -> Self:
        other, bound = self._fresh(), self.bound
        other._all_leaves = self._all_leaves + given.bias[..., None, :]  # [..., n, r, v]
        other.leaf_logits = other._all_leaves[..., bound:, :, :]
        return other

    def _fresh(self) -> Self:
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
        bound, (leaves, norm) = self.bound, self._leaves
        weights = self.owner_weights(self._evidence(tokens))[..., bound:, :]  # [..., n, r]
        norm = norm[..., bound:, :] if norm.dim() else norm
        mixed = logsumexp(leaves[..., bound:, :, :] + (weights - norm)[..., None], -2)  # [..., n, v]
        total = logsumexp(weights, -1)[..., None]  # [..., n, 1]
        return mixed - torch.where(total.isfinite(), total, torch.zeros_like(total))

    def next_log_probs(self, prefix: Tensor, given: Given | None = None) -> Tensor:
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
        tokens, probs = self._along(choose, length, _unit)
        return torch.stack(tokens, -1), torch.stack(probs, -2)

    def greedy(self, length: int | None = None, note: Note | None = None) -> Tensor:
        """Argmax of each exact conditional in turn; an argmax needs no normalisation, but for what would underflow."""
        unit = never if self._is_short else _now_and_then()
        return torch.stack(self._along(partial(largest, note), length, unit)[0], -1)

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
        """Return the leaves [..., m, v] of states that are drawn, raced: their argmaxes are an ancestral sample."""
        # argmax w / E with E ~ Exp(1) draws for every state what would come next; then it is looked up
        length, (tables, factors) = own.shape[-3], self._tables(known)
        sizes = tables.shape[-2:].numel(), length * self.size
        arrivals = exponentials((*tables.shape[:-2], sum(sizes)), tables.dtype, tables.device)
        early, late = arrivals.split(sizes, -1)
        early = early.unflatten(-1, tables.shape[-2:])  # [..., R, r]
        early = early if factors is None else early / factors
        states = self._states((tables / early).argmax(-1), self.bound)[..., :length]  # [..., length]
        rows = own.gather(-2, states[..., None, None].expand(*own.shape[:-2], 1, self.size))[..., 0, :]
        return rows / late.unflatten(-1, (length, self.size))

    def _known_probs(self) -> list[Tensor]:
        return [] if self._known is None else list(self._seen(self._known).unbind(-2))  # leaves [..., r]

    @property
    def _is_short(self) -> bool:
        """Whether weights can take the probabilities of a whole window, which are seldom below chance."""
        return self.full_window * math.log(self.size) < _RANGE

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
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def never(weights: Tensor) -> Tensor:
    """Return the weights as they are."""
    return weights


def _now_and_then() -> Scale:
    """`_unit` at every fourth call: what is left in between is the probability of four tokens, far from underflow."""
    calls = count(1)
    return lambda weights: weights if next(calls) % 4 else _unit(weights)


_SYSTEM = 2**20
"""Entries of a filter's triangular system up to which it is solved at once."""


class ChainDistribution(LatentDistribution):
    """HMM: z_1 ~ root, z_{i+1} ~ trans_i[z_i], x_i ~ leaf_i[z_i]; one transition for all steps if only one is given."""

    def __init__(self, root_logits: Tensor, trans_logits: Tensor, leaf_logits: Tensor) -> None:
        super().__init__(root_logits, leaf_logits)
        self.trans_logits = trans_logits

    @cached_property
    def steps(self) -> Tensor:
        """Probabilities [..., n - 1, r, r] of every transition."""
        steps = self.trans_logits.softmax(-1)  # [..., n - 1 or 1, r, r]
        return steps if steps.shape[-3] != 1 else steps.expand(*steps.shape[:-3], self.full_window - 1, -1, -1)

    def owner_weights(self, evidence: Tensor, ring: Semiring = LOG) -> Tensor:
        root, found = self._root_of(ring).expand_as(evidence[..., 0, :]), evidence.unbind(-2)
        steps, weights = self.steps[..., : len(found) - 1, :, :], [root]
        if ring is LINEAR and evidence.numel() * len(found) * self.rank <= _SYSTEM:
            return self._solved(root, evidence[..., :-1, :, None], steps)
        if ring is LINEAR:  # one product for the evidence of all positions
            for step in (evidence[..., :-1, :, None] * steps).unbind(-3):
                weights.append(moved(weights[-1], step))
            return torch.stack(weights, -2)
        # taken apart at once: each of many slices would have a gradient as large as all steps
        for step, seen in zip(steps.unbind(-3), found):
            weights.append(ring.moved(ring.times(weights[-1], seen), step))
        return torch.stack(weights, -2)

    def _solved(self, root: Tensor, seen: Tensor, steps: Tensor) -> Tensor:
        """The filter as one triangular system w A = (root, 0, ..): A = 1 - weighted steps right of the diagonal."""
        size = seen.shape[-3] + 1
        system = root.new_zeros(*root.shape[:-1], size, self.rank, size, self.rank)  # [..., n, r, n, r]
        system.diagonal(1, -4, -2).movedim(-1, -3).addcmul_(seen, steps, value=-1)  # right of the diagonal
        system = system.flatten(-2).flatten(-3, -2)  # [..., n r, n r]
        start = torch.nn.functional.pad(root, (0, (size - 1) * self.rank))[..., None, :]  # [..., 1, n r]
        solved = torch.linalg.solve_triangular(system, start, upper=True, left=False, unitriangular=True)
        return solved.unflatten(-1, (size, self.rank))[..., 0, :, :]  # [..., n, r]

    def given(self, given: Given) -> Self:
        return super().given(given)._moving(given.moves)

    def _moving(self, moves: Tensor | None) -> Self:
        """Return the distribution with a bias [..., m, r, r] of its first m transitions."""
        if moves is None:
            return self
        other, logits = self._fresh(), self.trans_logits
        other.trans_logits = (logits[..., : moves.shape[-3], :, :] if logits.shape[-3] > 1 else logits) + moves
        return other

    def next_log_probs(self, prefix: Tensor, given: Given | None = None) -> Tensor:
        moving = self if given is None else self._moving(given.moves)
        return super(ChainDistribution, moving).next_log_probs(prefix, given)

    def _read_step(self, moves: Sequence[Tensor | None], position: int, weights: Tensor) -> Tensor:
        logits, bias = self.trans_logits, moves[position]
        if bias is None:
            return moved(weights, self.steps[..., position, :, :])
        logits = logits[..., position if logits.shape[-3] > 1 else 0, :, :]
        return moved(weights, (logits + bias).softmax(-1))

    def _walk(self, leaves: Sequence[Tensor], known: list[Tensor], unit: Scale) -> Walk:
        """One product per position gives both the next state's weights and the next token's probabilities."""
        if isinstance(leaves, ReadLeaves):
            return (yield from stepwise(self.root, leaves, known, unit, partial(self._read_step, leaves.reader.moves)))
        steps = self.steps[..., : len(leaves) - 1, :, :]  # [..., n - 1, r, r]
        ahead = torch.cat([steps, steps @ torch.stack([*leaves[1:]], -3)], -1).unbind(-3) if len(leaves) > 1 else ()
        weights = probs = self.root  # which is no more than a start where the first token is known
        if not known:
            probs = moved(weights, leaves[0])
        for position, table in enumerate(ahead):
            found = known[position] if position < len(known) else column(leaves[position], (yield probs))
            weights, probs = moved(unit(weights * found), table).split([self.rank, self.size], -1)
        yield probs
        return None

    def _tables(self, known: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        first = moved(self.root * known[0], self.steps[..., 0, :, :]) if known else self.root  # [..., r]
        rows = self.steps[..., len(known) :, :, :].flatten(-3, -2)  # a row for each state of each step
        return torch.cat([first[..., None, :], rows], -2), None

    def _states(self, picks: Tensor, skipped: int) -> Tensor:
        states = [picks[..., :1]]
        maps = picks[..., 1:].unflatten(-1, ((picks.shape[-1] - 1) // self.rank, self.rank))  # [..., n - 1, r]
        for chosen in maps.unbind(-2):
            states.append(chosen.gather(-1, states[-1]))
        return torch.cat(states, -1)  # [..., n]


_TABLES = 2**22
"""Entries of the tables of pairs up to which they are made: few launches, where they are small."""


@lru_cache(maxsize=256)
def balanced(window: int) -> tuple[int | None, ...]:
    """Return the positions of the MtPC paper's BTree by slot: the leaves of a perfect tree, None where one is empty.

    Above an empty slot, the last node is no latent: it has its parent's state.

    Example:
        >>> balanced(5)
        (None, 0, None, 1, None, 2, 3, 4)
    """
    spans = [(0, window)]
    for _ in range((window - 1).bit_length()):
        cuts = [(low, low + (high - low) // 2, high) for low, high in spans]
        spans = [span for low, middle, high in cuts for span in ((low, middle), (middle, high))]
    return tuple(low if high > low else None for low, high in spans)


class TreeDistribution(LatentDistribution):
    """BTree: q(x) = sum_z root[z_0] prod_{h>0} node_h[z_parent(h), z_h] prod_i leaf_i[z_owner(i), x_i].

    All prefixes at once take one pass up and one down the levels: a prefix has seen every left sibling of the path to
    its next position, and nothing to the right of it.
    """

    def __init__(self, root_logits: Tensor, node_logits: Tensor | None, leaf_logits: Tensor) -> None:
        super().__init__(root_logits, leaf_logits)
        if node_logits is None:  # a window of one or two positions
            node_logits = root_logits.new_zeros(*root_logits.shape[:-1], 0, self.rank, self.rank)
        self.node_logits: Tensor = node_logits
        self.slots = balanced(self.window)
        self.depth, self.is_perfect = (self.window - 1).bit_length(), None not in self.slots

    @cached_property
    def _sums(self) -> Tensor:
        """Probabilities [..., 1 + (n - 2) r, r] in one launch: the root's, and every node's given its parent."""
        root, nodes = self.root_logits[..., None, :], self.node_logits.flatten(-3, -2)
        batch = torch.broadcast_shapes(root.shape[:-2], nodes.shape[:-2])
        return torch.cat([each.expand(*batch, -1, -1) for each in (root, nodes)], -2).softmax(-1)

    @cached_property
    def root(self) -> Tensor:
        """Probabilities [..., r] of the first state."""
        return self._sums[..., 0, :]

    @cached_property
    def steps(self) -> list[Tensor]:
        """Probabilities [..., 2^d, r, r] of the nodes of every level d from 1 on; the identity where one is none."""
        counts = [2**d for d in range(1, self.depth)]
        steps = self._sums[..., 1:, :].unflatten(-2, self.node_logits.shape[-3:-1])
        if not self.is_perfect and counts:
            same = torch.eye(self.rank, dtype=steps.dtype, device=steps.device).expand_as(steps[..., :1, :, :])
            found, nodes = count(sum(counts[:-1])), list(range(sum(counts[:-1])))
            nodes += [next(found) if left is not None else steps.shape[-3] for left in self.slots[::2]]
            steps = _select(torch.cat([steps, same], -3), nodes, -3)
        return list(steps.split(counts, -3)) if counts else []

    def owner_weights(self, evidence: Tensor, ring: Semiring = LOG) -> Tensor:
        """Return the messages up (what a whole span says of its parent's state), then weights down."""
        given, missing = evidence.shape[-2], self.full_window - evidence.shape[-2] + (not self.is_perfect)
        if missing:
            evidence = torch.nn.functional.pad(evidence, (0, 0, 0, missing), value=ring.one)
        if not self.is_perfect:
            evidence = _select(evidence, [self.full_window if i is None else i for i in self.slots], -2)
        messages = [evidence]
        for steps in reversed(self.steps):
            inside = ring.times(messages[0][..., ::2, :], messages[0][..., 1::2, :])  # of pairs of siblings
            messages.insert(0, ring.moved(inside, steps.mT))
        weights = self._root_of(ring)[..., None, :].expand_as(evidence[..., :1, :])  # [..., 1, r]
        for level, message in enumerate(messages[: self.depth]):
            weights = ring.moved(weights, self.steps[level - 1]) if level else weights
            weights = torch.stack([weights, ring.times(weights, message[..., ::2, :])], -2).flatten(-3, -2)
        return (weights if self.is_perfect else _select(weights, self._filled, -2))[..., :given, :]

    @property
    def _filled(self) -> list[int]:
        return [slot for slot, position in enumerate(self.slots) if position is not None]

    def _walk(self, leaves: Sequence[Tensor], known: list[Tensor], unit: Scale) -> Walk:
        return (yield from self._visit(0, 0, self.root, leaves, known, unit))

    def _visit(
        self, level: int, index: int, weights: Tensor, leaves: Sequence[Tensor], known: list[Tensor], unit: Scale
    ) -> Walk:
        """Walk a span; returns what it says of its parent's state, None where it is empty."""
        if level == self.depth:
            position = self.slots[index]
            if position is None or position < len(known):
                return None if position is None else known[position]
            leaf = leaves[position]
            return column(leaf, (yield moved(weights, leaf)))
        in_pairs = self.counts_launches and unit is never and self.reader is None
        if in_pairs and 0 < level == self.depth - 1 and self._pairs is not None:
            return (yield from self._visit_pair(index, weights, leaves, known))
        is_latent = level > 0 and (level + 1 < self.depth or self.slots[2 * index] is not None)
        step = self.steps[level - 1][..., index, :, :] if is_latent else None  # [..., r, r]
        weights = weights if step is None else moved(weights, step)
        left = yield from self._visit(level + 1, 2 * index, weights, leaves, known, unit)
        after = weights if left is None else unit(weights * left)
        seen = yield from self._visit(level + 1, 2 * index + 1, after, leaves, known, unit)
        assert seen is not None
        seen = seen if left is None else unit(left * seen)
        return seen if step is None else moved(seen, step.mT)

    @cached_property
    def counts_launches(self) -> bool:
        """Whether a launch costs more than small products do: on accelerators."""
        return self.root_logits.device.type != "cpu"

    @cached_property
    def _pairs(self) -> Tensor | None:
        """Tables [..., 2^(depth - 1), 1 + r, 1 + r, v] of the nodes that own two positions each, for `_visit_pair`.

        Row 1 + a and column b hold node[a, b] leaf[b, x] of the first position; column r is their sum. None where that
        is much, where some node owns one position, or where gradients are wanted, which writing in place would break.
        """
        nodes, firsts = self.steps[-1], self._probs[..., ::2, :, :]
        learns = torch.is_grad_enabled() and (nodes.requires_grad or firsts.requires_grad)
        if not self.is_perfect or learns or firsts.numel() * self.rank > _TABLES:
            return None
        tables = nodes.new_empty(*firsts.shape[:-2], 1 + self.rank, 1 + self.rank, self.size)
        inside = tables[..., 1:, :-1, :]  # [..., 2^(depth - 1), r, r, v]
        torch.mul(nodes[..., None], firsts[..., None, :, :], out=inside)
        torch.sum(inside, -2, out=tables[..., 1:, -1, :])
        return tables

    def _visit_pair(self, index: int, weights: Tensor, leaves: Sequence[Tensor], known: list[Tensor]) -> Walk:
        """Walk the two positions of a last node: weighted rows beside those of every state make one launch of two."""
        first, second = 2 * index, 2 * index + 1
        if first < len(known):
            seen = self.steps[-1][..., index, :, :] * known[first][..., None, :]  # [..., r, r]
            if second < len(known):
                return moved(known[second], seen.mT)
            shown = seen @ leaves[second]  # [..., r, v]
            return column(shown, (yield moved(weights, shown)))
        assert self._pairs is not None
        rows = self._pairs[..., index, :, :, :]  # [..., 1 + r, 1 + r, v]
        flat = rows.reshape(-1, *rows.shape[-3:])  # [N, 1 + r, 1 + r, v]
        torch.bmm(weights.reshape(-1, 1, self.rank), flat[:, 1:].flatten(-2), out=flat[:, :1].flatten(-2))
        token = yield rows[..., 0, -1, :]  # [...]
        seen = rows[..., :-1, :].gather(-1, token[..., None, None, None].expand(*rows.shape[:-2], self.rank, 1))[..., 0]
        shown = seen @ leaves[second]  # [..., 1 + r, v]
        return column(shown[..., 1:, :], (yield shown[..., 0, :]))

    def _tables(self, known: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Every state's row of every node; a known first token weighs those on its path to the root."""
        rows = self._sums
        if not self.is_perfect:
            rows = torch.cat([rows[..., :1, :], *(step.flatten(-3, -2) for step in self.steps)], -2)
        if not known:
            return rows, None
        message, factors = known[0], list[Tensor]()
        one = _one(message.dtype, message.device)
        for level in reversed(range(1, self.depth)):
            others = one.expand(*message.shape[:-1], (2**level - 1) * self.rank, self.rank)
            factors = [message[..., None, :].expand(*message.shape, self.rank), others, *factors]
            message = moved(message, self.steps[level - 1][..., 0, :, :].mT)
        return rows, torch.cat([message[..., None, :], *factors], -2)

    def _states(self, picks: Tensor, skipped: int) -> Tensor:
        states, *levels = picks.split([1, *(2**level * self.rank for level in range(1, self.depth))], -1)
        for level, chosen in enumerate(levels):
            chosen = chosen.unflatten(-1, (2**level, 2, self.rank))  # [..., 2^level, 2, r], by parent
            times = 2 if level + 2 == self.depth else 1  # both positions of a last node have its state
            states = chosen.gather(-1, states[..., None, None].expand(*chosen.shape[:-1], times)).flatten(-3)
        if self.depth == 1:
            states = states.expand(*states.shape[:-1], 2)
        states = states if self.is_perfect else _select(states, self._filled, -1)
        return states[..., skipped:]


@made_once
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 1, made once; never write to it."""
    return torch.ones((), dtype=dtype, device=device)


def _select(values: Tensor, indices: list[int], dim: int) -> Tensor:
    return values.index_select(dim, numbers(tuple(indices), values.device))
