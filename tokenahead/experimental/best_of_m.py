"""Best-of-M: parallel token prediction drafts from several vectors of uniforms, and verifies the most central one.

Every cycle draws M fresh vectors for the next output positions and drafts a branch from each; the forward that verifies
the branches makes the M drafts after each of their ends. The choice depends on the positions of a branch's uniforms in
the intervals of the *target's* picks. On any prefix these are uniform and independent of the tokens, so the choice
changes no distribution, as long as no uniform after the stop is used again; the paper's Eq. 18 has the opposite sign
and measures against the student. In every group of slots the vectors share the first, which reads the uniform of the
target's pick.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..generation.call.options import CallOptions, DraftOptions
from ..generation.call.sequences import Sequences
from ..generation.contract import DraftSession, DraftTree, TargetOutput, VerificationResult
from ..generation.tensors.masks import cached_arange
from ..generation.tensors.sampling import interval, pick
from ..generation.verification.verifiers import CoupledVerifier, Verifier, distribution_of
from ..modeling.ptp.generation import make_uniforms
from ..modeling.ptp.model import PTPForCausalLM
from ..modeling.ptp.session import ParallelSession, SlotLayout


def best_of(model: PTPForCausalLM, many: int) -> BestOfForCausalLM:
    """Return a model with the same tensors whose sampled calls keep the most central of `many` drafts.

    More drafts are accepted, for `many` ^ 2 times the slots. A run with `seed` can be repeated, but differs from that
    of `use_mtp=False`. Drafts do not look at constraints; the text keeps to them all the same.

    Example:
        >>> out = best_of(model, 4).generate(**inputs, do_sample=True)
    """
    if many < 1 or not model.config.reads_uniforms:
        raise ValueError(f"many={many} must be at least 1, and slots of variant={model.config.variant!r} read uniforms")
    chosen = cast(BestOfForCausalLM, copy.copy(model))
    chosen.__class__ = BestOfForCausalLM
    chosen.many = many
    return chosen


def most_central(positions: Tensor, num_correct: Tensor) -> Tensor:
    """Return the index of the best of M vectors of uniforms, [...] int64: that nearest the centres of the intervals.

    The score is sum_k |v_k - 1/2| over the positions v [..., M, N] of uniforms in intervals of the *target's* picks,
    and the least wins; `num_correct` drafts [..., M] break ties, where more are better.
    """
    score = (positions.double() - 0.5).abs().sum(-1)  # [..., M]
    return (score - 1e-12 * num_correct).argmin(-1)


class BestOfForCausalLM(PTPForCausalLM):
    """See `best_of`."""

    many: int

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Refuse another rule than the coupled one, uniforms, and a seed with lengths that follow the clock."""
        options = replace(options, verification=options.verification or "coupled")
        by_clock = "seed" in options.extra and options.schedule == "adaptive"
        if config.do_sample and (options.verification != "coupled" or "uniforms" in options.extra or by_clock):
            raise ValueError(f"best_of(model, {self.many}) needs verification='coupled', and draws its own uniforms")
        return super().prepare_call(options, config)

    def start(self, options: DraftOptions) -> ParallelSession:
        if not (options.speculates and options.do_sample):
            return super().start(options)
        return BestOfSession(self.config, options, make_uniforms(options, may_stay=False), many=self.many)

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        return (
            CentralVerifier(session) if isinstance(session, BestOfSession) else super().make_verifier(options, session)
        )


class BestOfSession(ParallelSession):
    """Reads M drafts off the slots after the chosen branch.

    `branches` [B, M, m] are the drafts to verify (None: there are none), `vectors` [B, M, m + 1 or more] the uniforms
    that pick them and the tokens after them, `fresh` [B, M, n] those of the next drafts.
    """

    branches: Tensor | None = None
    vectors: Tensor
    fresh: Tensor
    chosen_branch: Tensor

    def __init__(self, *args: Any, many: int) -> None:
        super().__init__(*args)
        self.many, self.takes_fixed, self.some_lack_drafts = many, False, True

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if self.branches is not None:
            self.branches = self.branches[..., :length]
        count, depth = (1, 0) if self.branches is None else self.branches.shape[1:]
        auxiliary = self._auxiliary(tokens, depth, length, count if depth else 1)
        if self.branches is None or depth == 0:
            return DraftTree.chain(tokens.ids[:, :0], auxiliary=auxiliary)
        order = cached_arange(count * depth, tokens.ids.device)
        parents = torch.where(order % depth == 0, -1, order - 1).expand(len(tokens.ids), -1)
        return DraftTree(self.branches.flatten(1), parents, depth=depth, auxiliary=auxiliary)

    def _draw(self, tokens: Sequences, count: int) -> None:
        drawn = self.uniforms.fresh(self.many * (self.longest_group + 2)).unflatten(1, (self.many, -1))
        self.fresh = drawn[..., 1:]
        if self.branches is None or self.branches.shape[-1] == 0:
            self.branches, self.vectors = None, drawn[:, :1, :1]

    def _of_slots(self, layout: SlotLayout) -> Tensor:
        """Return the target's uniform for the shared slots, and those of their vectors for the others."""
        picks = self.vectors[:, layout.branch, layout.group]
        own = self.fresh[:, layout.vector, (layout.index_in_group - 1).clamp(min=0)]
        return torch.where(layout.index_in_group == 0, picks, own)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        self.branches, layout = None, self.layout
        if layout is None or outputs.auxiliary is None:
            return
        self._learn(result)
        index, exists = layout.of_group(result.num_accepted, self.chosen_branch)
        first = int(self.is_one_hot)  # a one-hot slot 0 predicts what the target picks itself
        index, exists = index[..., first:], exists[:, None, first:]
        if index.shape[-1] > 0:
            sequence = cached_arange(len(index), index.device)[:, None, None]
            slots, self.vectors = outputs.auxiliary[sequence, index], self.fresh
            self.branches, _ = self._drafts(slots, self.fresh[..., : index.shape[-1]], exists)


class CentralVerifier(CoupledVerifier):
    """Coupled verification of all branches of a session, of which the most central one is chosen."""

    def __init__(self, drafter: BestOfSession) -> None:
        super().__init__(drafter.uniforms)
        self.drafter = drafter

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        distribution, vectors = distribution_of(scores), self.drafter.vectors
        self.rows = distribution[..., 0]
        branches = self.drafter.branches
        drafts = tree.tokens[:, None] if tree.is_chain or branches is None else branches
        count, length = drafts.shape[1:]
        columns = torch.nn.functional.pad(1 + cached_arange(count * length, scores.device).view(count, length), (1, 0))
        probs, uniforms = distribution[:, columns], vectors[..., : length + 1]
        picked = pick(uniforms, probs)
        accepted = (drafts == picked[..., :-1]).long().cumprod(2).sum(2)
        low, high = interval(picked, probs)
        best = most_central(((uniforms - low) / (high - low))[..., :-1], accepted)
        sequence, self.drafter.chosen_branch = cached_arange(len(best), best.device), best
        accepted = accepted[sequence, best]
        path = columns[best].gather(1, torch.minimum(cached_arange(length + 1, best.device), accepted[:, None]))
        return VerificationResult(accepted, picked[sequence, best], path)
