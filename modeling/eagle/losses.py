"""Losses of an EAGLE head, which goes on from its own outputs in training as it will while drafting.

Row t of step i reads what row t of step i - 1 returned and the embedding of token t + 1 + i, at position t + i. It sees
step 0 up to column t, and of every later step its own column: just what a drafted row sees. So each step is a call of
`head.rows` behind a cache. EAGLE-3's training-time test (2503.01840, section 3.2) is all steps with gradients through
them; HASS (2408.15766) is the same with outputs detached between steps, and counts a document's first rows again in the
steps after theirs; EAGLE-1 is step 0 alone.

Memory: rows of the later steps only meet step 0, so they go block by block, each of which is computed again in
backward; logits exist for one chunk of rows at a time. Neither grows with the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from ..heads.chunks import LOGITS_PER_CHUNK
from ..heads.losses import IGNORE
from ..heads.teacher import acceptance, divergence
from ..loss_options import LossOptions

_BLOCK = 128
"""Rows of a sequence that go through the later steps together."""
_LAW_WEIGHT = 0.1
"""Weight of the distribution's cross-entropy beside the regression of features (EAGLE-1, section 4.2)."""


@dataclass
class TrainingBatch:
    """A batch of sequences and what the backbone made of them.

    Attributes:
        input_ids: [B, L] int64.
        labels: [B, L] int64, -100 where a token is not to be predicted.
        positions: [B, L] int64.
        documents: [B, L] int64, the number of each token's document; -1 for padding.
        states: [B, L, D], the backbone's last hidden states.
        is_whole: Every row is one document without padding.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor
    states: torch.Tensor
    is_whole: bool

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        states: torch.Tensor,
    ) -> TrainingBatch:
        """From the arguments of a model's forward."""
        real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        documents = torch.zeros_like(input_ids)
        if positions is None:
            counted = (real.long().cumsum(1) - 1).clamp(min=0)
        else:
            counted = positions.expand(input_ids.shape)
            documents = nn.functional.pad(counted[:, 1:] <= counted[:, :-1], (1, 0)).long().cumsum(1)
        is_whole = mask is None and positions is None
        return cls(input_ids, labels, counted, documents.masked_fill(~real, -1), states, is_whole)

    @property
    def num_rows(self) -> int:
        """Rows of step 0: the last two tokens have none, for nothing follows their pair."""
        return max(self.input_ids.shape[1] - 2, 0)

    def ahead(self, values: torch.Tensor, start: int, stop: int, by: int) -> torch.Tensor:
        """`values` [B, L, ..] `by` tokens after rows start .. stop - 1; beyond the end the last one is repeated."""
        last = values.shape[1] - 1
        return values[:, torch.arange(start + by, stop + by, device=values.device).clamp(max=last)]

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens in every token's document, [B, L]; of padding any number above 0."""
        numbers = self.documents.clamp(min=0)
        sizes = torch.zeros_like(numbers).scatter_add(1, numbers, (self.documents >= 0).long())
        return sizes.gather(1, numbers).clamp(min=1)

    def counted(self, step: int) -> torch.Tensor:
        """Rows of a step that count, [B, num_rows] bool."""
        rows = self.num_rows
        own = self.documents[:, :rows]
        reach = nn.functional.pad(self.documents, (0, step), value=-1)[:, 2 + step : 2 + step + rows]
        label = nn.functional.pad(self.labels, (0, step), value=IGNORE)[:, 2 + step : 2 + step + rows]
        return (own >= 0) & (own == reach) & (label != IGNORE)

    def visible(self, start: int, stop: int) -> torch.Tensor:
        """Columns 0 .. stop - 1 of step 0 that rows start .. stop - 1 see, [B, 1, rows, stop] bool."""
        columns = torch.arange(stop, device=self.documents.device)
        same = self.documents[:, start:stop, None] == self.documents[:, None, :stop]
        return (same & (columns <= columns[start:, None]))[:, None]


class EagleLoss(NamedTuple):
    """The loss of a head and what is shown of it, detached.

    Attributes:
        loss: Scalar.
        shown: [steps], what the papers call the loss of a step.
        means: [steps], mean terms that the loss is made of.
        acceptances: [steps], mean probability that a token drawn at a step is kept.
    """

    loss: torch.Tensor
    shown: torch.Tensor
    means: torch.Tensor
    acceptances: torch.Tensor


def eagle_loss(
    head: Any, features: torch.Tensor, batch: TrainingBatch, num_items: torch.Tensor | int | None = None
) -> EagleLoss:
    """The loss of a head, and the losses of its steps.

    Args:
        head: The `EagleHead`.
        features: What `head.fuse` made of the batch, [B, L, d].
        batch: The batch.
        num_items: Rows that count per step over all micro-batches, [steps] or one number; counted here if None.

    Returns:
        See `EagleLoss`.

    Raises:
        ValueError: Options that contradict the version, or `num_items` of another length.
    """
    options = head.loss_options.resolved(head.config.version)
    if not batch.num_rows:
        nothing = features.new_zeros(options.steps)
        return EagleLoss(features.sum() * 0.0, nothing, nothing, nothing)
    if options.noise and head.training:
        width = options.noise * 512 / batch.lengths[..., None]
        features = features + (torch.rand_like(features) - 0.5) * width.to(features)
    unrolled = _Unrolled(head, batch, options)
    sums, counts = unrolled.sums(features), unrolled.counts
    loss = pooled_loss(sums[:, 0], counts if num_items is None else num_items, options)
    return EagleLoss(loss, *(sums.detach() / counts.clamp(min=1)[:, None])[:, [1, 0, 2]].unbind(1))


def pooled_loss(sums: torch.Tensor, counts: torch.Tensor | int, options: LossOptions) -> torch.Tensor:
    """The loss on data of which only sums per step are known.

    Args:
        sums: [steps], summed terms.
        counts: Rows that count, [steps] or one number.
        options: Resolved options.
    """
    weights = options.decay ** torch.arange(options.steps, device=sums.device) if options.objective == "ttt" else 1.0
    return (sums / _divisors(counts, options.steps, sums.device) * weights).sum()


def rows_that_count(batch: TrainingBatch, options: LossOptions) -> torch.Tensor:
    """Rows of a batch that count per step, [steps] int64; the steps of HASS all have the rows of the first."""
    counts = torch.stack([batch.counted(step).sum() for step in range(options.steps)])
    return counts[:1].expand(len(counts)) if options.objective == "hass" else counts


def _divisors(counts: torch.Tensor | int, steps: int, device: torch.device) -> torch.Tensor:
    counts = torch.as_tensor(counts, device=device).flatten().float()
    if len(counts) not in (1, steps):
        raise ValueError(f"num_items_in_batch has {len(counts)} entries; give one number, or one for each of {steps}")
    return counts.clamp(min=1)


class _Unrolled:
    """A head that goes on from its own outputs over a whole batch.

    Args:
        head: The head.
        batch: The batch.
        options: Resolved options.
    """

    def __init__(self, head: Any, batch: TrainingBatch, options: LossOptions) -> None:
        self.head, self.batch, self.options = head, batch, options
        self.is_hass = options.objective == "hass"
        self.counted = [batch.counted(step) for step in range(options.steps)]
        documents = batch.documents
        starts = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        self.first = starts[:, : batch.num_rows]

    @property
    def counts(self) -> torch.Tensor:
        """Rows that count per step, [steps]."""
        return rows_that_count(self.batch, self.options)

    def sums(self, features: torch.Tensor) -> torch.Tensor:
        """Sums over rows of [loss, what is shown of it, acceptance], [steps, 3], from features of step 0 [B, L, d]."""
        batch, cache, rows = self.batch, DynamicCache(), self.batch.num_rows
        mask = None if batch.is_whole else batch.visible(0, rows)
        features = self._rows(features[:, :rows], 0, 0, mask, cache)
        sums = self._terms(features, 0, 0)[None]
        if self.options.steps > 1:
            columns = [states for layer in cache.layers for states in (layer.keys, layer.values)]
            blocks = range(0, rows, _BLOCK)
            later = [self._checkpointed(features, start, min(start + _BLOCK, rows), columns) for start in blocks]
            sums = torch.cat([sums, torch.stack(later).sum(0)])
        everywhere, at_first = sums.unbind(1)
        return everywhere + at_first.cumsum(0) - at_first if self.is_hass else everywhere

    def _checkpointed(self, features: torch.Tensor, start: int, stop: int, columns: list[torch.Tensor]) -> torch.Tensor:
        seen = [states[:, :, :stop] for states in columns]
        return checkpoint(self._later_steps, features[:, start:stop], start, *seen, use_reentrant=False)

    def _later_steps(self, features: torch.Tensor, start: int, *columns: torch.Tensor) -> torch.Tensor:
        """Sums of steps 1 on over a block of rows, [steps - 1, 2, 3].

        Args:
            features: What the block's rows of step 0 returned, [B, R, d].
            start: The block's first row.
            *columns: Keys and values of step 0 up to the block's end, layer by layer.
        """
        cache, size = DynamicCache(), features.shape[1]
        for layer in range(len(columns) // 2):
            cache.update(*columns[2 * layer : 2 * layer + 2], layer)
        mask = self.batch.visible(start, start + size)
        own = torch.eye(size, dtype=torch.bool, device=mask.device).expand(len(mask), 1, -1, -1)
        sums = []
        for step in range(1, self.options.steps):
            mask = torch.cat([mask, own], dim=-1)
            features = features.detach() if self.is_hass else features
            features = self._rows(features, start, step, mask, cache)
            sums.append(self._terms(features, start, step))
        return torch.stack(sums)

    def _rows(
        self, features: torch.Tensor, start: int, step: int, mask: torch.Tensor | None, cache: DynamicCache
    ) -> torch.Tensor:
        batch, stop = self.batch, start + features.shape[1]
        ids = batch.ahead(batch.input_ids, start, stop, 1 + step)
        return self.head.rows(features, ids, batch.positions[:, start:stop] + step, mask, cache)

    def _terms(self, features: torch.Tensor, start: int, step: int) -> torch.Tensor:
        """Sums of a step's terms over the rows of a block that count, and over a document's first rows, [2, 3]."""
        stop = start + features.shape[1]
        states = self.batch.ahead(self.batch.states, start, stop, 1 + step)
        labels = self.batch.ahead(self.batch.labels, start, stop, 2 + step)
        counted = self.counted[step][:, start:stop]
        chosen = torch.stack([counted, counted & self.first[:, start:stop]]).flatten(1).float()
        size = max(1, LOGITS_PER_CHUNK // self.head.config.vocab_size)
        rows = [values.flatten(0, 1).split(size) for values in (features, states, labels)]
        parts = zip(*rows, chosen.split(size, dim=1))
        return sum(checkpoint(self._summed, *part, use_reentrant=False) for part in parts)

    def _summed(
        self, features: torch.Tensor, states: torch.Tensor, labels: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        terms = cross_entropy_terms if self.options.objective == "ttt" else regression_terms
        states, labels = states.to(features.device), labels.to(features.device).clamp(min=0)
        return chosen @ terms(self.head, features, states, labels, self.options)


def cross_entropy_terms(
    head: Any, features: torch.Tensor, states: torch.Tensor, labels: torch.Tensor, options: LossOptions
) -> torch.Tensor:
    """EAGLE-3's term of rows: -sum_x p(x) log q(x), with p renormalised over the draft vocabulary.

    It is 0 where the backbone's likeliest token is not drafted. Of `"tv"` and LK losses, which are the acceptance
    itself, p is as it is: what is not drafted cannot be kept.

    Args:
        head: The head.
        features: What rows returned, [N, d].
        states: The backbone's last hidden states before the predicted tokens, [N, D].
        labels: [N] ids of the predicted tokens.
        options: `divergence` and `label_weight` are read.

    Returns:
        [N, 3] float32: the loss, the distribution's part of it, and the acceptance, detached.
    """
    with torch.no_grad():
        logits, ids = head.backbone_logits(states).float(), head.draft_ids
        drafted = torch.isin(logits.argmax(-1), ids)
        distribution = logits.log_softmax(-1)[:, ids]
    log_distribution = head.draft_logits(features).float().log_softmax(-1)
    kept = acceptance(distribution, log_distribution.detach())
    if options.divergence in ("cross_entropy", "kl", "reverse_kl"):
        distribution = distribution.log_softmax(-1)
    term = torch.where(drafted, divergence(options.divergence, distribution, log_distribution), 0.0)
    return torch.stack([_mixed(term, head, log_distribution, labels, options), term, kept], dim=-1)


def regression_terms(
    head: Any, features: torch.Tensor, states: torch.Tensor, labels: torch.Tensor, options: LossOptions
) -> torch.Tensor:
    """Terms of EAGLE-1 and HASS: smooth L1 distance of features, and of the distributions made from them.

    Args:
        head: The head.
        features: What rows returned, [N, d].
        states: The backbone's last hidden states in their place, [N, d].
        labels: [N] ids of the predicted tokens.
        options: `objective`, `divergence`, `label_weight`, `topk` and `topk_weight` are read.

    Returns:
        [N, 3] float32: the loss; for EAGLE-1 the distance of distributions alone, for HASS the loss; the acceptance,
        detached.
    """
    with torch.no_grad():
        distribution = head.backbone_logits(states).float().log_softmax(-1)
    log_distribution = head.draft_logits(features).float().log_softmax(-1)
    kept = acceptance(distribution, log_distribution.detach())
    distance = nn.functional.smooth_l1_loss(features.float(), states.float(), reduction="none").mean(-1)
    apart = divergence(options.divergence, distribution, log_distribution)
    loss = distance + _LAW_WEIGHT * _mixed(apart, head, log_distribution, labels, options)
    if options.objective == "eagle1":
        return torch.stack([loss, apart, kept], dim=-1)
    best, ids = distribution.exp().topk(min(options.topk, distribution.shape[-1]), dim=-1)
    loss = loss - options.topk_weight * (best * log_distribution.gather(-1, ids)).sum(-1)
    return torch.stack([loss, loss, kept], dim=-1)


def _mixed(
    apart: torch.Tensor, head: Any, log_distribution: torch.Tensor, labels: torch.Tensor, options: LossOptions
) -> torch.Tensor:
    """(1 - w) D(p, q) - w log q(label), [N]; a label that is not drafted adds nothing, as such rows of the distribution
    do."""
    share, ids = options.label_weight, head.draft_ids
    if not share:
        return apart
    places = torch.full((head.config.vocab_size,), -1, device=ids.device)
    places[ids] = torch.arange(len(ids), device=ids.device)
    place = places[labels]
    likelihood = log_distribution.gather(-1, place.clamp(min=0)[:, None])[:, 0]
    return (1 - share) * apart - share * torch.where(place >= 0, likelihood, 0.0)
