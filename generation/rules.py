"""How the drafts of one call are verified, and how its first token is chosen: greedy, sampled, or picked by
uniforms."""

from __future__ import annotations

from typing import Protocol

import torch

from ..modeling.sampling import draw, pick
from .contract import DraftTree, VerificationResult
from .tokens import Sequences
from .tree_verification import follow
from .uniforms import Uniforms
from .verification import verify, verify_sampled


class Verifier(Protocol):
    """Verification in one call of `generate`."""

    def first(self, scores: torch.Tensor, tokens: Sequences) -> torch.Tensor:
        """The token after the prompt, [B], from processed scores [B, v]."""

    def verify(self, tree: DraftTree, scores: torch.Tensor) -> VerificationResult:
        """What is kept of a draft, and the token that is added, from processed scores [B, m + 1, v]."""

    def invalid(self, result: VerificationResult) -> torch.Tensor | None:
        """Rows [B] whose last verification result rests on scores that are no distribution (NaN, or all -inf); None
        where none can be."""


class GreedyVerifier:
    """The target's argmax at every place."""

    def first(self, scores: torch.Tensor, tokens: Sequences) -> torch.Tensor:
        """See `Verifier`."""
        return scores.argmax(-1)

    def verify(self, tree: DraftTree, scores: torch.Tensor) -> VerificationResult:
        """See `Verifier`."""
        return follow(tree, scores.argmax(-1))

    def invalid(self, result: VerificationResult) -> torch.Tensor | None:
        """Plain greedy decoding does not ask either."""
        return None


class SampledVerifier:
    """The target's distribution at every place; see `verification.verify_sampled`.

    Args:
        rule: `"block"` (None) or `"token"`.
        uniforms: Where given, all that is random comes from there; the added token is picked by the uniform of its
            position.
    """

    def __init__(self, rule: str | None = None, uniforms: Uniforms | None = None) -> None:
        self.rule, self.uniforms = rule or "block", uniforms
        self.distribution: torch.Tensor | None = None

    def first(self, scores: torch.Tensor, tokens: Sequences) -> torch.Tensor:
        """See `Verifier`."""
        self.distribution = scores.softmax(-1)[:, None]
        if self.uniforms is None:
            return draw(self.distribution[:, 0])
        return pick(self.uniforms.draw(tokens, 1)[:, 0], self.distribution[:, 0])

    def verify(self, tree: DraftTree, scores: torch.Tensor) -> VerificationResult:
        """See `Verifier`."""
        self.distribution = scores.softmax(-1)
        if self.uniforms is None:
            return verify_sampled(tree, self.distribution, self.rule)
        uniforms = self.uniforms.current[:, : scores.shape[1]]
        tests = self.uniforms.fresh(tree.tokens.shape[1])
        accepted, added = verify(tree.tokens, tree.probs, self.distribution, self.rule, uniforms=uniforms, tests=tests)
        new = torch.nn.functional.pad(tree.tokens, (0, 1)).scatter_(1, accepted[:, None], added[:, None])
        return VerificationResult(accepted, new)

    def invalid(self, result: VerificationResult) -> torch.Tensor | None:
        """See `Verifier`."""
        return _reached_faults(self.distribution, result)


class CoupledVerifier:
    """The target picks with the very uniforms that the draft was made from (PTP paper, Algorithm 1).

    Args:
        uniforms: One for every output position.
    """

    def __init__(self, uniforms: Uniforms) -> None:
        self.uniforms = uniforms
        self.distribution: torch.Tensor | None = None

    def first(self, scores: torch.Tensor, tokens: Sequences) -> torch.Tensor:
        """See `Verifier`."""
        self.distribution = distribution_of(scores)[:, None]
        return pick(self.uniforms.draw(tokens, 1)[:, 0], self.distribution[:, 0])

    def verify(self, tree: DraftTree, scores: torch.Tensor) -> VerificationResult:
        """See `Verifier`."""
        self.distribution = distribution_of(scores)
        return follow(tree, pick(self.uniforms.current[:, : scores.shape[1]], self.distribution))

    def invalid(self, result: VerificationResult) -> torch.Tensor | None:
        """See `Verifier`."""
        return _reached_faults(self.distribution, result)


def distribution_of(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities in float64: cumulative sums over a large vocabulary in float32 misplace picks."""
    return scores.double().softmax(-1)


def _reached_faults(distribution: torch.Tensor, result: VerificationResult) -> torch.Tensor:
    """Rows [B] bool in which a place on the kept path has no distribution; softmax makes NaN of all its entries there.

    A drawn chain keeps no draft whose distribution is none, so that its verification result knows from the draw of the
    added token.
    """
    if result.invalid is not None:
        return result.invalid
    if result.tree_path is not None:
        return distribution[..., 0].gather(1, result.tree_path).isnan().any(1)
    return distribution[..., 0].cumsum(1).gather(1, result.num_accepted[:, None])[:, 0].isnan()
