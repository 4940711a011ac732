"""Losses of an EAGLE head, which continues from its own outputs in training as it does while drafting.

Row t of step i reads the output of row t of step i - 1 and the embedding of token t + 1 + i, at position t + i. It sees
step 0 up to column t, and of every later step its own column, as a drafted row does. So each step is a call of
`head.rows` on a cache. EAGLE-3's training-time test (2503.01840, section 3.2) is all steps with gradients through them;
HASS (2408.15766) is the same with outputs detached between steps, and adds a document's first rows again in later
steps; EAGLE-1 is step 0 alone.

Memory: rows of the later steps see only step 0 of other rows, so they run block by block, and each block is recomputed
in backward; logits exist for one chunk of rows at a time. Neither grows with the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ...configuration.loss_options import ResolvedEagleOptions
from ..common.backbone_parts import BackboneParts
from ..common.chunks import LOGITS_PER_CHUNK
from ..common.outputs import EagleOutput
from ..common.teacher import acceptance, block_terms, divergence, logit_summaries, sequence_log_probs
from ..heads.losses import IGNORE
from .modules import EagleNetwork

Read = Callable[[Tensor, int, int], Tensor]
"""From features of rows [B, R, d], their first row and the step to tensors."""
_BLOCK = 128
"""Rows of a sequence in one block of the later steps."""
_DISTRIBUTION_WEIGHT = 0.1
"""Weight of the cross-entropy of distributions, relative to the regression of features (EAGLE-1, section 4.2)."""


@dataclass
class TrainingBatch:
    """A batch of sequences and the backbone's last hidden states.

    Attributes:
        input_ids: [B, L] int64.
        labels: [B, L] int64, -100 where a token is not a target.
        positions: [B, L] int64.
        documents: [B, L] int64, the number of each token's document; -1 for padding.
        states: [B, L, D], the backbone's last hidden states.
        is_whole: Every sequence is one document without padding.
        summaries: [B, L, 2], the `logit_summaries` of the states, where they are known already.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor
    states: Tensor
    is_whole: bool
    summaries: Tensor | None = None

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        states: Tensor,
        summaries: Tensor | None = None,
    ) -> TrainingBatch:
        """Return a batch from the arguments of a model's forward."""
        real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        is_whole, documents = mask is None and positions is None, torch.zeros_like(input_ids)
        if positions is None:
            positions = (real.long().cumsum(1) - 1).clamp(min=0)
        else:
            positions = positions.expand(input_ids.shape)
            documents = nn.functional.pad(positions[:, 1:] <= positions[:, :-1], (1, 0)).long().cumsum(1)
        documents = documents.masked_fill(~real, -1)
        return cls(input_ids, labels, positions, documents, states, is_whole, summaries)

    @property
    def num_rows(self) -> int:
        """Rows of step 0; the last two tokens have none, because no token follows their pair."""
        return max(self.input_ids.shape[1] - 2, 0)

    @property
    def following(self) -> Tensor:
        """The label of the token after each state, [B, L]; -100 where there is none."""
        return nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORE)

    def ahead(self, values: Tensor, start: int, stop: int, by: int) -> Tensor:
        """Return `values` [B, L, ..] `by` tokens after rows start .. stop - 1; the last one repeats beyond the end."""
        last = values.shape[1] - 1
        return values[:, torch.arange(start + by, stop + by, device=values.device).clamp(max=last)]

    @property
    def lengths(self) -> Tensor:
        """Length of every token's document, [B, L]; of padding any number above 0."""
        numbers = self.documents.clamp(min=0)
        sizes = torch.zeros_like(numbers).scatter_add(1, numbers, (self.documents >= 0).long())
        return sizes.gather(1, numbers).clamp(min=1)

    def counted(self, step: int) -> Tensor:
        """Return which rows of a step have a target, [B, num_rows] bool."""
        rows = self.num_rows
        document = self.documents[:, :rows]
        reach = nn.functional.pad(self.documents, (0, step), value=-1)[:, 2 + step : 2 + step + rows]
        label = nn.functional.pad(self.labels, (0, step), value=IGNORE)[:, 2 + step : 2 + step + rows]
        return (document >= 0) & (document == reach) & (label != IGNORE)

    def visible(self, start: int, stop: int) -> Tensor:
        """Return which columns 0 .. stop - 1 of step 0 rows start .. stop - 1 see, [B, 1, rows, stop] bool."""
        columns = torch.arange(stop, device=self.documents.device)
        same = self.documents[:, start:stop, None] == self.documents[:, None, :stop]
        return (same & (columns <= columns[start:, None]))[:, None]


def eagle_loss(
    head: EagleNetwork,
    features: Tensor,
    batch: TrainingBatch,
    options: ResolvedEagleOptions,
    num_items: Tensor | int | None = None,
) -> EagleOutput:
    """Return the loss of a head, and the losses of its steps.

    Args:
        head: The head.
        features: Result of `head.fuse` for the batch, [B, L, d].
        batch: The batch.
        options: How the loss is computed.
        num_items: Rows with targets per step over all micro-batches, [steps] or one number; None: those of the batch.
    """
    if not batch.num_rows:
        nothing = features.new_zeros(options.steps)
        return EagleOutput(loss=features.sum() * 0.0, step_losses=nothing, head_losses=nothing, acceptances=nothing)
    if options.noise and head.training:
        width = options.noise * 512 / batch.lengths[..., None]
        features = features + (torch.rand_like(features) - 0.5) * width.to(features)
    unrolled, counts = _Unrolled(head, batch, options), counts_per_step(batch, options)
    sums = (unrolled.block_sums if options.divergence == "block" else unrolled.sums)(features)
    loss = pooled_loss(sums[:, 0], counts if num_items is None else num_items, options)
    means, shown, accepted = (sums.detach() / counts.clamp(min=1)[:, None]).unbind(1)
    return EagleOutput(loss=loss, step_losses=shown, head_losses=means, acceptances=accepted)


def pooled_loss(sums: Tensor, counts: Tensor | int, options: ResolvedEagleOptions) -> Tensor:
    """Return the loss of data from summed terms [steps] and rows with targets, [steps] or one number."""
    is_block = options.divergence == "block"
    discounts = options.objective == "ttt" and not is_block
    weights = options.decay ** torch.arange(options.steps, device=sums.device) if discounts else 1.0
    counts = torch.as_tensor(counts, device=sums.device).flatten().float()
    if len(counts) not in (1, options.steps):
        raise ValueError(f"num_items_in_batch has {len(counts)} entries; give one number, or {options.steps}")
    if is_block:  # a mean over positions of what all steps accept
        counts = counts[:1]
    return (sums / counts.clamp(min=1) * weights).sum()


def counts_per_step(batch: TrainingBatch, options: ResolvedEagleOptions) -> Tensor:
    """Return the number of rows with a target per step, [steps] int64; all steps of HASS have those of the first."""
    counts = torch.stack([batch.counted(step).sum() for step in range(options.steps)])
    return counts[:1].expand(len(counts)) if options.objective == "hass" else counts


class _Unrolled:
    """A head that continues from its own outputs over a whole batch."""

    def __init__(self, head: EagleNetwork, batch: TrainingBatch, options: ResolvedEagleOptions) -> None:
        self.head, self.batch, self.options = head, batch, options
        self.is_hass = options.objective == "hass"
        self.counted = torch.stack([batch.counted(step) for step in range(options.steps)])
        self.counted_on_host = self.counted.cpu()  # an accelerator waits here, once for all steps and blocks
        documents = batch.documents
        starts = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        self.first = starts[:, : batch.num_rows]
        self.teacher = _hidden_by_part(head, batch)

    def sums(self, features: Tensor) -> Tensor:
        """Return sums over rows of [loss, shown loss, acceptance], [steps, 3], from features of step 0 [B, L, d]."""
        first, later = self._steps(features, self._terms)
        return self._with_first_rows(torch.cat([first[None], torch.stack(later).sum(0)]) if later else first[None])

    def block_sums(self, features: Tensor) -> Tensor:
        """Return `sums` of the block loss, which reads all steps of a row together; the acceptance is then m_k."""
        batch, rows, steps = self.batch, self.batch.num_rows, range(self.options.steps)
        first, later = self._steps(features, self._likelihoods)
        values = torch.cat([first[None], torch.cat(later, dim=-1)]) if later else first[None]  # [steps, 2, B, rows]
        log_q, others = values.unbind(1)
        following = batch.following
        log_p = sequence_log_probs(BackboneParts(self.head.backbone), batch.states, following)
        log_p = torch.stack([batch.ahead(log_p, 0, rows, 1 + step) for step in steps], -1)
        targets = torch.stack([batch.ahead(batch.labels, 0, rows, 2 + step) for step in steps], -1)
        counted = self.counted.permute(1, 2, 0)
        drafted = counted & torch.isin(targets, self.head.draft_ids)
        starts, share = self.counted[0] & (following[:, :rows] != IGNORE), self.options.label_weight
        both = block_terms(log_q.permute(1, 2, 0), log_p, drafted, starts, self.options.position_weighting, share)
        terms, accepted = (part.permute(2, 0, 1) for part in both)
        weight = 1.0 if self.options.objective == "ttt" else _DISTRIBUTION_WEIGHT
        chosen = torch.stack([counted, counted & self.first[..., None]]).permute(3, 0, 1, 2).float()
        others = self._with_first_rows((chosen * others[:, None]).sum((-2, -1))[..., None])[:, 0]
        learned = (chosen[:, 0] * terms).sum((-2, -1))
        return torch.stack([others + weight * learned, learned, (chosen[:, 0] * accepted).sum((-2, -1))], -1)

    def _with_first_rows(self, sums: Tensor) -> Tensor:
        """Return sums [steps, n] of sums everywhere and over first rows, [steps, 2, n]: HASS adds the latter again."""
        everywhere, at_first = sums.unbind(1)
        return everywhere + at_first.cumsum(0) - at_first if self.is_hass else everywhere

    def _steps(self, features: Tensor, read: Read) -> tuple[Tensor, list[Tensor]]:
        """Return what `read` makes of the rows of step 0, and of later steps block by block."""
        batch, cache, rows = self.batch, DynamicCache(), self.batch.num_rows
        mask = None if batch.is_whole else batch.visible(0, rows)
        features = self._rows(features[:, :rows], 0, 0, mask, cache)
        first = read(features, 0, 0)
        if self.options.steps == 1:
            return first, []
        layers = cast(list[CacheLayerMixin], cache.layers)
        columns = [cast(Tensor, states) for layer in layers for states in (layer.keys, layer.values)]
        later = []
        for start in range(0, rows, _BLOCK):
            stop = min(start + _BLOCK, rows)
            seen = [states[:, :, :stop] for states in columns]
            block = features[:, start:stop]
            later.append(checkpoint(self._later_steps, read, block, start, *seen, use_reentrant=False))
        return first, cast(list[Tensor], later)

    def _later_steps(self, read: Read, features: Tensor, start: int, *columns: Tensor) -> Tensor:
        """Return what `read` makes of steps 1 on of a block of rows, [steps - 1, ...].

        `features` [B, R, d] are the outputs of the block's rows of step 0, the first of which is `start`; `columns` are
        the keys and values of step 0 up to the block's end, layer by layer.
        """
        cache, size = DynamicCache(), features.shape[1]
        for layer in range(len(columns) // 2):
            cache.update(columns[2 * layer], columns[2 * layer + 1], layer)
        mask = self.batch.visible(start, start + size)
        diagonal = torch.eye(size, dtype=torch.bool, device=mask.device).expand(len(mask), 1, -1, -1)
        results = []
        for step in range(1, self.options.steps):
            mask = torch.cat([mask, diagonal], dim=-1)
            features = features.detach() if self.is_hass else features
            features = self._rows(features, start, step, mask, cache)
            results.append(read(features, start, step))
        return torch.stack(results)

    def _rows(self, features: Tensor, start: int, step: int, mask: Tensor | None, cache: DynamicCache) -> Tensor:
        batch, stop = self.batch, start + features.shape[1]
        ids = batch.ahead(batch.input_ids, start, stop, 1 + step)
        return self.head.rows(features, ids, batch.positions[:, start:stop] + step, mask, cache)

    def _terms(self, features: Tensor, start: int, step: int) -> Tensor:
        """Return sums of a step's terms over a block's rows with targets, and over first rows of documents, [2, 3]."""
        stop = start + features.shape[1]
        rows = self._counted_rows(start, stop, step)
        first = self.first[:, start:stop].flatten()[rows.to(self.first.device)]
        chosen = torch.stack([torch.ones_like(first), first]).float()
        parts = zip(self._chunks(features, start, step, rows), chosen.split(self._size, dim=1))
        sums = [checkpoint(self._summed, *part, weights, use_reentrant=False) for part, weights in parts]
        return torch.stack(cast(list[Tensor], sums)).sum(0)

    def _likelihoods(self, features: Tensor, start: int, step: int) -> Tensor:
        """Return log q of a block's targets, 0 for tokens that are not drafted, and its terms besides, [2, B, R]."""
        rows = self._counted_rows(start, start + features.shape[1], step)
        parts = self._chunks(features, start, step, rows)
        chunks = [checkpoint(row_likelihoods, self.head, *part, self.options, use_reentrant=False) for part in parts]
        found = torch.cat(cast(list[Tensor], chunks), -1)
        whole = found.new_zeros(2, features.shape[:2].numel()).index_copy(1, rows.to(found.device), found)
        return whole.view(2, *features.shape[:2])

    def _counted_rows(self, start: int, stop: int, step: int) -> Tensor:
        """Return the indices of the rows with a target among those of a block, [B * (stop - start)] at most.

        The others, such as prompts, need no logits.
        """
        return self.counted_on_host[step, :, start:stop].flatten().nonzero()[:, 0]

    @property
    def _size(self) -> int:
        columns = self.head.draft_size if self.teacher.shape[-1] else self.head.config.vocab_size
        return max(1, LOGITS_PER_CHUNK // columns)

    def _chunks(self, features: Tensor, start: int, step: int, rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield features, states, labels and what `_hidden_by_part` says of some of the rows, [N, ..] each."""
        stop = start + features.shape[1]
        states, teacher = (
            self.batch.ahead(each, start, stop, 1 + step).to(features.device)
            for each in (self.batch.states, self.teacher)
        )
        labels = self.batch.ahead(self.batch.labels, start, stop, 2 + step)
        inputs = (features, states, labels.to(features.device), teacher)
        yield from zip(*(values.flatten(0, 1)[rows.to(values.device)].split(self._size) for values in inputs))

    def _summed(self, features: Tensor, states: Tensor, labels: Tensor, teacher: Tensor, chosen: Tensor) -> Tensor:
        return chosen @ row_terms(self.head, features, states, labels, teacher, self.options)


def _hidden_by_part(head: EagleNetwork, batch: TrainingBatch) -> Tensor:
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


def row_terms(
    head: EagleNetwork, features: Tensor, states: Tensor, labels: Tensor, teacher: Tensor, options: ResolvedEagleOptions
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
        states: The backbone's last hidden states before the predicted tokens, [N, D].
        labels: [N] ids of the predicted tokens.
        teacher: Rows of `_hidden_by_part`, [N, 2] or [N, 0].
        options: How the loss is computed.
    """
    ids, is_ttt = head.draft_ids, options.objective == "ttt"
    is_part = is_ttt or head.offsets is not None
    with torch.no_grad():
        logits = head.backbone_logits(states, only_drafted=bool(teacher.shape[-1])).float()
        if teacher.shape[-1]:
            log_p, is_known = logits - teacher[:, :1], teacher[:, 1] > 0
        else:
            log_p, is_known = logits.log_softmax(-1), torch.isin(logits.argmax(-1), ids)
            log_p = log_p[:, ids] if is_part else log_p
    log_q = head.draft_logits(features).float().log_softmax(-1)
    accepted, share = acceptance(log_p, log_q.detach()), options.label_weight
    if is_part and options.divergence in ("cross_entropy", "kl", "reverse_kl"):
        log_p = log_p.log_softmax(-1)
    distance = divergence(options.divergence, log_p, log_q)
    distance = torch.where(is_known, distance, 0.0) if is_part else distance
    # a label outside the draft vocabulary has no likelihood
    mixed = (1 - share) * distance - share * _of_labels(log_q, labels, ids) if share else distance
    if is_ttt:
        return torch.stack([mixed, distance, accepted], dim=-1)
    loss = _regression(features, states) + _DISTRIBUTION_WEIGHT * mixed
    if options.objective == "eagle1":
        return torch.stack([loss, distance, accepted], dim=-1)
    loss = loss - _likeliest_again(log_p, log_q, options)
    return torch.stack([loss, loss, accepted], dim=-1)


def row_likelihoods(
    head: EagleNetwork, features: Tensor, states: Tensor, labels: Tensor, teacher: Tensor, options: ResolvedEagleOptions
) -> Tensor:
    """Return log q of the labels of rows, 0 where they are not drafted, and what the loss has besides, [2, N] float32.

    Arguments as for `row_terms`. That is the regression of version 1, and of HASS the likeliest tokens.
    """
    log_q = head.draft_logits(features).float().log_softmax(-1)
    likelihood = _of_labels(log_q, labels, head.draft_ids)
    if options.objective == "ttt":
        return torch.stack([likelihood, torch.zeros_like(likelihood)])
    others = _regression(features, states)
    if options.objective == "hass":
        with torch.no_grad():
            log_p = head.backbone_logits(states, only_drafted=head.offsets is not None).float().log_softmax(-1)
        others = others - _likeliest_again(log_p, log_q, options)
    return torch.stack([likelihood, others])


def _likeliest_again(log_p: Tensor, log_q: Tensor, options: ResolvedEagleOptions) -> Tensor:
    best, likeliest = log_p.exp().topk(min(options.topk, log_p.shape[-1]), dim=-1)
    return options.topk_weight * (best * log_q.gather(-1, likeliest)).sum(-1)


def _of_labels(log_q: Tensor, labels: Tensor, ids: Tensor) -> Tensor:
    return torch.where(labels[:, None] == ids, log_q, 0.0).sum(-1)


def _regression(features: Tensor, states: Tensor) -> Tensor:
    return nn.functional.smooth_l1_loss(features.float(), states.float(), reduction="none").mean(-1)
