"""The terms of rows of an EAGLE head: how far its distribution is from the backbone's, and what else it learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...configuration.loss_options import ResolvedEagleOptions
from ..common.backbone_parts import BackboneParts
from ..common.teacher import acceptance, divergence, logit_summaries
from ..heads.losses import IGNORE
from .batch import TrainingBatch
from .modules import EagleNetwork

DISTRIBUTION_WEIGHT = 0.1
"""Weight of the cross-entropy of distributions, relative to the regression of features (EAGLE-1, section 4.2)."""


@dataclass
class TeacherRows:
    """What the backbone says of the tokens that rows predict.

    Attributes:
        states: The backbone's last hidden states before the predicted tokens, [N, D].
        log_p: [N, Vd], its log-probabilities of the drafted tokens, normalised over all tokens.
        is_known: [N] bool, whether its likeliest token is drafted.
    """

    states: Tensor
    log_p: Tensor
    is_known: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, head: EagleNetwork, states: Tensor, summaries: Tensor) -> TeacherRows:
        """Return those of states [N, D], with rows of `draft_summaries`, [N, 2] or [N, 0]."""
        logits = head.backbone_logits(states, only_drafted=bool(summaries.shape[-1]))  # [N, Vd] or [N, V]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if summaries.shape[-1]:
            return cls(states, logits - summaries[:, :1].to(logits), summaries[:, 1] > 0)
        log_p, ids = logits.log_softmax(-1), head.draft_ids
        if head.offsets is None:
            return cls(states, log_p, torch.ones_like(log_p[:, 0], dtype=torch.bool))
        return cls(states, log_p[:, ids], torch.isin(logits.argmax(-1), ids))

    @classmethod
    def joined(cls, parts: Sequence[TeacherRows]) -> TeacherRows:
        """Return those of all parts."""
        states, log_p, is_known = zip(*((part.states, part.log_p, part.is_known) for part in parts))
        return cls(torch.cat(states), torch.cat(log_p), torch.cat(is_known))

    def at(self, rows: Tensor) -> TeacherRows:
        """Return those of the rows with these indices [n]."""
        return TeacherRows(*(values.index_select(0, rows) for values in (self.states, self.log_p, self.is_known)))


def draft_summaries(head: EagleNetwork, batch: TrainingBatch) -> Tensor:
    """Return what a loss needs of the backbone's logits outside the draft vocabulary, computed once for all steps.

    [B, L, 2]: logsumexp of all logits, and whether the likeliest token is drafted (1 or 0); [B, L, 0] where all tokens
    are drafted. Only rows before targets are read.
    """
    ids, states = head.draft_ids, batch.states
    if head.offsets is None or bool((ids[1:] <= ids[:-1]).any()):
        return states.new_zeros(*states.shape[:2], 0)
    summaries = batch.summaries
    if summaries is None:
        summaries = logit_summaries(BackboneParts(head.backbone), states, batch.following != IGNORE)
    totals, likeliest = summaries.unbind(-1)
    return torch.stack([totals, torch.isin(likeliest.long(), ids.to(likeliest.device)).to(totals)], -1)


def draft_columns(head: EagleNetwork, labels: Tensor) -> Tensor:
    """Return the column of each label in the draft vocabulary, -1 where it is not drafted; shaped as `labels`."""
    if head.offsets is None:
        return labels
    ids, order = head.draft_ids.to(labels.device).sort()
    found = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    return torch.where(ids[found] == labels, order[found], -1)


def row_terms(
    head: EagleNetwork, features: Tensor, columns: Tensor, teacher: TeacherRows, options: ResolvedEagleOptions
) -> Tensor:
    """Return the terms of rows, [N, 3] float32: the loss, its reported part, and the detached acceptance.

    `"ttt"` (EAGLE-3): -sum_x p(x) log q(x), with p renormalised over the draft vocabulary; 0 where the backbone's
    likeliest token is not in it. `"tv"` and LK losses, which are the acceptance itself, use p without renormalisation:
    a token that is never drafted is never accepted.
    `"eagle1"`: smooth L1 distance of features, and a small multiple of the distance of distributions, which alone is
    reported; a draft vocabulary counts as for EAGLE-3. `"hass"`: the same, with the likeliest tokens a second time.

    Args:
        head: The head.
        features: Output of rows, [N, d].
        columns: [N] `draft_columns` of the predicted tokens.
        teacher: What they learn, N rows.
        options: How the loss is computed.
    """
    is_ttt = options.objective == "ttt"
    is_part = is_ttt or head.offsets is not None
    log_p, log_q = teacher.log_p, _log_q(head, features)
    accepted, share = acceptance(log_p, log_q.detach()), options.label_weight
    if is_part and options.divergence in ("cross_entropy", "kl", "reverse_kl"):
        log_p = log_p.log_softmax(-1)
    distance = divergence(options.divergence, log_p, log_q)
    distance = torch.where(teacher.is_known, distance, 0.0) if is_part else distance
    # a token outside the draft vocabulary has no likelihood
    mixed = (1 - share) * distance - share * _of_columns(log_q, columns) if share else distance
    if is_ttt:
        return torch.stack([mixed, distance, accepted], dim=-1)
    loss = _regression(features, teacher.states) + DISTRIBUTION_WEIGHT * mixed
    if options.objective == "eagle1":
        return torch.stack([loss, distance, accepted], dim=-1)
    loss = loss - _likeliest_again(log_p, log_q, options)
    return torch.stack([loss, loss, accepted], dim=-1)


def row_likelihoods(
    head: EagleNetwork, features: Tensor, states: Tensor, columns: Tensor, options: ResolvedEagleOptions
) -> Tensor:
    """Return log q of the labels of rows, 0 where they are not drafted, and what the loss has besides, [2, N] float32.

    Arguments as for `row_terms`; `states` are the teacher's. That is the regression of version 1, and of HASS the
    likeliest tokens.
    """
    log_q = _log_q(head, features)
    likelihood = _of_columns(log_q, columns)
    if options.objective == "ttt":
        return torch.stack([likelihood, torch.zeros_like(likelihood)])
    others = _regression(features, states)
    if options.objective == "hass":
        with torch.no_grad():
            log_p = head.backbone_logits(states, only_drafted=head.offsets is not None).to(log_q).log_softmax(-1)
        others = others - _likeliest_again(log_p, log_q, options)
    return torch.stack([likelihood, others])


def _log_q(head: EagleNetwork, features: Tensor) -> Tensor:
    logits = head.draft_logits(features)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _likeliest_again(log_p: Tensor, log_q: Tensor, options: ResolvedEagleOptions) -> Tensor:
    best, likeliest = log_p.exp().topk(min(options.topk, log_p.shape[-1]), dim=-1)
    return options.topk_weight * (best * log_q.gather(-1, likeliest)).sum(-1)


def _of_columns(log_q: Tensor, columns: Tensor) -> Tensor:
    return torch.where(columns >= 0, log_q.gather(-1, columns.clamp(min=0)[:, None])[:, 0], 0.0)


def _regression(features: Tensor, states: Tensor) -> Tensor:
    wide = torch.promote_types(features.dtype, torch.float32)
    return nn.functional.smooth_l1_loss(features.to(wide), states.to(wide), reduction="none").mean(-1)
