"""Losses of an EAGLE head, which continues from its own outputs in training as it does while drafting.

EAGLE-3's training-time test (2503.01840, section 3.2) is all steps with gradients through them; HASS (2408.15766) is
the same with outputs detached between steps, and adds a document's first rows again in later steps; EAGLE-1 is step 0
alone.

Memory: rows of the later steps run block by block, and logits exist for one chunk of rows at a time; neither grows with
the number of steps. The block loss reads all steps of a row together, so its blocks are recomputed in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...configuration.loss_options import ResolvedEagleOptions
from ..common.backbone_parts import BackboneParts
from ..common.outputs import EagleOutput
from ..common.teacher import block_terms, sequence_log_probs
from ..heads.losses import IGNORE
from .batch import TrainingBatch
from .modules import EagleNetwork
from .steps import Steps, summed_steps
from .terms import DISTRIBUTION_WEIGHT, row_likelihoods


def eagle_loss(
    head: EagleNetwork,
    features: Tensor,
    batch: TrainingBatch,
    options: ResolvedEagleOptions,
    num_items: Tensor | None = None,
) -> EagleOutput:
    """Return the loss of a head, and the losses of its steps.

    Args:
        head: The head.
        features: Result of `head.fuse` for the batch, [B, L, d].
        batch: The batch.
        options: How the loss is computed.
        num_items: Rows with targets per step over all micro-batches, [steps]; None: those of the batch.
    """
    features, batch = batch.with_a_row(features)
    if options.noise and head.training:
        width = options.noise * 512 / batch.lengths[..., None]
        features = features + (torch.rand_like(features) - 0.5) * width.to(features)
    counts = counts_per_step(batch, options)
    weights = _step_weights(counts if num_items is None else num_items, options, features)
    if head.training and head.config.mask_token_id is not None:
        batch, every = _thinned(batch, options), counts
        counts = counts_per_step(batch, options)
        weights = weights * every / counts.clamp(min=1)  # rows that are left stand for all
    if options.divergence == "block":
        sums = _BlockLoss(head, batch, options).sums(features)
        loss = (sums[:, 0] * weights).sum()
    else:
        loss, sums = summed_steps(head, features, batch, options, weights)
    means, shown, accepted = (sums.detach() / counts.clamp(min=1)[:, None]).unbind(1)
    return EagleOutput(loss=loss, step_losses=shown, head_losses=means, acceptances=accepted)


def _thinned(batch: TrainingBatch, options: ResolvedEagleOptions) -> TrainingBatch:
    """Return the batch with fewer random rows in every step, of which each has run in all steps before (P-EAGLE)."""
    shares = options.kept ** torch.arange(options.steps, device=batch.states.device)  # [S]
    chance = torch.rand(batch.num_rows, device=batch.states.device)
    return replace(batch, kept=chance < shares.clamp(min=options.least_kept)[:, None])


def pooled_loss(sums: Tensor, counts: Tensor, options: ResolvedEagleOptions) -> Tensor:
    """Return the loss of data from summed terms and rows with targets, [steps] each."""
    return (sums * _step_weights(counts, options, sums)).sum()


def _step_weights(counts: Tensor, options: ResolvedEagleOptions, like: Tensor) -> Tensor:
    """Return the factors of the summed terms of all steps in the loss, [steps], at least float32; counts [steps]."""
    dtype, is_block = torch.promote_types(like.dtype, torch.float32), options.divergence == "block"
    counts = counts.to(like.device, dtype)
    if is_block:  # a mean over positions of what all steps accept
        counts = counts[:1]
    discounts = options.objective == "ttt" and not is_block
    decay = options.decay if discounts else 1.0
    return decay ** torch.arange(options.steps, device=like.device, dtype=dtype) / counts.clamp(min=1)


def counts_per_step(batch: TrainingBatch, options: ResolvedEagleOptions) -> Tensor:
    """Return the number of rows with a target per step, [steps] int64; all steps of HASS have those of the first."""
    counts = torch.stack([batch.counted(step).sum() for step in range(options.steps)])
    return counts[:1].expand(len(counts)) if options.objective == "hass" else counts


class _BlockLoss(Steps):
    """The block loss, which reads all steps of a row together; each block is recomputed in backward."""

    def sums(self, features: Tensor) -> Tensor:
        """Return sums over rows of [loss, m_k, acceptance], [steps, 3], from features of step 0 [B, L, d]."""
        batch, rows, steps = self.batch, self.batch.num_rows, range(self.options.steps)
        log_q, others = self._likelihoods(features).unbind(1)  # [steps, B, rows] each
        following = batch.following
        log_p = sequence_log_probs(BackboneParts(self.head.backbone), batch.states, following)
        log_p = torch.stack([batch.ahead(log_p, 0, rows, 1 + step) for step in steps], -1)
        targets = torch.stack([batch.ahead(self.columns, 0, rows, 2 + step) for step in steps], -1)
        counted = self.counted.permute(1, 2, 0)
        drafted = counted & (targets >= 0)
        starts, share = self.counted[0] & (following[:, :rows] != IGNORE), self.options.label_weight
        both = block_terms(log_q.permute(1, 2, 0), log_p, drafted, starts, self.options.position_weighting, share)
        terms, accepted = (part.permute(2, 0, 1) for part in both)
        weight = 1.0 if self.options.objective == "ttt" else DISTRIBUTION_WEIGHT
        chosen = torch.stack([counted, counted & self.first[..., None]]).permute(3, 0, 1, 2).to(terms)
        others = self.with_first_rows((chosen * others[:, None]).sum((-2, -1))[..., None])[:, 0]
        learned = (chosen[:, 0] * terms).sum((-2, -1))
        return torch.stack([others + weight * learned, learned, (chosen[:, 0] * accepted).sum((-2, -1))], -1)

    def _likelihoods(self, features: Tensor) -> Tensor:
        """Return log q of the targets of all steps and rows, and their other terms, [steps, 2, B, rows]."""
        rows = self.batch.num_rows
        outputs, columns = self.first_step(features[:, :rows])
        first, later = self._likelihoods_of(outputs, 0, 0)[None], []
        if self.options.steps == 1:
            return first
        for start in range(0, rows, self.block):
            stop = min(start + self.block, rows)
            seen = [states[:, :, self.lowest[start] : stop] for states in columns]
            later.append(checkpoint(self._later, outputs[:, start:stop], start, *seen, use_reentrant=False))
        return torch.cat([first, torch.cat(cast(list[Tensor], later), dim=-1)])

    def _later(self, features: Tensor, start: int, *columns: Tensor) -> Tensor:
        steps = enumerate(self.later_steps(features, start, list(columns)), 1)
        return torch.stack([self._likelihoods_of(outputs, start, step) for step, outputs in steps])

    def _likelihoods_of(self, features: Tensor, start: int, step: int) -> Tensor:
        """Return log q of a block's targets, 0 for tokens that are not drafted, and its terms besides, [2, B, R]."""
        stop = start + features.shape[1]
        rows = self.counted_on_host[step, :, start:stop].flatten().nonzero()[:, 0]  # prompts need no logits
        parts = self._chunks(features, start, step, rows)
        chunks = [checkpoint(row_likelihoods, self.head, *part, self.options, use_reentrant=False) for part in parts]
        found = torch.cat(cast(list[Tensor], chunks), -1)
        whole = found.new_zeros(2, features.shape[:2].numel()).index_copy(1, rows.to(found.device), found)
        return whole.view(2, *features.shape[:2])

    def _chunks(self, features: Tensor, start: int, step: int, rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield features, states and draft columns of some of the rows, [N, ..] each."""
        stop = start + features.shape[1]
        states = self.batch.ahead(self.batch.states, start, stop, 1 + step)
        columns = self.batch.ahead(self.columns, start, stop, 2 + step)
        inputs = (features, states.to(features.device), columns.to(features.device))
        yield from zip(*(values.flatten(0, 1)[rows.to(values.device)].split(self.size) for values in inputs))
