"""Chains whose positions are drafted at once, each from a distribution of its own that no drafted token changes."""

from __future__ import annotations

import torch
from torch import Tensor

from ..call.constraints import DraftMasks
from ..call.options import DraftOptions
from ..trees.contract import DraftTree


def block_chain(
    logits: Tensor,
    options: DraftOptions,
    masks: DraftMasks | None,
    draft_ids: Tensor | None = None,
    vocab_size: int = 0,
) -> DraftTree:
    """Return a chain of a token for each position, up to the first that no sequence was sure of.

    Args:
        logits: [B, m, v] of a drafter.
        options: Of the call.
        masks: What may be drafted, of `options.masks`; it goes on with the tokens.
        draft_ids: [v], see `draft_probs`.
        vocab_size: See `draft_probs`.
    """
    drafts, probs = [], []
    for step in logits.unbind(1):
        token, distribution = options.choose(step, draft_ids, vocab_size, masks)
        drafts.append(token)
        probs.append(distribution)
    draft, length = torch.stack(drafts, 1), logits.shape[1]
    if probs[0] is None:
        return DraftTree.chain(draft)
    q = torch.stack(probs, 1)
    if options.threshold:
        length = options.sure_length(draft, q)
    return DraftTree.chain(draft[:, :length], q[:, :length] if options.do_sample else None)
