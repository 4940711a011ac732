"""Loss of a chain of modules: what depths weigh, and the cross-entropy of all of them. Knows no module and no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..heads.chunks import Part, chunked_sums
from ..heads.losses import IGNORE, check_targets, counts_of_update
from ..heads.teacher import acceptance, divergence, head_and_rest, lumped
from ..loss_options import LossOptions


def depth_weights(counts: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """What the summed cross-entropy of each depth is multiplied with.

    Args:
        counts: [D + 1], targets per depth, the main model first; 0 counts as 1.
        options: The options.

    Returns:
        [D + 1] float32.
    """
    if options.normalization == "paper":
        counts = counts[:1].expand(len(counts))
    shares = [options.decay**k for k in range(len(counts) - 1)]
    weights = torch.tensor([1.0] + [options.weight * share / sum(shares) for share in shares], device=counts.device)
    return weights / counts.clamp(min=1)


class ChainLoss(NamedTuple):
    """The loss of a chain and what is shown of it, detached.

    Attributes:
        loss: Scalar.
        means: [D + 1] mean term per depth in nats, the main model first; NaN where there is no target.
        acceptances: [D + 1] mean probability that a token drawn at a depth is kept, NaN at depth 1; None without a
            teacher.
        missing: Scalar, the teacher's mean mass outside `top_k`; None where all tokens are compared.
    """

    loss: torch.Tensor
    means: torch.Tensor
    acceptances: torch.Tensor | None = None
    missing: torch.Tensor | None = None


def chain_loss(
    head: nn.Module,
    states: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    vocab_size: int,
    options: LossOptions,
    counts: torch.Tensor | int | None = None,
) -> ChainLoss:
    """Weighted sum over depths of the summed cross-entropy (or distance from the main model's distribution), in chunks.

    The depths are not independent: h^k is made from h^{k-1}. So all chunks first leave their gradients on the h^k, and
    autograd then goes down the chain once.

    Args:
        head: From states [R, H] to logits [R, V].
        states: Per depth [B, R_k, H].
        targets: Per depth [B, R_k] int64, -100 where there is none.
        vocab_size: V.
        options: How depths are weighed; with `detach_head`, only depth 0 trains the head.
        counts: `num_items_in_batch`, see `counts_of_update`.

    Returns:
        See `ChainLoss`.

    Raises:
        ValueError: A target that is no token id, or counts of another number of depths.
    """

    def terms(state: torch.Tensor, target: torch.Tensor, taught: torch.Tensor | None = None) -> torch.Tensor:
        logits, target = head(state).float(), target[:, 0]
        losses = nn.functional.cross_entropy(logits, target.to(logits.device), ignore_index=IGNORE, reduction="none")
        shown = [torch.zeros_like(losses)] * 2
        if taught is not None:
            scored = (target != IGNORE).to(losses.device)
            with torch.no_grad():
                log_p = head(taught).float().log_softmax(-1)
            distance, *shown = _taught(log_p, logits.log_softmax(-1), options)
            share = options.label_weight
            losses = torch.where(scored, (1 - share) * distance + share * losses, 0.0)
            shown = [torch.where(scored, value, 0.0) for value in shown]
        return torch.stack([losses, *shown], -1)

    own = torch.stack([(check_targets(part, vocab_size) != IGNORE).sum() for part in targets])
    weights = depth_weights(counts_of_update(own, counts), options)
    teaches = options.target == "teacher"
    parts = [
        Part(
            state,
            (target[..., None], states[0].detach()[:, depth : depth + state.shape[1]] if teaches and depth else None),
            nn.functional.pad(weight[None], (0, 2)),
            trains_module=depth == 0 or not options.detach_head,
        )
        for depth, (state, target, weight) in enumerate(zip(states, targets, weights))
    ]
    loss, sums = chunked_sums(terms, head, parts, vocab_size)
    means, accepted, missing = (torch.stack([part.to(own.device) for part in sums]) / own[:, None]).unbind(1)
    if not teaches or len(own) < 2:
        return ChainLoss(loss, means)
    accepted[0] = torch.nan
    return ChainLoss(loss, means, accepted, None if options.top_k is None else missing[1:].nanmean())


def _taught(
    log_p: torch.Tensor, log_q: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distance from the teacher, acceptance and mass outside the top k of rows of distributions [R, V], [R] each."""
    missing = torch.zeros_like(log_p[:, 0])
    if options.top_k is not None:
        ids, log_p = head_and_rest(log_p, options.top_k)
        log_q, missing = lumped(log_q, ids), log_p[:, -1].exp()
    return divergence(options.divergence, log_p, log_q), acceptance(log_p, log_q.detach()), missing
