"""Circuits: mixtures over latent states whose every prefix marginal is exact (MtPC). Evaluation, not structure.

Layouts (softmax over the last axis, any leading batch dimensions): `leaf_logits` [..., n, r, v], `root_logits`
[..., r], `trans_logits` [..., n - 1 or 1, r, r] from row to column, `node_logits` [..., n - 2, r, r] from the parent's
state to the node's. Position i emits from the latent that owns it.

Nodes of a BTree are numbered in level order, 0 being the root; a span of m positions splits into floor(m / 2) and the
rest, and a position hangs on the latent of the node that splits it off.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count

import torch
from torch import Tensor

from ..masks import numbers
from .window_distribution import Choose, WindowDistribution, logsumexp, normalised_logits

Walk = Generator[Tensor, Tensor, Tensor]
Scale = Callable[[Tensor], Tensor]


class LatentDistribution(WindowDistribution):
    """What circuits share: all follows from the weight of the owner's state before each position.

    Args:
        leaf_logits: [..., n, r, v].
    """

    def __init__(self, leaf_logits: Tensor) -> None:
        self.leaf_logits = leaf_logits
        self.window, self.rank = leaf_logits.shape[-3], leaf_logits.shape[-2]

    @cached_property
    def leaf_norm(self) -> Tensor:
        """log of what leaves sum to, [..., n, r]."""
        return self.leaf_logits.logsumexp(-1)

    @cached_property
    def _leaves(self) -> tuple[Tensor, Tensor]:
        """Leaves [..., n, r, v] in log space, and the log of what they sum to, [..., n, r] or 0.

        Where a gradient is wanted they are normalised: that is one kernel forwards and one back, a logsumexp is many.
        Elsewhere no copy as large as the logits is kept.
        """
        if torch.is_grad_enabled() and self.leaf_logits.requires_grad:
            return normalised_logits(self.leaf_logits), self.leaf_logits.new_zeros(())
        return self.leaf_logits, self.leaf_norm

    @abstractmethod
    def owner_weights(self, evidence: Tensor) -> Tensor:
        """log q(z_owner(i), x_1..x_{i-1}) from log leaves at the tokens [..., n, r]: [..., n, r]."""

    @abstractmethod
    def _walk(self, unit: Scale) -> Walk:
        """Yield the weights [..., r] of each owner in turn, which `unit` scales; is sent the chosen token's leaves."""

    def evidence(self, tokens: Tensor) -> Tensor:
        """log leaf_i[z, x_i] for tokens [..., n]: [..., n, r]; 0 for those without a column."""
        return self._evidence_of(tokens, *self._leaves)

    def _first_evidence(self, first: Tensor) -> Tensor:
        """`evidence` of the first token [...] alone, [..., r]."""
        leaves = self.leaf_logits[..., :1, :, :]
        return self._evidence_of(first[..., None], leaves, leaves.logsumexp(-1))[..., 0, :]

    def _evidence_of(self, tokens: Tensor, leaves: Tensor, norm: Tensor) -> Tensor:
        size, shape = leaves.shape[-1], leaves.shape[-3:]
        others, tokens = (tokens >= size, tokens.clamp(max=size - 1)) if self.reads_codes else (None, tokens)
        batch = torch.broadcast_shapes(tokens.shape[:-1], leaves.shape[:-3])
        index = tokens.expand(*batch, -1)[..., None, None].expand(*batch, *shape[:-1], 1)
        found = leaves.expand(*batch, *shape).gather(-1, index)[..., 0] - norm
        return found if others is None else found.masked_fill(others[..., None], 0)

    def prefix_log_prob(self, tokens: Tensor, unknown: Tensor | None = None) -> Tensor:
        """log q(x_1..x_i), summing out the owner of position i; an unknown token is no evidence."""
        evidence = self.evidence(tokens)
        if unknown is not None:
            evidence = evidence.masked_fill(unknown[..., None], 0)
        return logsumexp(self.owner_weights(evidence) + evidence, -1)

    def conditional_log_probs(self, tokens: Tensor) -> Tensor:
        """Return the posterior of each owner applied to its leaf."""
        weights, (leaves, norm) = self.owner_weights(self.evidence(tokens)), self._leaves
        mixed = logsumexp(leaves + (weights - norm)[..., None], -2)
        total = logsumexp(weights, -1)[..., None]
        return mixed - torch.where(total.isfinite(), total, torch.zeros_like(total))

    def next_log_probs(self, prefix: Tensor) -> Tensor:
        """One mixture of leaves: the weights do not depend on what follows the prefix."""
        position = prefix.shape[-1]
        tokens = torch.nn.functional.pad(prefix, (0, self.window - position))
        weights = finite_weights(self.owner_weights(self.evidence(tokens))[..., position, :]).softmax(-1)
        leaf = self.leaf_logits[..., position, :, :].softmax(-1)
        return (weights[..., None, :] @ leaf)[..., 0, :].log()

    def draft(self, choose: Choose, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Exact conditionals one after the other, in linear space (each is normalised, so nothing underflows)."""
        leaves = self.leaf_logits[..., :length, :, :].softmax(-1)
        tokens, probs, _ = self._walk_along(choose, leaves, leaves, _unit)
        return torch.stack(tokens, -1), torch.stack(probs, -2)

    def greedy(self, length: int | None = None) -> Tensor:
        """Argmax of each exact conditional in turn; an argmax needs no normalisation, but for what would underflow."""
        leaves = self.leaf_logits[..., :length, :, :].softmax(-1)
        return torch.stack(self._walk_along(_largest, leaves, leaves, _now_and_then())[0], -1)

    def sample_with_probs(self, length: int) -> tuple[Tensor, Tensor]:
        """One race for all positions: a distribution is a mixture of leaves, and argmax (w leaf / E) a draw from it."""
        leaves = self.leaf_logits[..., :length, :, :].softmax(-1)
        noise = torch.empty_like(leaves[..., :1, :]).exponential_().clamp_min_(torch.finfo(leaves.dtype).tiny)
        tokens, _, weights = self._walk_along(_largest, leaves / noise, leaves, _now_and_then())
        return torch.stack(tokens, -1), (_unit(torch.stack(weights, -2))[..., None, :] @ leaves)[..., 0, :]

    def _walk_along(
        self, choose: Choose, shown: Tensor, leaves: Tensor, unit: Scale
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Tokens and distributions that `choose` gives for mixtures of `shown` in turn, and the scaled weights."""
        walk, tokens, probs = self._walk(unit), [], []
        weights = [next(walk)]
        for position in range(leaves.shape[-3]):
            token, distribution = choose((weights[-1][..., None, :] @ shown[..., position, :, :])[..., 0, :])
            tokens.append(token)
            probs.append(distribution)
            if position + 1 < leaves.shape[-3]:
                leaf = leaves[..., position, :, :]
                weights.append(walk.send(leaf.gather(-1, token[..., None, None].expand(*leaf.shape[:-1], 1))[..., 0]))
        return tokens, probs, weights

    def _leaves_after_first(self) -> Tensor:
        return self.leaf_logits[..., 1:, :, :]


class MixtureDistribution(LatentDistribution):
    """CP: q(x) = sum_z root[z] prod_i leaf_i[z, x_i]."""

    def __init__(self, root_logits: Tensor, leaf_logits: Tensor) -> None:
        super().__init__(leaf_logits)
        self.root = normalised_logits(root_logits)

    def owner_weights(self, evidence: Tensor) -> Tensor:
        """Return the root plus all evidence before i; one cumulative sum."""
        before = torch.cat([self.root[..., None, :].expand_as(evidence[..., :1, :]), evidence[..., :-1, :]], dim=-2)
        return before.cumsum(-2)

    def condition(self, first: Tensor) -> MixtureDistribution:
        """root'[z] ~ root[z] leaf_1[z, b]."""
        return MixtureDistribution(finite_weights(self.root + self._first_evidence(first)), self._leaves_after_first())

    def _walk(self, unit: Scale) -> Walk:
        weights = self.root.exp()
        while True:
            weights = unit(weights * (yield weights))


class ChainDistribution(LatentDistribution):
    """HMM: z_1 ~ root, z_{i+1} ~ trans_i[z_i], x_i ~ leaf_i[z_i]; one transition for all steps if only one is given.

    The filter is n dependent steps of r^2 work in log space: a parallel scan would need r^3 per step and lose -inf.
    """

    def __init__(
        self, root_logits: Tensor, trans_logits: Tensor, leaf_logits: Tensor, normalised: bool = False
    ) -> None:
        super().__init__(leaf_logits)
        self.root = root_logits if normalised else normalised_logits(root_logits)
        self.transitions = trans_logits if normalised else normalised_logits(trans_logits)

    @cached_property
    def _steps(self) -> list[Tensor]:
        """Probabilities [..., r, r] of every step; taken apart at once, each of many slices would have a gradient as
        large as the whole."""
        steps = self.transitions.exp().unbind(-3)
        return list(steps) if len(steps) > 1 else list(steps) * (self.window - 1)

    def _step(self, position: int) -> Tensor:
        return self.transitions[..., position if self.transitions.shape[-3] > 1 else 0, :, :]

    def owner_weights(self, evidence: Tensor) -> Tensor:
        """Return the forward filter, whose every step is a prefix marginal."""
        weights = [self.root.expand_as(evidence[..., 0, :])]
        for position in range(self.window - 1):
            joint = weights[-1] + evidence[..., position, :]
            weights.append(_moved(joint, self._steps[position]))
        return torch.stack(weights, -2)

    def condition(self, first: Tensor) -> ChainDistribution:
        """root'[z_2] = sum_{z_1} q(z_1 | b) trans_1[z_1, z_2]."""
        posterior = normalised_logits(finite_weights(self.root + self._first_evidence(first)))
        root = posterior if self.window == 1 else logsumexp(posterior[..., None] + self._step(0), -2)
        rest = self.transitions if self.transitions.shape[-3] == 1 else self.transitions[..., 1:, :, :]
        return ChainDistribution(root, rest, self._leaves_after_first(), normalised=True)

    def _walk(self, unit: Scale) -> Walk:
        weights, steps = self.root.exp(), self.transitions.exp()
        for position in range(self.window):
            weights = unit(weights * (yield weights))
            if position + 1 < self.window:
                step = steps[..., position if steps.shape[-3] > 1 else 0, :, :]
                weights = (weights[..., None, :] @ step)[..., 0, :]


def _moved(weights: Tensor, steps: Tensor) -> Tensor:
    """log(exp(weights) @ steps) for log weights [..., r] and probabilities [..., r, r]: [..., r]."""
    top = weights.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).min)
    total = _times((weights - top).exp(), steps)
    empty = total == 0
    return torch.where(empty, -torch.inf, torch.where(empty, 1.0, total).log() + top)


def _times(weights: Tensor, steps: Tensor) -> Tensor:
    """weights @ steps, [..., r] by [..., r, r]; many prefixes of one distribution are one product."""
    if steps.dim() > 2 and steps.shape[-3] == 1 and weights.dim() > 1:
        return weights @ steps.squeeze(-3)
    return (weights[..., None, :] @ steps)[..., 0, :]


def _unit(weights: Tensor) -> Tensor:
    """Return the weights divided by their sum; zeros stay zeros."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _largest(weights: Tensor) -> tuple[Tensor, Tensor]:
    return weights.argmax(-1), weights


def _now_and_then() -> Scale:
    """`_unit` at every fourth call: what is left in between is the probability of four tokens, far from underflow."""
    calls = count(1)
    return lambda weights: weights if next(calls) % 4 else _unit(weights)


def finite_weights(joint: Tensor) -> Tensor:
    """Log weights [..., r] without -inf; where all were, they are equal, as after an impossible token."""
    return joint.clamp_min(torch.finfo(joint.dtype).min / 4)


@dataclass(frozen=True)
class Unit:
    """A child of a node: a position (`leaf`) or another node."""

    is_leaf: bool
    index: int


@dataclass(frozen=True)
class TreeStructure:
    """A binary tree over positions 0..n-1; a node may have lost its left child to `without_first`.

    Attributes:
        window: n.
        left: Left child per node, or None.
        right: Right child per node, or None.
    """

    window: int
    left: tuple[Unit | None, ...]
    right: tuple[Unit | None, ...]

    @cached_property
    def parent(self) -> tuple[int, ...]:
        """Parent per node, -1 for the root."""
        return self._above(False, len(self.left))

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """Node that each position hangs on."""
        return self._above(True, self.window)

    def _above(self, is_leaf: bool, count: int) -> tuple[int, ...]:
        """Return the node above each position, or above each node."""
        found = [-1] * count
        for node, children in enumerate(zip(self.left, self.right)):
            for child in children:
                if child is not None and child.is_leaf == is_leaf:
                    found[child.index] = node
        return tuple(found)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes by depth, the root's level first."""
        depth = [0] * len(self.left)
        for node in range(1, len(depth)):
            depth[node] = depth[self.parent[node]] + 1
        return tuple(tuple(n for n, own in enumerate(depth) if own == d) for d in range(max(depth) + 1))

    @lru_cache(maxsize=256)  # noqa: B019 - structures are few, small and shared
    def without_first(self) -> TreeStructure:
        """Return the structure over positions 1..n-1, renumbered from 0."""

        def shift(child: Unit | None) -> Unit | None:
            if child is None or not child.is_leaf:
                return child
            return None if child.index == 0 else Unit(True, child.index - 1)

        return TreeStructure(self.window - 1, tuple(map(shift, self.left)), tuple(map(shift, self.right)))


@lru_cache(maxsize=256)
def balanced(window: int) -> TreeStructure:
    """Return the BTree of the MtPC paper over `window` positions.

    Example:
        >>> balanced(4).owner
        (1, 1, 2, 2)
    """
    left: list[Unit | None] = []
    right: list[Unit | None] = []
    spans = [(0, window)]
    for low, high in spans:  # grows while it is walked: breadth first
        middle = low + (high - low) // 2
        for side, (start, stop) in ((left, (low, middle)), (right, (middle, high))):
            side.append(_child(start, stop, spans))
    return TreeStructure(window, tuple(left), tuple(right))


def _child(start: int, stop: int, spans: list[tuple[int, int]]) -> Unit | None:
    if stop - start == 0:
        return None
    if stop - start == 1:
        return Unit(True, start)
    spans.append((start, stop))
    return Unit(False, len(spans) - 1)


class TreeDistribution(LatentDistribution):
    """BTree: q(x) = sum_z root[z_0] prod_{h>0} node_h[z_parent(h), z_h] prod_i leaf_i[z_owner(i), x_i].

    All prefixes at once take one pass up and one down the levels: a prefix has seen every left sibling of the path to
    its next position, and nothing to the right of it.
    """

    def __init__(
        self,
        root_logits: Tensor,
        node_logits: Tensor | None,
        leaf_logits: Tensor,
        structure: TreeStructure | None = None,
    ) -> None:
        super().__init__(leaf_logits)
        self.structure = structure or balanced(self.window)
        self.root = normalised_logits(root_logits)
        if node_logits is None:  # a window of one or two positions
            node_logits = self.root.new_zeros(*self.root.shape[:-1], 0, self.rank, self.rank)
        self.nodes = normalised_logits(node_logits)

    def _weights_of(self, nodes: tuple[int, ...]) -> Tensor:
        return _select(self.nodes, [node - 1 for node in nodes], -3)

    def owner_weights(self, evidence: Tensor) -> Tensor:
        """Return the messages up (what a whole span says of its parent's state), then weights down."""
        messages, slots = self._upward(evidence)
        tree, weights = self.structure, [self.root.expand_as(evidence[..., 0, :])[..., None, :]]
        order = {0: 0}
        for level in tree.levels[1:]:
            parents = [tree.parent[node] for node in level]
            before = _select(torch.cat(weights, -2), [order[parent] for parent in parents], -2)
            seen = [self._left_of(Unit(False, node), parent, slots) for node, parent in zip(level, parents)]
            joint = before + _select(messages, seen, -2)
            weights.append(logsumexp(joint[..., None] + self._weights_of(level), -2))
            order |= {node: len(order) + i for i, node in enumerate(level)}
        owners = [order[owner] for owner in tree.owner]
        seen = [self._left_of(Unit(True, i), owner, slots) for i, owner in enumerate(tree.owner)]
        return _select(torch.cat(weights, -2), owners, -2) + _select(messages, seen, -2)

    def _upward(self, evidence: Tensor) -> tuple[Tensor, dict[Unit | None, int]]:
        """Messages [..., slots, r] over the parent's states, and the slot of each unit (of None: it says nothing)."""
        tree = self.structure
        slots: dict[Unit | None, int] = {Unit(True, i): i for i in range(tree.window)} | {None: tree.window}
        messages = torch.cat([evidence, torch.zeros_like(evidence[..., :1, :])], -2)
        for level in reversed(tree.levels[1:]):
            left, right = ([slots[side[node]] for node in level] for side in (tree.left, tree.right))
            inside = _select(messages, left, -2) + _select(messages, right, -2)
            upward = logsumexp(self._weights_of(level) + inside[..., None, :], -1)
            slots |= {Unit(False, node): messages.shape[-2] + i for i, node in enumerate(level)}
            messages = torch.cat([messages, upward], -2)
        return messages, slots

    def _left_of(self, unit: Unit, parent: int, slots: dict[Unit | None, int]) -> int:
        """Return the slot of what a prefix that reaches `unit` has seen below its parent: its left sibling."""
        return slots[self.structure.left[parent]] if self.structure.right[parent] == unit else slots[None]

    def condition(self, first: Tensor) -> TreeDistribution:
        """Reweight the path from the first position's owner to the root: log n nodes."""
        message, nodes, node = self._first_evidence(first), self.nodes, self.structure.owner[0]
        while node:
            joint = nodes[..., node - 1, :, :] + message[..., None, :]
            message, nodes = logsumexp(joint, -1), nodes.clone()
            nodes[..., node - 1, :, :] = finite_weights(joint)
            node = self.structure.parent[node]
        root = finite_weights(self.root + message)
        return TreeDistribution(root, nodes, self._leaves_after_first(), self.structure.without_first())

    def _walk(self, unit: Scale) -> Walk:
        return (yield from self._visit(0, self.root.exp(), self.nodes.exp(), unit))

    def _visit(self, node: int, weights: Tensor, nodes: Tensor, unit: Scale) -> Walk:
        """Walk the span of `node`; returns what the span says of the node's own state."""
        children = [child for child in (self.structure.left[node], self.structure.right[node]) if child is not None]
        seen = None
        for child in children:
            if child.is_leaf:
                message = yield weights
            else:
                step = nodes[..., child.index - 1, :, :]
                below = yield from self._visit(child.index, (weights[..., None, :] @ step)[..., 0, :], nodes, unit)
                message = (step @ below[..., None])[..., 0]
            if child is not children[-1]:  # the weights after the last child are not needed
                weights = unit(weights * message)
            seen = message if seen is None else unit(seen * message)
        return torch.ones_like(weights) if seen is None else seen


def _select(values: Tensor, indices: Iterable[int], dim: int) -> Tensor:
    """Return some entries of one axis."""
    return values.index_select(dim, numbers(tuple(indices), values.device))
