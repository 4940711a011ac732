"""The shape of a BTree circuit: which latent owns which position. Knows no parameters and no torch.

Nodes are numbered in level order, 0 being the root; a span of m positions splits into floor(m / 2) and the rest, and
a position hangs on the latent of the node that splits it off (spec: circuits, section 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache


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
        """Nodes from a position's owner up to the root."""
        path = [self.owner[position]]
        while path[-1] != 0:
            path.append(self.parent[path[-1]])
        return path

    @lru_cache(maxsize=256)  # noqa: B019 - structures are few, small and shared
    def without_first(self) -> TreeStructure:
        """The structure over positions 1..n-1, renumbered from 0."""

        def shift(child: Unit | None) -> Unit | None:
            if child is None or not child.is_leaf:
                return child
            return None if child.index == 0 else Unit(True, child.index - 1)

        return TreeStructure(self.window - 1, tuple(map(shift, self.left)), tuple(map(shift, self.right)))


@lru_cache(maxsize=256)
def balanced(window: int) -> TreeStructure:
    """The BTree of the MtPC paper over `window` positions.

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
