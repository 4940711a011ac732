"""Cross-entropy and KL of an EAGLE-3 head with their gradients, which are products of matrices and need no autograd.

With logits W z, z = norm(x), the loss w D(p, q) has the gradient g = w (q - p) of the logits; that of z is g W, and
that of W is g^T z, which is added to its total in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...configuration.loss_options import ResolvedEagleOptions
from ..common.chunks import add_product
from .modules import EagleNetwork
from .terms import TeacherRows


def has_products(head: EagleNetwork, options: ResolvedEagleOptions) -> bool:
    """Return whether `product_terms` computes the head's loss: a plain unembedding, and a divergence that it knows."""
    if options.objective != "ttt" or options.divergence not in ("cross_entropy", "kl"):
        return False
    unembedding = head.lm_head  # adapters and quantization have another type; hooks must see its calls
    return type(unembedding) is nn.Linear and not (unembedding._forward_hooks or unembedding._backward_hooks)


@dataclass
class TeacherProbs:
    """What rows learn, as `product_terms` reads it.

    Attributes:
        p: [N, Vd], the backbone's probabilities of the drafted tokens.
        mass: [N], their sums.
        entropy: [N] in nats, that of p renormalised.
        is_known: [N], 1 where the likeliest token is drafted, else 0.
    """

    p: Tensor
    mass: Tensor
    entropy: Tensor
    is_known: Tensor

    @classmethod
    def of(cls, teacher: TeacherRows) -> TeacherProbs:
        """Return those of a teacher's rows, whose `log_p` are overwritten."""
        p = teacher.log_p.exp_()
        mass = p.sum(-1).clamp(min=torch.finfo(p.dtype).tiny)
        entropy = mass.log() - torch.xlogy(p, p).sum(-1) / mass
        return cls(p, mass, entropy, teacher.is_known.to(p))

    def at(self, rows: Tensor) -> TeacherProbs:
        """Return those of the rows with these indices [n]."""
        return TeacherProbs(*(values.index_select(0, rows) for values in vars(self).values()))


@torch.no_grad()
def product_terms(
    head: EagleNetwork,
    normed: Tensor,
    columns: Tensor,
    teacher: TeacherProbs,
    options: ResolvedEagleOptions,
    weights: Tensor,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the terms of rows as `row_terms` does, [N, 3], and the gradient [N, d] of their normed features.

    Args:
        head: The head.
        normed: Output of rows as the unembedding reads it, [N, d].
        columns: [N], the draft columns of the predicted tokens, -1 where they are not drafted.
        teacher: What they learn, N rows.
        options: How the loss is computed.
        weights: [N], the factors of the rows' losses.
        total: Where the gradient of the unembedding is added, [Vd, d]; None: it learns nothing.
    """
    logits, weight = head.lm_head(normed), head.lm_head.weight
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    expected = torch.bmm(teacher.p[:, None], logits[:, :, None])[:, 0, 0] / teacher.mass  # sum_x p(x) logit(x)
    q = logits.softmax(-1)
    logsumexp = logits.amax(-1) - q.amax(-1).log()
    distance = logsumexp - expected
    if options.divergence == "kl":
        distance = distance - teacher.entropy
    distance = distance * teacher.is_known
    accepted = torch.minimum(teacher.p, q).sum(-1)
    share, loss = options.label_weight, distance
    factor = (1 - share) * weights * teacher.is_known
    scale = factor
    if share:
        is_drafted, columns = columns >= 0, columns.clamp(min=0)[:, None]
        likelihood = torch.where(is_drafted, logits.gather(-1, columns)[:, 0] - logsumexp, 0.0)
        loss = (1 - share) * distance - share * likelihood
        scale = factor + share * weights * is_drafted
    gradient = q.mul_(scale[:, None]).addcmul_(teacher.p, (factor / teacher.mass)[:, None], value=-1)  # [N, Vd]
    if share:
        gradient.scatter_add_(-1, columns, -(share * weights * is_drafted)[:, None])
    gradient = gradient.to(weight.dtype)
    if total is not None:
        add_product(total, gradient, normed.to(weight.dtype))
    return torch.stack([loss, distance, accepted], dim=-1), gradient @ weight
