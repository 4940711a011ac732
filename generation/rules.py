"""How the drafts of one call are judged, and how its first token is chosen: greedy, sampled, or picked by uniforms."""

from __future__ import annotations

from typing import Protocol

import torch

from ..modeling.sampling import draw, pick
from .contract import DraftTree, Verdict
from .tokens import TokenRows
from .tree_verification import follow
from .uniforms import Uniforms
from .verification import verify, verify_sampled


class Rule(Protocol):
    """Verification in one call of `generate`."""

    def first(self, scores: torch.Tensor, tokens: TokenRows) -> torch.Tensor:
        """The token after the prompt, [B], from processed scores [B, v]."""

    def judge(self, tree: DraftTree, scores: torch.Tensor) -> Verdict:
        """What is kept of a draft, and the token that is added, from processed scores [B, m + 1, v]."""

    def faults(self, verdict: Verdict) -> torch.Tensor | None:
        """Rows [B] whose last verdict rests on scores that are no law (NaN, or all -inf); None where none can be."""


class GreedyRule:
    """The target's argmax at every place."""

    def first(self, scores: torch.Tensor, tokens: TokenRows) -> torch.Tensor:
        """See `Rule`."""
        return scores.argmax(-1)

    def judge(self, tree: DraftTree, scores: torch.Tensor) -> Verdict:
        """See `Rule`."""
        return follow(tree, scores.argmax(-1))

    def faults(self, verdict: Verdict) -> torch.Tensor | None:
        """Plain greedy decoding does not ask either."""
        return None


class SampledRule:
    """The target's law at every place; see `verification.verify_sampled`.

    Args:
        rule: `"block"` (None) or `"token"`.
        uniforms: Where given, all that is random comes from there; the added token is picked by the uniform of its
            position.
    """

    def __init__(self, rule: str | None = None, uniforms: Uniforms | None = None) -> None:
        self.rule, self.uniforms = rule or "block", uniforms
        self.law: torch.Tensor | None = None

    def first(self, scores: torch.Tensor, tokens: TokenRows) -> torch.Tensor:
        """See `Rule`."""
        self.law = scores.softmax(-1)[:, None]
        if self.uniforms is None:
            return draw(self.law[:, 0])
        return pick(self.uniforms.draw(tokens, 1)[:, 0], self.law[:, 0])

    def judge(self, tree: DraftTree, scores: torch.Tensor) -> Verdict:
        """See `Rule`."""
        self.law = scores.softmax(-1)
        if self.uniforms is None:
            return verify_sampled(tree, self.law, self.rule)
        uniforms = self.uniforms.current[:, : scores.shape[1]]
        tests = self.uniforms.fresh(tree.tokens.shape[1])
        accepted, added = verify(tree.tokens, tree.laws, self.law, self.rule, uniforms=uniforms, tests=tests)
        new = torch.nn.functional.pad(tree.tokens, (0, 1)).scatter_(1, accepted[:, None], added[:, None])
        return Verdict(accepted, new)

    def faults(self, verdict: Verdict) -> torch.Tensor | None:
        """See `Rule`."""
        return _reached_faults(self.law, verdict)


class CoupledRule:
    """The target picks with the very uniforms that the draft was made from (PTP paper, Algorithm 1).

    Args:
        uniforms: One for every output position.
    """

    def __init__(self, uniforms: Uniforms) -> None:
        self.uniforms = uniforms
        self.law: torch.Tensor | None = None

    def first(self, scores: torch.Tensor, tokens: TokenRows) -> torch.Tensor:
        """See `Rule`."""
        self.law = law_of(scores)[:, None]
        return pick(self.uniforms.draw(tokens, 1)[:, 0], self.law[:, 0])

    def judge(self, tree: DraftTree, scores: torch.Tensor) -> Verdict:
        """See `Rule`."""
        self.law = law_of(scores)
        return follow(tree, pick(self.uniforms.current[:, : scores.shape[1]], self.law))

    def faults(self, verdict: Verdict) -> torch.Tensor | None:
        """See `Rule`."""
        return _reached_faults(self.law, verdict)


def law_of(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities in float64: cumulative sums over a large vocabulary in float32 misplace picks."""
    return scores.double().softmax(-1)


def _reached_faults(law: torch.Tensor, verdict: Verdict) -> torch.Tensor:
    """Rows [B] bool in which a place on the kept path has no law; softmax makes NaN of all its entries there.

    A drawn chain keeps no draft whose law is none, so that its verdict knows from the draw of the added token.
    """
    if verdict.faults is not None:
        return verdict.faults
    if verdict.places is not None:
        return law[..., 0].gather(1, verdict.places).isnan().any(1)
    return law[..., 0].cumsum(1).gather(1, verdict.accepted[:, None])[:, 0].isnan()
