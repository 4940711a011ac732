"""Best-of-M: several vectors of uniforms are drafted from, and the most central one is kept.

Every cycle draws M fresh vectors for the output positions to come and drafts a branch from each; the forward that
verifies the branches makes the M drafts after each of their ends. The branch to keep is chosen by where its uniforms
lie in the intervals of the *target's* picks (`best_of`). On any prefix those places are uniform and independent of the
tokens, so the choice changes no distribution, as long as no uniform behind the stop is used again; the paper's Eq. 18
has the opposite sign and measures against the student. Slots cost M^2 times as much.
"""

from __future__ import annotations

from typing import Any

import torch

from ...modeling.sampling import interval, pick
from ...modeling.uniforms import best_of
from ..contract import DraftTree, VerificationResult, cached_arange
from ..rules import CoupledVerifier, distribution_of
from ..targets import TargetOutput
from ..tokens import Sequences
from .parallel import ParallelSession
from .slots import SlotLayout


class BestOfSession(ParallelSession):
    """Reads M drafts off the slots behind the branch that was kept.

    Attributes:
        branches: [B, J, m] int64, the drafts to verify: M of them, or one empty one.
        vectors: [B, J, m + 1 or more], the uniforms that they and the tokens behind them are picked with.
        fresh: [B, M, n], the uniforms of the drafts to come.
        kept_branch: [B] int64.
    """

    def __init__(self, *args: Any, many: int) -> None:
        super().__init__(*args, many=many)
        self.branches = self.vectors = self.fresh = self.kept_branch = None

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """All branches, one behind the other, of at most `length` tokens each."""
        asked = length
        if self.branches is not None:
            self.branches = self.branches[..., :length]
        count, length = (1, 0) if self.branches is None else self.branches.shape[1:]
        auxiliary = self._auxiliary(tokens, length, asked, count if length else 1)
        if length == 0:
            return DraftTree.chain(tokens.ids[:, :0], auxiliary=auxiliary)
        order = cached_arange(count * length, tokens.ids.device)
        parents = torch.where(order % length == 0, -1, order - 1).expand(len(tokens.ids), -1)
        return DraftTree(self.branches.flatten(1), parents, depth=length, auxiliary=auxiliary)

    def _draw(self, tokens: Sequences, count: int) -> None:
        """Draws uniforms for the drafts of the next forward, and for its only pick if it verifies none."""
        drawn = self.uniforms.fresh(self.many * (self.longest_group + 2)).unflatten(1, (self.many, -1))
        self.fresh = drawn[..., 1:]
        if self.branches is None or self.branches.shape[-1] == 0:
            self.branches, self.vectors = None, drawn[:, :1, :1]

    def _of_slots(self, layout: SlotLayout) -> torch.Tensor:
        """The shared slots read the uniform of the target's pick, the others those of their vectors."""
        picks = self.vectors[:, layout.branch, layout.group]
        own = self.fresh[:, layout.vector, (layout.place - 1).clamp(min=0)]
        return torch.where(layout.place == 0, picks, own)

    def advance(self, fed: TargetOutput, result: VerificationResult) -> None:
        """Drafts from the groups behind the tokens that each row kept."""
        self.branches, layout = None, self.layout
        self._keep_state(fed, result)
        if layout is None:
            return
        self._learn(result)
        index, exists = layout.of_group(result.num_accepted, self.kept_branch)
        first = int(self.is_one_hot)  # a one-hot slot 0 predicts what the target picks itself
        index, exists = index[..., first:], exists[:, None, first:]
        if index.shape[-1] > 0:
            rows = cached_arange(len(index), index.device)[:, None, None]
            self.branches, _ = self._drafts(fed.auxiliary[rows, index], self.fresh[..., : index.shape[-1]], exists)
            self.vectors = self.fresh


class CentralVerifier(CoupledVerifier):
    """Coupled verification of all branches, of which the most central one is kept.

    Args:
        drafter: Holds the branches and their uniforms, and is told which one was kept.
    """

    def __init__(self, drafter: BestOfSession) -> None:
        super().__init__(drafter.uniforms)
        self.drafter = drafter

    def verify(self, tree: DraftTree, scores: torch.Tensor) -> VerificationResult:
        """See `Verifier`."""
        self.distribution, vectors = distribution_of(scores), self.drafter.vectors
        drafts = tree.tokens[:, None] if tree.is_chain else self.drafter.branches
        count, length = drafts.shape[1:]
        columns = torch.nn.functional.pad(1 + cached_arange(count * length, scores.device).view(count, length), (1, 0))
        probs, uniforms = self.distribution[:, columns], vectors[..., : length + 1]
        picked = pick(uniforms, probs)
        accepted = (drafts == picked[..., :-1]).long().cumprod(2).sum(2)
        low, high = interval(picked, probs)
        kept = best_of(((uniforms - low) / (high - low))[..., :-1], accepted)
        rows, self.drafter.kept_branch = cached_arange(len(kept), kept.device), kept
        accepted = accepted[rows, kept]
        places = columns[kept].gather(1, torch.minimum(cached_arange(length + 1, kept.device), accepted[:, None]))
        return VerificationResult(accepted, picked[rows, kept], places)
