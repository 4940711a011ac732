"""Losses of an EAGLE head, which continues from its own outputs in training as it does while drafting.

EAGLE-3 (2503.01840, section 3.2) is all steps with gradients through them; HASS (2408.15766) detaches outputs between
steps, and adds a document's first rows again in later ones; EAGLE-1 is step 0 alone.

Row t of step i reads the output of row t of step i - 1 and the embedding of token t + 1 + i, at position t + i; of a
P-EAGLE head, from step 1 on, the features and the token of rows that know nothing. It sees step 0 up to column t and
its own column of later steps, as a drafted row does: so rows of later steps run block by block on a cache.

Memory grows with neither steps nor vocabulary: outputs and columns of step 0 are leaves of every block's graph, whose
gradients are made at once and go through step 0 in the end. Logits exist for a chunk of rows, the teacher's once per
block. The block loss reads all steps of a row together: later steps run once more for it, see `block_slopes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ...configuration.loss_options import ResolvedEagleOptions
from ...generation.backbone.wrapped_models import gather
from ...generation.tensors.masks import by_documents
from ..common.backbone_parts import BackboneParts
from ..common.chunks import LOGITS_PER_CHUNK, Made, add_product, made_in_forward, new_total
from ..common.learning import numbered
from ..common.outputs import EagleOutput
from ..common.teacher import acceptance, block_slopes, divergence, logit_summaries, sequence_log_probs
from ..heads.losses import IGNORE
from .modules import EagleNetwork, Masks

BLOCK = 128  # rows of a sequence in one block of the later steps
DISTRIBUTION_WEIGHT = 0.1  # of the distance of distributions, beside the regression of features (EAGLE-1, section 4.2)


@dataclass
class TrainingBatch:
    """A batch of sequences: which rows have a target in a step, what they see."""

    input_ids: Tensor  # [B, L] int64
    labels: Tensor  # [B, L] int64, -100 where a token is not a target
    positions: Tensor  # [B, L] int64
    documents: Tensor  # [B, L] int64, the number of each token's document; -1 for padding
    states: Tensor  # [B, L, D], the backbone's last hidden states
    is_whole: bool  # every sequence is one document without padding
    summaries: Tensor | None = None  # [B, L, 2], the `logit_summaries` of the states
    kept: Tensor | None = None  # [steps, rows] bool, rows that count, which counted in the step before

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
        is_whole = mask is None and positions is None
        return cls(input_ids, labels, *numbered(input_ids, mask, positions), states, is_whole, summaries)

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

    def counted(self, step: int) -> Tensor:
        """Return which rows of a step have a target, [B, num_rows] bool."""
        rows = self.num_rows
        document = self.documents[:, :rows]
        reach = nn.functional.pad(self.documents, (0, step), value=-1)[:, 2 + step : 2 + step + rows]
        label = nn.functional.pad(self.labels, (0, step), value=IGNORE)[:, 2 + step : 2 + step + rows]
        found = (document >= 0) & (document == reach) & (label != IGNORE)
        return found if self.kept is None else found & self.kept[step]

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
    num_items: Tensor | None = None,
) -> EagleOutput:
    """Return the loss of a head, and of its steps, from the features [B, L, d] that `head.fuse` makes.

    `num_items` [steps] are the rows with targets over all micro-batches; None: those of the batch.
    """
    if options.noise and head.training:
        numbers = batch.documents.clamp(min=0)
        sizes = torch.zeros_like(numbers).scatter_add(1, numbers, (batch.documents >= 0).long())
        width = options.noise * 512 / sizes.gather(1, numbers).clamp(min=1)[..., None]
        features = features + (torch.rand_like(features) - 0.5) * width.to(features)
    counts = counts_per_step(batch, options)
    weights = step_weights(counts if num_items is None else num_items, options, features)
    if head.training and head.config.mask_token_id is not None:
        shares, every = options.kept ** torch.arange(options.steps, device=batch.states.device), counts  # [S]
        chance = torch.rand(batch.num_rows, device=batch.states.device)  # a row that runs has run in all steps before
        batch = replace(batch, kept=chance < shares.clamp(min=options.least_kept)[:, None])
        counts = counts_per_step(batch, options)
        weights = weights * every / counts.clamp(min=1)  # rows that are left stand for all
    gather(head.modules())
    steps = Steps(head, batch, options, weights, features)
    loss, (sums,) = made_in_forward(steps.made, [features, *steps.parameters])
    means, shown, accepted = (sums.detach() / counts.clamp(min=1)[:, None]).unbind(1)
    return EagleOutput(loss=loss, step_losses=shown, head_losses=means, acceptances=accepted)


def step_weights(counts: Tensor, options: ResolvedEagleOptions, like: Tensor) -> Tensor:
    """Return the factors of the summed terms of all steps in the loss, [steps], at least float32; counts [steps]."""
    counts = counts.to(like.device, torch.promote_types(like.dtype, torch.float32))
    decay = options.decay if options.objective == "ttt" else 1.0
    if options.divergence == "block":  # a mean over positions of what all steps accept
        counts, decay = counts[:1], 1.0
    return decay ** torch.arange(options.steps, device=like.device, dtype=counts.dtype) / counts.clamp(min=1)


def counts_per_step(batch: TrainingBatch, options: ResolvedEagleOptions) -> Tensor:
    """Return the number of rows with a target per step, [steps] int64; all steps of HASS have those of the first."""
    counts = torch.stack([batch.counted(step).sum() for step in range(options.steps)])
    return counts[:1].expand(len(counts)) if options.objective == "hass" else counts


class Teacher(NamedTuple):
    """What the backbone says of the tokens that N rows predict; `row_terms` reads neither `mass` nor `entropy`."""

    states: Tensor  # [N, D], the backbone's last hidden states before the predicted tokens
    p: Tensor  # [N, Vd], probabilities of drafted tokens among all; their logarithms for `row_terms`
    is_known: Tensor  # [N] bool, whether the likeliest token is drafted
    mass: Tensor  # [N], sums of p
    entropy: Tensor  # [N] in nats, of p renormalised


@torch.no_grad()
def teacher_rows(head: EagleNetwork, states: Tensor, summaries: Tensor, by_products: bool) -> Teacher:
    """Return what is said at states [N, D], with rows of `draft_summaries`, [N, 2] or [N, 0]."""
    logits = head.backbone_logits(states, only_drafted=bool(summaries.shape[-1]))  # [N, Vd] or [N, V]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if summaries.shape[-1]:
        log_p, is_known = logits - summaries[:, :1].to(logits), summaries[:, 1] > 0
    else:
        log_p, is_known = logits.log_softmax(-1), torch.ones_like(logits[:, 0], dtype=torch.bool)
    if not by_products:
        return Teacher(states, log_p, is_known, states[:, 0], states[:, 0])
    p = log_p.exp_()
    mass = p.sum(-1).clamp(min=torch.finfo(p.dtype).tiny)
    return Teacher(states, p, is_known, mass, mass.log() - torch.xlogy(p, p).sum(-1) / mass)


def draft_summaries(head: EagleNetwork, batch: TrainingBatch) -> Tensor:
    """Return what a loss reads of the backbone's logits besides those of drafted tokens, once for all steps.

    [B, L, 2]: their logsumexp, and whether the likeliest token is drafted, before targets; [B, L, 0] where all are.
    """
    part, summaries = head.draft_vocabulary, batch.summaries
    if part is None:
        return batch.states[..., :0]
    if summaries is None:
        summaries = logit_summaries(BackboneParts(head.backbone), batch.states, batch.following != IGNORE)
    totals, likeliest = summaries.unbind(-1)
    return torch.stack([totals, (part.columns(likeliest.long(), -1) >= 0).to(totals)], -1)


def row_terms(
    head: EagleNetwork,
    features: Tensor,
    columns: Tensor,
    teacher: Teacher,
    options: ResolvedEagleOptions,
    known: Tensor | None = None,
) -> Tensor:
    """Return the terms of rows, [N, 3] float32: the loss, its reported part, and the detached acceptance.

    `"ttt"` (EAGLE-3): -sum_x p(x) log q(x), with p renormalised over the draft vocabulary (but for `"tv"` and LK, which
    are the acceptance itself); 0 where the backbone's likeliest token is not in it. `"eagle1"`: smooth L1 distance of
    features, and a small multiple of the distance of distributions, which alone is reported. `"hass"`: the same, with
    the likeliest tokens a second time. Rows have outputs [N, d] and columns [N] of the draft vocabulary, -1 for others;
    `known` [N, 3] are `block_slopes` of the block loss.
    """
    is_ttt, log_p, share = options.objective == "ttt", teacher.p, options.label_weight
    is_part = is_ttt or head.offsets is not None
    logits = head.draft_logits(features)
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    if known is not None:
        distance, slope, accepted = known.to(log_q).unbind(-1)
        likelihood, log_p = _of_columns(log_q, columns), log_p.log_softmax(-1)
        mixed = distance + slope * (likelihood - likelihood.detach())
    else:
        accepted = acceptance(log_p, log_q.detach())
        if is_part and options.divergence in ("cross_entropy", "kl", "reverse_kl"):
            log_p = log_p.log_softmax(-1)
        distance = divergence(options.divergence, log_p, log_q)
        distance = torch.where(teacher.is_known, distance, 0.0) if is_part else distance
        # a token outside the draft vocabulary has no likelihood
        mixed = (1 - share) * distance - share * _of_columns(log_q, columns) if share else distance
    if is_ttt:
        return torch.stack([mixed, distance, accepted], dim=-1)
    wide = torch.promote_types(features.dtype, torch.float32)
    regression = nn.functional.smooth_l1_loss(features.to(wide), teacher.states.to(wide), reduction="none").mean(-1)
    loss = regression + DISTRIBUTION_WEIGHT * mixed
    if options.objective == "hass":
        best, likeliest = log_p.exp().topk(min(options.topk, log_p.shape[-1]), dim=-1)
        loss = loss - options.topk_weight * (best * log_q.gather(-1, likeliest)).sum(-1)
    reported = loss if options.objective == "hass" and known is None else distance
    return torch.stack([loss, reported, accepted], dim=-1)


def _of_columns(log_q: Tensor, columns: Tensor) -> Tensor:
    return torch.where(columns >= 0, log_q.gather(-1, columns.clamp(min=0)[:, None])[:, 0], 0.0)


def has_products(head: EagleNetwork, options: ResolvedEagleOptions) -> bool:
    """Return whether `product_terms` computes the head's loss: a plain unembedding, and a divergence that it knows."""
    if options.objective != "ttt" or options.divergence not in ("cross_entropy", "kl"):
        return False
    unembedding = head.lm_head  # adapters and quantization have another type; hooks must see its calls
    return type(unembedding) is nn.Linear and not (unembedding._forward_hooks or unembedding._backward_hooks)


@torch.no_grad()
def product_terms(
    head: EagleNetwork,
    normed: Tensor,
    columns: Tensor,
    teacher: Teacher,
    options: ResolvedEagleOptions,
    weights: Tensor,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the terms of rows as `row_terms` does, [N, 3], and the gradient [N, d] of their normed features [N, d].

    Without autograd: with logits W z, z = norm(x), and w of `weights` [N], the loss w D(p, q) has the gradient
    g = w (q - p) of the logits; that of z is g W, and that of W is g^T z, which is added to `total` [Vd, d] in place.
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


class Steps:
    """The sums of all steps of a head over a batch, and their gradients; `weights` [S] are factors of the sums."""

    known: Tensor | None = None  # [S, B, rows, 3] of the block loss
    summaries: Tensor | None = None  # [B, L, 2], what `draft_summaries` returns
    learns = False

    def __init__(
        self, head: EagleNetwork, batch: TrainingBatch, options: ResolvedEagleOptions, weights: Tensor, features: Tensor
    ) -> None:
        self.head, self.batch, self.options, self.features = head, batch, options, features
        self.parameters: list[Tensor] = [each for each in head.parameters() if each.requires_grad]
        self.totals: dict[Tensor, Tensor] = {}
        self.counted = torch.stack([batch.counted(step) for step in range(options.steps)])  # [S, B, rows]
        self.counted_on_host = self.counted.cpu()  # an accelerator waits here, once for all steps and blocks
        changes = batch.documents[:, 1:] != batch.documents[:, :-1]
        self.first = nn.functional.pad(changes, (1, 0), value=True)[:, : batch.num_rows]
        places = torch.where(self.first, torch.arange(batch.num_rows, device=changes.device), 0)  # [B, rows]
        self.lowest: list[int] = places.cummax(1).values.amin(0).tolist()  # first column that any row sees, by row
        part = head.draft_vocabulary
        self.columns = batch.labels if part is None else part.columns(batch.labels, -1)  # [B, L]
        self.size = max(1, LOGITS_PER_CHUNK // head.draft_size)  # rows whose logits exist at a time
        self.has_products = has_products(head, options)
        self.weights = weights.to(features.device)
        self.scale = self.weights.max()
        shares = self.weights / self.scale.clamp(min=torch.finfo(weights.dtype).tiny)
        is_hass = options.objective == "hass"
        again = shares.flip(0).cumsum(0).flip(0) - shares if is_hass else torch.zeros_like(shares)
        self.shares = torch.stack([shares, again], 1)  # [S, 2]: of every row, and besides of first rows

    def first_step(self, features: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs of step 0 [B, rows, d], and its keys and values [B, H, rows, D], layer by layer."""
        batch, cache, rows = self.batch, DynamicCache(), self.batch.num_rows
        positions = batch.positions[:, :rows]
        masks = None if batch.is_whole else self._masks(batch.visible(0, rows), positions, positions)
        if masks and len(batch.input_ids) == 1:
            masks = {kind: by_documents(mask) for kind, mask in masks.items()}
        outputs = self.step(features, 0, 0, masks, cache)
        layers = cast(list[CacheLayerMixin], cache.layers)
        return outputs, [cast(Tensor, states) for layer in layers for states in (layer.keys, layer.values)]

    def later_steps(self, features: Tensor, start: int, columns: list[Tensor]) -> Iterator[Tensor]:
        """Yield the outputs [B, R, d] of steps 1, 2, ... of rows from `start` on, from those of step 0, and its keys
        and values from `lowest` to the block's end, layer by layer."""
        cache, size = DynamicCache(), features.shape[1]
        for layer in range(len(columns) // 2):
            cache.update(columns[2 * layer], columns[2 * layer + 1], layer)
        mask = self.batch.visible(start, start + size)[..., self.lowest[start] :]
        places = self.batch.positions[:, self.lowest[start] : start + size]  # [B, columns]
        if self.head.config.mask_token_id is not None:
            yield from self._masked_steps(features, start, mask, places, cache)
            return
        diagonal = torch.eye(size, dtype=torch.bool, device=mask.device).expand(len(mask), 1, -1, -1)
        for step in range(1, self.options.steps):
            mask = torch.cat([mask, diagonal], dim=-1)  # [B, 1, R, stop - lowest + step R]
            positions = self.batch.positions[:, start : start + size] + step
            places = torch.cat([places, positions], 1)
            features = features.detach() if self.options.objective == "hass" else features
            features = self.step(features, start, step, self._masks(mask, positions, places), cache)
            yield features

    def _masks(self, seen: Tensor, rows: Tensor, columns: Tensor) -> dict[str, Tensor]:
        """Return what rows at positions [B, R] see, by kind of layer, of `seen` [B, 1, R, C] at positions [B, C]."""
        windows = self.head.windows
        masks = dict.fromkeys(windows, seen)
        if (window := windows.get("sliding_attention")) is not None:
            masks["sliding_attention"] = seen & (rows[:, :, None] - columns[:, None] < window)[:, None]
        return masks

    def _masked_steps(
        self, features: Tensor, start: int, mask: Tensor, places: Tensor, cache: DynamicCache
    ) -> Iterator[Tensor]:
        """Yield the outputs [B, R, d] of steps 1, 2, ... of rows that know nothing; 0 for those that do not count."""
        kept, ran = self.batch.kept, list[Tensor]()
        for step in range(1, self.options.steps):
            rows = torch.arange(features.shape[1], device=features.device)
            rows = rows if kept is None else rows[kept[step, start : start + len(rows)].to(rows.device)]  # [n]
            outputs = torch.zeros_like(features.detach())
            if len(rows):
                ran.append(rows)
                own = torch.cat([rows[:, None] == each for each in ran], 1).expand(len(mask), 1, -1, -1)
                positions = self.batch.positions[:, start + rows] + step
                seen = torch.cat([mask[:, :, rows], own.to(mask.device)], -1)  # [B, 1, n, columns]
                places = torch.cat([places, positions], 1)
                unknown, ids = self.head.masked(len(features), len(rows))
                embeddings, masks = self.head.embedding()(ids), self._masks(seen, positions, places)
                found = self.head.run(unknown, embeddings, positions, masks, cache)
                outputs = outputs.index_copy(1, rows, found)
            yield outputs

    def step(self, features: Tensor, start: int, step: int, masks: Masks, cache: DynamicCache) -> Tensor:
        """Run a step of the rows from `start` on, and return their outputs [B, R, d]."""
        batch, stop = self.batch, start + features.shape[1]
        ids = batch.ahead(batch.input_ids, start, stop, 1 + step)
        positions, embeddings = batch.positions[:, start:stop] + step, self.head.embedding()(ids)
        return self.head.run(features, embeddings, positions, masks, cache)

    @torch.no_grad()
    def _slopes(self, roots: list[Tensor]) -> Tensor:
        """Return the `block_slopes` of all steps, [S, B, rows, 3], from outputs of step 0, its keys and values."""
        batch, rows, steps = self.batch, self.batch.num_rows, range(self.options.steps)
        log_q = self.weights.new_zeros(self.counted.shape)  # [S, B, rows]
        for start, stop in self._blocks():
            first, *columns = self._part(roots, start, stop)
            for step, features in enumerate(chain([first], self.later_steps(first, start, columns))):
                for at, drafted, _ in self._chunks(features, start, step):
                    q = self.head.draft_logits(features.flatten(0, 1)[at]).to(log_q.dtype).log_softmax(-1)
                    log_q[step, at // (stop - start), start + at % (stop - start)] = _of_columns(q, drafted)
        following = batch.following
        log_p = sequence_log_probs(BackboneParts(self.head.backbone), batch.states, following)
        log_p = torch.stack([batch.ahead(log_p, 0, rows, 1 + step) for step in steps], -1)
        targets = torch.stack([batch.ahead(self.columns, 0, rows, 2 + step) for step in steps], -1)
        starts, counted = self.counted[0] & (following[:, :rows] != IGNORE), self.counted.permute(1, 2, 0)
        weighing = self.options.position_weighting, self.options.label_weight
        found = block_slopes(log_q.permute(1, 2, 0), log_p, counted & (targets >= 0), starts, *weighing)
        found = found.permute(2, 0, 1, 3)
        share, again = self.shares[:, :, None, None].unbind(1)  # [S, 1, 1] each; HASS does not add these terms again
        found[..., 1] *= share / (share + again * self.first).clamp(min=torch.finfo(share.dtype).tiny)
        return found

    def made(self, needed: list[bool]) -> Made:
        """Return the loss, its sums, and the gradients of the features and of the parameters."""
        batch, self.learns = self.batch, any(needed)
        features = self.features[:, : batch.num_rows].detach().requires_grad_(needed[0])
        into_features = features.detach() if needed[0] else None
        sums = self.weights.new_zeros(self.options.steps, 2, 3)
        if batch.num_rows:
            with torch.set_grad_enabled(self.learns):
                outputs, columns = self.first_step(features)
            roots = [outputs, *columns] if self.options.steps > 1 else [outputs]
            totals = [torch.zeros_like(root) if root.requires_grad else None for root in roots]
            self.known = self._slopes(roots) if self.options.divergence == "block" else None
            for start, stop in self._blocks():
                self._block(start, stop, roots, totals, sums)
            (into_features,) = self._backward(roots, totals, [features] if needed[0] else [None])
        if into_features is not None:  # the last two tokens have no row
            into_features = nn.functional.pad(into_features, (0, 0, 0, self.features.shape[1] - batch.num_rows))
        sums, at_first = sums.unbind(1)  # [S, 3] each; HASS adds the latter again in later steps
        if self.options.objective == "hass":
            again = at_first.cumsum(0) - at_first
            if self.known is not None:
                again = (again[:, :1] - DISTRIBUTION_WEIGHT * again[:, 1:2]) * again.new_tensor([1, 0, 0])
            sums = sums + again
        # zeros where nothing is scored: processes that share parameters must all have a gradient
        learned = [self._total(each).to(each.dtype) if self.learns else None for each in self.parameters]
        return Made((self.weights * sums[:, 0]).sum(), [sums], [into_features, *learned], self.scale)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each block and the one behind its last; blocks without a target are left out."""
        is_counted = self.counted_on_host.flatten(0, 1).any(0)  # [rows]
        size = max(1, min(BLOCK, self.size // len(self.batch.input_ids)))
        found = is_counted.nonzero()[:, 0].tolist()
        for start in range(found[0], found[-1] + 1, size) if found else ():
            stop = min(start + size, found[-1] + 1)
            if is_counted[start:stop].any():
                yield start, stop

    def _part(self, roots: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
        """Return outputs of a block's rows, and the keys and values that it sees, of those of all rows."""
        seen = slice(self.lowest[start], stop)
        return [root[:, start:stop] if root.dim() == 3 else root[:, :, seen] for root in roots]

    def _block(self, start: int, stop: int, roots: list[Tensor], totals: list[Tensor | None], sums: Tensor) -> None:
        """Add the terms of all steps of a block of rows to `sums` [S, 2, 3], and their gradients to the totals."""
        leaves = [part.detach().requires_grad_(part.requires_grad) for part in self._part(roots, start, stop)]
        teacher = self._teacher(start, stop)
        found, into_outputs = self._terms(leaves[0], start, 0, teacher)
        sums[0] += found
        outputs, gradients = [], []
        with torch.set_grad_enabled(self.learns):
            for step, features in enumerate(self.later_steps(leaves[0], start, leaves[1:]), 1):
                found, gradient = self._terms(features, start, step, teacher)
                sums[step] += found
                outputs.append(features)
                gradients.append(gradient)
        into_leaves = self._backward(outputs, gradients, [leaf if leaf.requires_grad else None for leaf in leaves])
        for gradient, total in zip([*into_leaves, into_outputs], [*totals, totals[0]]):
            if total is not None and gradient is not None:
                self._part([total], start, stop)[0].add_(gradient)

    def _teacher(self, start: int, stop: int) -> tuple[Teacher, Tensor]:
        """Return what all steps of a block learn, and where step i of row t finds it: at [b, t - start + i]."""
        batch, counted = self.batch, self.counted_on_host[:, :, start:stop]
        is_read = counted.new_zeros(counted.shape[1], stop - start + len(counted) - 1)  # [B, R + S - 1]
        for step, each in enumerate(counted):
            is_read[:, step : step + each.shape[1]] |= each
        rows = is_read.flatten().nonzero()[:, 0]
        where = is_read.flatten().long().cumsum(0).sub(1).view_as(is_read)

        def read(values: Tensor) -> Tensor:
            ahead = batch.ahead(values, start, start + is_read.shape[1], 1)
            return ahead.flatten(0, 1)[rows.to(values.device)].to(self.features.device)

        if self.summaries is None:
            self.summaries = draft_summaries(self.head, batch)
        states, summaries = read(batch.states), read(self.summaries)
        if self.known is not None and self.options.objective != "hass":  # the loss reads no distribution
            return Teacher(states, *[states[:, :1]] * 4), where
        parts = zip(states.split(self.size), summaries.split(self.size))
        read_rows = [teacher_rows(self.head, *part, self.has_products) for part in parts]
        return Teacher(*map(torch.cat, zip(*read_rows))), where

    def _chunks(self, features: Tensor, start: int, step: int, *more: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rows [N] of a block [B, R, d] that count in a step, their draft columns, whether they are first
        ones of documents, and what more [B, R, ..] there is of them."""
        stop = start + features.shape[1]
        rows = self.counted_on_host[step, :, start:stop].flatten().nonzero()[:, 0]
        columns = self.batch.ahead(self.columns, start, stop, 2 + step)
        parts = [part.flatten(0, 1)[rows.to(part.device)] for part in (columns, self.first[:, start:stop], *more)]
        yield from zip(*(part.to(features.device).split(self.size) for part in (rows, *parts)))

    def _terms(
        self, features: Tensor, start: int, step: int, teacher: tuple[Teacher, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return a step's sums over a block's rows with targets and over first rows of documents, [2, 3], and the
        gradient of the features [B, R, d], or None."""
        (learned, where), width = teacher, features.shape[1]
        more = [where[:, step : step + width]]
        if self.known is not None:
            more.append(self.known[step, :, start : start + width])
        flat = features.detach().flatten(0, 1)
        into = torch.zeros_like(flat) if features.requires_grad else None
        sums = self.weights.new_zeros(2, 3)
        for rows, columns, first, places, *known in self._chunks(features, start, step, *more):
            chosen = torch.stack([torch.ones_like(first), first]).to(sums)  # [2, N]
            chunk = flat[rows].requires_grad_(features.requires_grad)
            part = Teacher(*(values.index_select(0, places) for values in learned))
            terms, gradient = self._chunk(chunk, columns, part, self.shares[step] @ chosen, *known)
            sums += chosen @ terms.to(sums)
            if into is not None and gradient is not None:
                into.index_copy_(0, rows, gradient.to(into.dtype))
        return sums, None if into is None else into.view_as(features)

    def _chunk(
        self, features: Tensor, columns: Tensor, teacher: Teacher, weights: Tensor, known: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the terms of rows [N, 3] and the gradient of their features, both by `weights` [N]."""
        head, options = self.head, self.options
        if not self.has_products:
            with torch.set_grad_enabled(self.learns):
                terms = row_terms(head, features, columns, teacher, options, known)
                loss = (terms[:, 0] * weights.to(terms)).sum()
            return terms.detach(), self._backward([loss], [None], [features])[0]
        unembedding, is_normed = head.lm_head.weight, head.config.norm_output
        total = self._total(unembedding) if self.learns and unembedding.requires_grad else None
        with torch.set_grad_enabled(self.learns):
            normed = features if is_normed else head.norm(features)
        terms, gradient = product_terms(head, normed, columns, teacher, options, weights.to(teacher.p), total)
        if is_normed or not self.learns:
            return terms, gradient
        return terms, self._backward([normed], [gradient.to(normed.dtype)], [features])[0]

    def _backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs, and add those of the parameters to the totals."""
        pairs = [(root, each) for root, each in zip(roots, gradients) if root.requires_grad]
        wanted = [each for each in inputs if each is not None and each.requires_grad]
        if not (pairs and self.learns):
            return [None] * len(inputs)
        with torch.autocast(self.features.device.type, enabled=False):
            outputs, into_outputs = zip(*pairs)
            found = torch.autograd.grad(outputs, [*wanted, *self.parameters], into_outputs, allow_unused=True)
        for parameter, gradient in zip(self.parameters, found[len(wanted) :]):
            if gradient is not None:
                self._total(parameter).add_(gradient)
        rest = iter(found)
        return [next(rest) if each is not None and each.requires_grad else None for each in inputs]

    def _total(self, parameter: Tensor) -> Tensor:
        """Return where the gradient of a parameter is summed up."""
        if parameter not in self.totals:
            self.totals[parameter] = new_total(parameter)
        return self.totals[parameter]
