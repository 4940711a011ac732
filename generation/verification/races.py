"""Block verification as a race: for accelerators, where random numbers are cheap and every launch counts.

On a processor, which makes random numbers one after the other, one uniform per draft and one for the added token cost
less (`rules.verify`). What is emitted has the same distribution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import DraftTree, VerificationResult
from ..tensors.masks import cached_arange
from .rules import TRACE, block_surplus


def race_block(
    draft: Tensor, q: Tensor, p: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Block verification where random numbers are cheap and launches are not: acceptance and added token in one race.

    In row i the surplus of every token and a refusal of weight 1 - P_i run for arrivals w / E with E ~ Exp(1). The
    refusal loses with probability Z_i / (Z_i + 1 - P_i) = h_i, and the first token is then a draw from the residual,
    whatever the refusal's arrival was. Rows are independent.

    Args:
        draft: [B, m] int64, m > 0, drawn from `q`.
        q: [B, m, v] probabilities.
        p: [B, m + 1, v] probabilities.
        generator: Source of randomness.

    Returns:
        num_accepted [B]; tokens [B, m + 1], the accepted drafts and then the added token; and [B] bool, where the
        target's first row is no distribution.
    """
    weight, surplus = block_surplus(draft, q, p)
    arrivals = p.new_empty(*p.shape[:2], p.shape[2] + 1).exponential_(generator=generator)
    best, tokens = surplus.add_(p, alpha=TRACE).div_(arrivals[..., 1:]).max(-1)
    kept = torch.addcmul(weight, best, arrivals[..., 0]) >= 1
    rows = cached_arange(p.shape[1], p.device)
    accepted = (kept * rows).amax(1)
    torch.where(rows[:-1] < accepted[:, None], draft, tokens[:, :-1], out=tokens[:, :-1])
    return accepted, tokens, best[:, 0].isnan()


def is_raced(tree: DraftTree, rule: str) -> bool:
    """Return whether a race verifies the tree: a drawn chain on an accelerator, under the rule `"block"`."""
    is_drawn_chain = tree.is_chain and tree.probs is not None and tree.num_nodes is None and tree.depth > 0
    return is_drawn_chain and rule == "block" and tree.tokens.device.type != "cpu"


def race(tree: DraftTree, p: Tensor, generator: torch.Generator | None = None) -> VerificationResult:
    """Return the result of `race_block` for a drawn chain; `p` as in `verify_sampled`."""
    assert tree.probs is not None
    accepted, tokens, invalid = race_block(tree.tokens, tree.probs, p, generator)
    return VerificationResult(accepted, tokens, invalid=invalid)
