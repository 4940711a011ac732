"""The steps of an EAGLE head in training, and sums of their terms whose gradients the forward makes.

Row t of step i reads the output of row t of step i - 1 and the embedding of token t + 1 + i, at position t + i; of a
P-EAGLE head, from step 1 on, the features and the token of rows that know nothing. It sees step 0 up to column t, and
of every later step its own column, as a drafted row does. So each step is a call of `head.rows` on a cache, and rows of
the later steps run block by block: they see only step 0 of other rows.

`summed_steps` makes the gradients of a block as soon as its terms are there. Outputs and columns of step 0 are leaves
of every block's graph, and their gradients are summed; after the last block they go through step 0 once. Nothing is
computed twice, logits exist for one chunk of rows at a time, and the teacher's once per block for all steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ...configuration.loss_options import ResolvedEagleOptions
from ...generation.tensors.masks import by_documents
from ...generation.tensors.shared_models import gather
from ..common.chunks import LOGITS_PER_CHUNK, Made, made_in_forward, new_total
from .batch import TrainingBatch
from .modules import EagleNetwork
from .products import TeacherProbs, has_products, product_terms
from .terms import TeacherRows, draft_columns, draft_summaries, row_terms

BLOCK = 128
"""Rows of a sequence in one block of the later steps."""


class Steps:
    """A head that continues from its own outputs over a whole batch."""

    def __init__(self, head: EagleNetwork, batch: TrainingBatch, options: ResolvedEagleOptions) -> None:
        self.head, self.batch, self.options = head, batch, options
        self.is_hass = options.objective == "hass"
        self.counted = torch.stack([batch.counted(step) for step in range(options.steps)])  # [S, B, rows]
        self.counted_on_host = self.counted.cpu()  # an accelerator waits here, once for all steps and blocks
        documents = batch.documents
        starts = nn.functional.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        self.first = starts[:, : batch.num_rows]
        places = torch.arange(batch.num_rows, device=starts.device)
        of_documents = torch.where(self.first, places, 0).cummax(1).values  # [B, rows]
        self.lowest: list[int] = of_documents.amin(0).tolist()
        """The first column that any sequence's row sees, by row."""
        self.summaries = draft_summaries(head, batch)
        self.columns = draft_columns(head, batch.labels)  # [B, L]

    @property
    def block(self) -> int:
        """Rows of a sequence in one block of the later steps, at most."""
        return BLOCK

    @property
    def size(self) -> int:
        """Rows whose logits exist at a time."""
        columns = self.head.draft_size if self.summaries.shape[-1] else self.head.config.vocab_size
        return max(1, LOGITS_PER_CHUNK // columns)

    def first_step(self, features: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs of step 0 [B, rows, d], and its keys and values [B, H, rows, D], layer by layer."""
        batch, cache, rows = self.batch, DynamicCache(), self.batch.num_rows
        mask = None if batch.is_whole else batch.visible(0, rows)
        mask = by_documents(mask) if mask is not None and len(mask) == 1 else mask
        outputs = self.step(features, 0, 0, mask, cache)
        layers = cast(list[CacheLayerMixin], cache.layers)
        return outputs, [cast(Tensor, states) for layer in layers for states in (layer.keys, layer.values)]

    def later_steps(self, features: Tensor, start: int, columns: list[Tensor]) -> Iterator[Tensor]:
        """Yield the outputs [B, R, d] of steps 1, 2, ... of a block of rows, the first of which is `start`.

        `features` are their outputs of step 0; `columns` its keys and values from `lowest` to the block's end, layer by
        layer.
        """
        cache, size = DynamicCache(), features.shape[1]
        for layer in range(len(columns) // 2):
            cache.update(columns[2 * layer], columns[2 * layer + 1], layer)
        mask = self.batch.visible(start, start + size)[..., self.lowest[start] :]
        if self.head.config.mask_token_id is not None:
            yield from self._masked_steps(features, start, mask, cache)
            return
        diagonal = torch.eye(size, dtype=torch.bool, device=mask.device).expand(len(mask), 1, -1, -1)
        for step in range(1, self.options.steps):
            mask = torch.cat([mask, diagonal], dim=-1)  # [B, 1, R, stop - lowest + step R]
            features = features.detach() if self.is_hass else features
            features = self.step(features, start, step, mask, cache)
            yield features

    def _masked_steps(self, features: Tensor, start: int, mask: Tensor, cache: DynamicCache) -> Iterator[Tensor]:
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
                seen = torch.cat(
                    [mask[:, :, rows], own.to(mask.device)], -1
                )  # [B, 1, n, stop - lowest + rows of steps]
                found = self.head.rows(*self.head.masked(len(features), len(rows)), positions, seen, cache)
                outputs = outputs.index_copy(1, rows, found)
            yield outputs

    def step(self, features: Tensor, start: int, step: int, mask: Tensor | None, cache: DynamicCache) -> Tensor:
        """Run a step of the rows from `start` on, and return their outputs [B, R, d]."""
        batch, stop = self.batch, start + features.shape[1]
        ids = batch.ahead(batch.input_ids, start, stop, 1 + step)
        return self.head.rows(features, ids, batch.positions[:, start:stop] + step, mask, cache)

    def with_first_rows(self, sums: Tensor) -> Tensor:
        """Return sums [S, n] of sums everywhere and over first rows, [S, 2, n]: HASS adds the latter again."""
        everywhere, at_first = sums.unbind(1)
        return everywhere + at_first.cumsum(0) - at_first if self.is_hass else everywhere


def summed_steps(
    head: EagleNetwork, features: Tensor, batch: TrainingBatch, options: ResolvedEagleOptions, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss, and sums over rows of [loss, shown loss, acceptance], [S, 3], from features [B, L, d].

    `weights` [S] are the factors of the sums of the steps in the loss.
    """
    gather(head.modules())
    parameters: list[Tensor] = [each for each in head.parameters() if each.requires_grad]
    job = _SummedSteps(Steps(head, batch, options), weights, features, parameters)
    loss, (sums,) = made_in_forward(job.made, [features, *parameters])
    return loss, sums


class _SummedSteps:
    """The sums of all steps and rows, and their gradients."""

    def __init__(self, steps: Steps, weights: Tensor, features: Tensor, parameters: list[Tensor]) -> None:
        self.steps, self.batch, self.features, self.parameters = steps, steps.batch, features, parameters
        self.weights = weights.to(features.device)
        self.scale = self.weights.max()
        shares = self.weights / self.scale.clamp(min=torch.finfo(weights.dtype).tiny)
        again = shares.flip(0).cumsum(0).flip(0) - shares if steps.is_hass else torch.zeros_like(shares)
        self.shares = torch.stack([shares, again], 1)  # [S, 2]: of every row, and besides of first rows
        self.has_products = has_products(steps.head, steps.options)
        self.totals: dict[Tensor, Tensor] = {}
        self.learns = False

    def made(self, needed: list[bool]) -> Made:
        """Return the loss, its sums, and the gradients of the features and of the parameters."""
        steps, batch, self.learns = self.steps, self.batch, any(needed)
        with torch.set_grad_enabled(self.learns):
            features = self.features[:, : batch.num_rows].detach().requires_grad_(needed[0])
            outputs, columns = steps.first_step(features)
        roots = [outputs, *columns] if steps.options.steps > 1 else [outputs]
        totals = [torch.zeros_like(root) if root.requires_grad else None for root in roots]
        sums = self.weights.new_zeros(steps.options.steps, 2, 3)
        for start, stop in self._blocks():
            self._block(start, stop, roots, totals, sums)
        (into_features,) = self._backward(roots, totals, [features] if needed[0] else [None])
        if into_features is not None:  # the last two tokens have no row
            into_features = nn.functional.pad(into_features, (0, 0, 0, self.features.shape[1] - batch.num_rows))
        sums = steps.with_first_rows(sums)
        # zeros where nothing is scored: processes that share parameters must all have a gradient
        learned = [self._total(each).to(each.dtype) if self.learns else None for each in self.parameters]
        return Made((self.weights * sums[:, 0]).sum(), [sums], [into_features, *learned], self.scale)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first row of each block and the one behind its last; blocks without a target are left out."""
        is_counted = self.steps.counted_on_host.flatten(0, 1).any(0)  # [rows]
        size = max(1, min(self.steps.block, self.steps.size // len(self.batch.input_ids)))
        found = is_counted.nonzero()[:, 0].tolist()
        for start in range(found[0], found[-1] + 1, size) if found else ():
            stop = min(start + size, found[-1] + 1)
            if is_counted[start:stop].any():
                yield start, stop

    def _block(self, start: int, stop: int, roots: list[Tensor], totals: list[Tensor | None], sums: Tensor) -> None:
        """Add the terms of all steps of a block of rows to `sums` [S, 2, 3], and their gradients to the totals."""
        seen = slice(self.steps.lowest[start], stop)
        parts = [roots[0][:, start:stop], *(columns[:, :, seen] for columns in roots[1:])]
        leaves = [part.detach().requires_grad_(part.requires_grad) for part in parts]
        teacher = self._teacher(start, stop)
        found, into_outputs = self._terms(leaves[0], start, 0, teacher)
        sums[0] += found
        outputs, gradients = [], []
        with torch.set_grad_enabled(self.learns):
            for step, features in enumerate(self.steps.later_steps(leaves[0], start, leaves[1:]), 1):
                found, gradient = self._terms(features, start, step, teacher)
                sums[step] += found
                outputs.append(features)
                gradients.append(gradient)
        into_leaves = self._backward(outputs, gradients, [leaf if leaf.requires_grad else None for leaf in leaves])
        for index, (gradient, total) in enumerate(zip(into_leaves, totals)):
            if total is not None and gradient is not None:
                (total[:, :, seen] if index else total[:, start:stop]).add_(gradient)
        if totals[0] is not None and into_outputs is not None:
            totals[0][:, start:stop] += into_outputs

    def _teacher(self, start: int, stop: int) -> tuple[TeacherRows | TeacherProbs, Tensor]:
        """Return what all steps of a block learn, and where step i of row t finds it: at [b, t - start + i]."""
        steps, batch = self.steps, self.batch
        counted = steps.counted_on_host[:, :, start:stop]
        is_read = counted.new_zeros(counted.shape[1], stop - start + len(counted) - 1)  # [B, R + S - 1]
        for step, each in enumerate(counted):
            is_read[:, step : step + each.shape[1]] |= each
        rows = is_read.flatten().nonzero()[:, 0]
        where = is_read.flatten().long().cumsum(0).sub(1).view_as(is_read)

        def read(values: Tensor) -> Tensor:
            ahead = batch.ahead(values, start, start + is_read.shape[1], 1)
            return ahead.flatten(0, 1)[rows.to(values.device)].to(self.features.device)

        states, summaries = read(batch.states), read(steps.summaries)
        parts = zip(states.split(steps.size), summaries.split(steps.size))
        teacher = TeacherRows.joined([TeacherRows.of(steps.head, *part) for part in parts])
        return TeacherProbs.of(teacher) if self.has_products else teacher, where

    def _terms(
        self, features: Tensor, start: int, step: int, teacher: tuple[TeacherRows | TeacherProbs, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Return a step's sums over a block's rows with targets and over first rows of documents, [2, 3], and the
        gradient of the features [B, R, d], or None."""
        (learned, where), stop = teacher, start + features.shape[1]
        rows = self.steps.counted_on_host[step, :, start:stop].flatten().nonzero()[:, 0]
        places = where[:, step : step + features.shape[1]].flatten()[rows].to(features.device)
        rows = rows.to(features.device)
        drafted = self.steps.columns
        columns = self.batch.ahead(drafted, start, stop, 2 + step).flatten()[rows.to(drafted.device)]
        first = self.steps.first[:, start:stop].flatten()[rows.to(self.steps.first.device)].to(features.device)
        flat = features.detach().flatten(0, 1)
        into = torch.zeros_like(flat) if features.requires_grad else None
        sums = self.weights.new_zeros(2, 3)
        size = self.steps.size
        chunks = zip(*(each.split(size) for each in (rows, places, columns.to(features.device), first)))
        for rows, places, columns, first in chunks:
            chosen = torch.stack([torch.ones_like(first), first]).to(sums)  # [2, N]
            chunk = flat[rows].requires_grad_(features.requires_grad)
            terms, gradient = self._chunk(chunk, columns, learned.at(places), self.shares[step] @ chosen)
            sums += chosen @ terms.to(sums)
            if into is not None and gradient is not None:
                into.index_copy_(0, rows, gradient.to(into.dtype))
        return sums, None if into is None else into.view_as(features)

    def _chunk(
        self, features: Tensor, columns: Tensor, teacher: TeacherRows | TeacherProbs, weights: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the terms of rows [N, 3] and the gradient of their features, both by `weights` [N]."""
        head, options = self.steps.head, self.steps.options
        if isinstance(teacher, TeacherRows):
            with torch.set_grad_enabled(self.learns):
                terms = row_terms(head, features, columns, teacher, options)
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
                self._add(parameter, gradient)
        rest = iter(found)
        return [next(rest) if each is not None and each.requires_grad else None for each in inputs]

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        if parameter in self.totals:
            self.totals[parameter] += gradient
        else:  # a copy, because autograd may return one tensor for several inputs
            self.totals[parameter] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)

    def _total(self, parameter: Tensor) -> Tensor:
        """Return where the gradient of a parameter is summed up."""
        if parameter not in self.totals:
            self.totals[parameter] = new_total(parameter)
        return self.totals[parameter]
