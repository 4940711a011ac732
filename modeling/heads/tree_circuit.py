"""BTree circuits: the tree of latents over the positions of a window, and their distribution.

Nodes are numbered in level order, 0 being the root; a span of m positions splits into floor(m / 2) and the rest, and
a position hangs on the latent of the node that splits it off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from ..masks import numbers
from .circuits import LatentDistribution, Scale, Walk, finite_weights
from .window_distribution import logsumexp, normalised_logits


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

    @property
    def num_nodes(self) -> int:
        """Number of latents."""
        return len(self.left)

    @cached_property
    def parent(self) -> tuple[int, ...]:
        """Parent per node, -1 for the root."""
        parents = [-1] * self.num_nodes
        for node, children in enumerate(zip(self.left, self.right)):
            for child in children:
                if child is not None and not child.is_leaf:
                    parents[child.index] = node
        return tuple(parents)

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """Node that each position hangs on."""
        owners = [0] * self.window
        for node, children in enumerate(zip(self.left, self.right)):
            for child in children:
                if child is not None and child.is_leaf:
                    owners[child.index] = node
        return tuple(owners)

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Nodes by depth, the root's level first."""
        depth = [0] * self.num_nodes
        for node in range(1, self.num_nodes):
            depth[node] = depth[self.parent[node]] + 1
        return tuple(tuple(n for n in range(self.num_nodes) if depth[n] == d) for d in range(max(depth) + 1))

    def path_to_root(self, position: int) -> list[int]:
        """Return nodes from a position's owner up to the root."""
        path = [self.owner[position]]
        while path[-1] != 0:
            path.append(self.parent[path[-1]])
        return path

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
        root_logits: torch.Tensor,
        node_logits: torch.Tensor | None,
        leaf_logits: torch.Tensor,
        structure: TreeStructure | None = None,
    ) -> None:
        super().__init__(leaf_logits)
        self.structure = structure or balanced(self.window)
        self.root = normalised_logits(root_logits)
        if node_logits is None:  # a window of one or two positions
            node_logits = self.root.new_zeros(*self.root.shape[:-1], 0, self.rank, self.rank)
        self.nodes = normalised_logits(node_logits)

    def _weights_of(self, nodes: tuple[int, ...]) -> torch.Tensor:
        return _select(self.nodes, [node - 1 for node in nodes], -3)

    def owner_weights(self, evidence: torch.Tensor) -> torch.Tensor:
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

    def _upward(self, evidence: torch.Tensor) -> tuple[torch.Tensor, dict[Unit | None, int]]:
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

    def condition(self, first: torch.Tensor) -> TreeDistribution:
        """Reweight the path from the first position's owner to the root: log n nodes."""
        message, nodes, root = self._first_evidence(first), self.nodes, self.root
        for node in self.structure.path_to_root(0):
            if node == 0:
                root = finite_weights(root + message)
                continue
            joint = nodes[..., node - 1, :, :] + message[..., None, :]
            message, nodes = logsumexp(joint, -1), nodes.clone()
            nodes[..., node - 1, :, :] = finite_weights(joint)
        return TreeDistribution(root, nodes, self._leaves_after_first(), self.structure.without_first())

    def _walk(self, unit: Scale) -> Walk:
        return (yield from self._visit(0, self.root.exp(), self.nodes.exp(), unit))

    def _visit(self, node: int, weights: torch.Tensor, nodes: torch.Tensor, unit: Scale) -> Walk:
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


def _select(values: torch.Tensor, indices: Iterable[int], dim: int) -> torch.Tensor:
    """Return some entries of one axis."""
    return values.index_select(dim, numbers(tuple(indices), values.device))
