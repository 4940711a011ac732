"""BTree: the circuit of the MtPC paper whose latents form a balanced binary tree.

Nodes are numbered in level order, 0 being the root; a span of m positions splits into floor(m / 2) and the rest, and a
position hangs on the latent of the node that splits it off. All is computed by level of a perfect tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import count

import torch
from torch import Tensor

from ...generation.tensors.masks import made_once, numbers
from .circuits import LOG, LatentDistribution, Scale, Semiring, Walk, column, moved, never

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
        return torch.cat([self.root_logits[..., None, :], self.node_logits.flatten(-3, -2)], -2).softmax(-1)

    @cached_property
    def root(self) -> Tensor:
        """Probabilities [..., r] of the first state."""
        return self._sums[..., 0, :] if self.counts_launches else self.root_logits.softmax(-1)

    @cached_property
    def steps(self) -> list[Tensor]:
        """Probabilities [..., 2^d, r, r] of the nodes of every level d from 1 on; the identity where one is none."""
        counts, steps = [2**d for d in range(1, self.depth)], self.node_logits
        steps = self._sums[..., 1:, :].unflatten(-2, steps.shape[-3:-1]) if self.counts_launches else steps.softmax(-1)
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
        """Walk the two positions of a last node; returns what they say of its parent's state.

        Weighted rows next to those of every state of the parent make one launch out of two.
        """
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
        if self.is_perfect and self.counts_launches:
            return self._sums, self._factors(known[0]) if known else None
        tables = torch.cat([self.root[..., None, :], *(step.flatten(-3, -2) for step in self.steps)], -2)
        if known:
            message = known[0]
            for level in reversed(range(1, self.depth)):
                start = 1 + (2**level - 2) * self.rank  # the level's first node, behind 2^level - 2 others
                message = tables[..., start : start + self.rank, :].mul_(message[..., None, :]).sum(-1)
            tables[..., 0, :].mul_(message)
        return tables, None

    def _factors(self, message: Tensor) -> Tensor:
        """What a first token [..., r] makes of all rows of `_sums`, put together in one launch."""
        factors = list[Tensor]()
        for level in reversed(range(1, self.depth)):
            others = _one(message.dtype, message.device).expand(
                *message.shape[:-1], (2**level - 1) * self.rank, self.rank
            )
            factors = [message[..., None, :].expand(*message.shape, self.rank), others, *factors]
            message = moved(message, self.steps[level - 1][..., 0, :, :].mT)
        return torch.cat([message[..., None, :], *factors], -2)

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
    """Return some entries of one axis."""
    return values.index_select(dim, numbers(tuple(indices), values.device))
