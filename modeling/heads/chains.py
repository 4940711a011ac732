"""HMM: the circuit of the MtPC paper whose latents form a chain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor

from .circuits import LINEAR, LOG, LatentDistribution, Scale, Semiring, Walk, column, moved, stepwise
from .reading import Given, ReadLeaves

Chain = TypeVar("Chain", bound="ChainDistribution")
_SYSTEM = 2**20
"""Entries of a filter's triangular system up to which it is solved at once."""


class ChainDistribution(LatentDistribution):
    """HMM: z_1 ~ root, z_{i+1} ~ trans_i[z_i], x_i ~ leaf_i[z_i]; one transition for all steps if only one is given.

    The filter is n dependent steps of r^2 work: a parallel scan would need r^3 per step.
    """

    def __init__(self, root_logits: Tensor, trans_logits: Tensor, leaf_logits: Tensor) -> None:
        super().__init__(root_logits, leaf_logits)
        self.trans_logits = trans_logits

    @cached_property
    def steps(self) -> Tensor:
        """Probabilities [..., n - 1, r, r] of every transition."""
        steps = self.trans_logits.softmax(-1)  # [..., n - 1 or 1, r, r]
        return steps if steps.shape[-3] != 1 else steps.expand(*steps.shape[:-3], self.full_window - 1, -1, -1)

    def owner_weights(self, evidence: Tensor, ring: Semiring = LOG) -> Tensor:
        """Return the forward filter, whose every step is a prefix marginal."""
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
        """The whole filter as one triangular system w A = (root, 0, ..): few launches, where it is small.

        A has the identity on its diagonal, which is not read, and minus each weighted step next to it:

            I  -S1
                I  -S2
                    I
        """
        size = seen.shape[-3] + 1
        system = root.new_zeros(*root.shape[:-1], size, self.rank, size, self.rank)  # [..., n, r, n, r]
        system.diagonal(1, -4, -2).movedim(-1, -3).addcmul_(seen, steps, value=-1)  # right of the diagonal
        system = system.flatten(-2).flatten(-3, -2)  # [..., n r, n r]
        start = torch.nn.functional.pad(root, (0, (size - 1) * self.rank))[..., None, :]  # [..., 1, n r]
        solved = torch.linalg.solve_triangular(system, start, upper=True, left=False, unitriangular=True)
        return solved.unflatten(-1, (size, self.rank))[..., 0, :, :]  # [..., n, r]

    def given(self: Chain, given: Given) -> Chain:
        """Return the distribution with biased leaves and transitions."""
        return super().given(given)._moving(given.moves)

    def _moving(self: Chain, moves: Tensor | None) -> Chain:
        """Return the distribution with a bias [..., m, r, r] of its first m transitions."""
        if moves is None:
            return self
        other, logits = self._fresh(), self.trans_logits
        other.trans_logits = (logits[..., : moves.shape[-3], :, :] if logits.shape[-3] > 1 else logits) + moves
        return other

    def next_log_probs(self, prefix: Tensor, given: Given | None = None) -> Tensor:
        """As of all circuits."""
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
