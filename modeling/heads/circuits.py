"""Circuits: mixtures over latent states whose every prefix marginal is exact (MtPC). Evaluation, not structure.

Layouts (softmax over the last axis, any leading batch dimensions): `leaf_logits` [..., n, r, v], `root_logits`
[..., r], `trans_logits` [..., n - 1 or 1, r, r] from row to column, `node_logits` [..., n - 2, r, r] from the parent's
state to the node's. Position i emits from the latent that owns it. The tree is in `tree_circuit`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator
from functools import cached_property
from itertools import count

import torch

from .window_distribution import Choose, WindowDistribution, logsumexp, normalised_logits

Walk = Generator[torch.Tensor, torch.Tensor, torch.Tensor]
Scale = Callable[[torch.Tensor], torch.Tensor]


class LatentDistribution(WindowDistribution):
    """What circuits share: all follows from the weight of the owner's state before each position.

    Args:
        leaf_logits: [..., n, r, v].
    """

    def __init__(self, leaf_logits: torch.Tensor) -> None:
        self.leaf_logits = leaf_logits
        self.window, self.rank = leaf_logits.shape[-3], leaf_logits.shape[-2]

    @cached_property
    def leaf_norm(self) -> torch.Tensor:
        """log of what leaves sum to, [..., n, r]."""
        return self.leaf_logits.logsumexp(-1)

    @cached_property
    def _leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Leaves [..., n, r, v] in log space, and the log of what they sum to, [..., n, r] or 0.

        Where a gradient is wanted they are normalised: that is one kernel forwards and one back, a logsumexp is many.
        Elsewhere no copy as large as the logits is kept.
        """
        if torch.is_grad_enabled() and self.leaf_logits.requires_grad:
            return normalised_logits(self.leaf_logits), self.leaf_logits.new_zeros(())
        return self.leaf_logits, self.leaf_norm

    @abstractmethod
    def owner_weights(self, evidence: torch.Tensor) -> torch.Tensor:
        """log q(z_owner(i), x_1..x_{i-1}) from log leaves at the tokens [..., n, r]: [..., n, r]."""

    @abstractmethod
    def _walk(self, unit: Scale) -> Walk:
        """Yield the weights [..., r] of each owner in turn, which `unit` scales; is sent the chosen token's leaves."""

    def evidence(self, tokens: torch.Tensor) -> torch.Tensor:
        """log leaf_i[z, x_i] for tokens [..., n]: [..., n, r]; 0 for those without a column."""
        size = self.leaf_logits.shape[-1]
        others, tokens = (tokens >= size, tokens.clamp(max=size - 1)) if self.reads_codes else (None, tokens)
        batch = torch.broadcast_shapes(tokens.shape[:-1], self.leaf_logits.shape[:-3])
        index = tokens.expand(*batch, -1)[..., None, None].expand(*batch, self.window, self.rank, 1)
        leaves, norm = self._leaves
        found = leaves.expand(*batch, *leaves.shape[-3:]).gather(-1, index)[..., 0] - norm
        return found if others is None else found.masked_fill(others[..., None], 0)

    def prefix_log_prob(self, tokens: torch.Tensor, unknown: torch.Tensor | None = None) -> torch.Tensor:
        """log q(x_1..x_i), summing out the owner of position i; an unknown token is no evidence."""
        evidence = self.evidence(tokens)
        if unknown is not None:
            evidence = evidence.masked_fill(unknown[..., None], 0)
        return logsumexp(self.owner_weights(evidence) + evidence, -1)

    def conditional_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the posterior of each owner applied to its leaf."""
        weights, (leaves, norm) = self.owner_weights(self.evidence(tokens)), self._leaves
        mixed = logsumexp(leaves + (weights - norm)[..., None], -2)
        total = logsumexp(weights, -1)[..., None]
        return mixed - torch.where(total.isfinite(), total, torch.zeros_like(total))

    def next_log_probs(self, prefix: torch.Tensor) -> torch.Tensor:
        """One mixture of leaves: the weights do not depend on what follows the prefix."""
        position = prefix.shape[-1]
        tokens = torch.nn.functional.pad(prefix, (0, self.window - position))
        weights = finite_weights(self.owner_weights(self.evidence(tokens))[..., position, :]).softmax(-1)
        leaf = self.leaf_logits[..., position, :, :].softmax(-1)
        return (weights[..., None, :] @ leaf)[..., 0, :].log()

    def draft(self, choose: Choose, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact conditionals one after the other, in linear space (each is normalised, so nothing underflows)."""
        leaves = self.leaf_logits[..., :length, :, :].softmax(-1)
        tokens, probs, _ = self._walk_along(choose, leaves, leaves, _unit)
        return torch.stack(tokens, -1), torch.stack(probs, -2)

    def greedy(self, length: int | None = None) -> torch.Tensor:
        """Argmax of each exact conditional in turn; an argmax needs no normalisation, but for what would underflow."""
        leaves = self.leaf_logits[..., :length, :, :].softmax(-1)
        return torch.stack(self._walk_along(_largest, leaves, leaves, _now_and_then())[0], -1)

    def sample_with_probs(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One race for all positions, whose noise divides the leaves instead of the distributions; the distributions
        come all at once.

        A distribution is a mixture of leaves, so that argmax (w leaf / E) is a free draw from w leaf.
        """
        leaves = self.leaf_logits[..., :length, :, :].softmax(-1)
        noise = torch.empty_like(leaves[..., :1, :]).exponential_().clamp_min_(torch.finfo(leaves.dtype).tiny)
        tokens, _, weights = self._walk_along(_largest, leaves / noise, leaves, _now_and_then())
        return torch.stack(tokens, -1), (_unit(torch.stack(weights, -2))[..., None, :] @ leaves)[..., 0, :]

    def _walk_along(
        self, choose: Choose, shown: torch.Tensor, leaves: torch.Tensor, unit: Scale
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Tokens and distributions that `choose` gives for mixtures of `shown` in turn, and the weights, which `unit`
        scaled."""
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

    def _leaves_after_first(self) -> torch.Tensor:
        return self.leaf_logits[..., 1:, :, :]

    def _first_evidence(self, first: torch.Tensor) -> torch.Tensor:
        leaf, size = self.leaf_logits[..., 0, :, :], self.leaf_logits.shape[-1]
        others, first = (first >= size, first.clamp(max=size - 1)) if self.reads_codes else (None, first)
        chosen = leaf.gather(-1, first[..., None, None].expand(*first.shape, self.rank, 1))[..., 0]
        found = chosen - leaf.logsumexp(-1)
        return found if others is None else found.masked_fill(others[..., None], 0)


class MixtureDistribution(LatentDistribution):
    """CP: q(x) = sum_z root[z] prod_i leaf_i[z, x_i]."""

    def __init__(self, root_logits: torch.Tensor, leaf_logits: torch.Tensor) -> None:
        super().__init__(leaf_logits)
        self.root = normalised_logits(root_logits)

    def owner_weights(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return the root plus all evidence before i; one cumulative sum."""
        before = torch.cat([self.root[..., None, :].expand_as(evidence[..., :1, :]), evidence[..., :-1, :]], dim=-2)
        return before.cumsum(-2)

    def condition(self, first: torch.Tensor) -> MixtureDistribution:
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
        self, root_logits: torch.Tensor, trans_logits: torch.Tensor, leaf_logits: torch.Tensor, normalised: bool = False
    ) -> None:
        super().__init__(leaf_logits)
        self.root = root_logits if normalised else normalised_logits(root_logits)
        self.transitions = trans_logits if normalised else normalised_logits(trans_logits)

    def _step(self, position: int) -> torch.Tensor:
        return self.transitions[..., position if self.transitions.shape[-3] > 1 else 0, :, :]

    def owner_weights(self, evidence: torch.Tensor) -> torch.Tensor:
        """Return the forward filter, whose every step is a prefix marginal."""
        weights = [self.root.expand_as(evidence[..., 0, :])]
        for position in range(self.window - 1):
            joint = weights[-1] + evidence[..., position, :]
            weights.append(logsumexp(joint[..., None] + self._step(position), -2))
        return torch.stack(weights, -2)

    def condition(self, first: torch.Tensor) -> ChainDistribution:
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


def _unit(weights: torch.Tensor) -> torch.Tensor:
    """Return the weights divided by their sum; zeros stay zeros."""
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def _largest(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weights.argmax(-1), weights


def _now_and_then() -> Scale:
    """`_unit` at every fourth call: what is left in between is the probability of four tokens, far from underflow."""
    calls = count(1)
    return lambda weights: weights if next(calls) % 4 else _unit(weights)


def finite_weights(joint: torch.Tensor) -> torch.Tensor:
    """Log weights [..., r] without -inf; where all were, they are equal: after an impossible token any distribution
    will do."""
    return joint.clamp_min(torch.finfo(joint.dtype).min / 4)
