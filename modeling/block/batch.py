"""Blocks that are trained: where they begin, which of their places count, what their rows see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin

from ...configuration.block import BlockDrafterConfig
from ...configuration.block_losses import BlockRecipe
from ...generation.tensors.masks import model_mask
from .network import BlockNetwork, seen_rows, window_of

_LEAST_ROWS = 256
"""Rows that run together, at least: they see columns of the context, and each other's for nothing."""


@dataclass
class BlockBatch:
    """A batch, and the blocks in it.

    Attributes:
        ids: [B, L] int64.
        scored: [B, L] bool, tokens that are targets.
        documents: [B, L] int64, the number of each token's document; -1 for padding.
        positions: [B, L] int64, within documents.
        anchors: [B, A] int64, columns of the tokens before blocks.
        keep: [B, A] bool, blocks that count.
    """

    ids: Tensor
    scored: Tensor
    documents: Tensor
    positions: Tensor
    anchors: Tensor
    keep: Tensor

    @classmethod
    def of(cls, ids: Tensor, scored: Tensor, mask: Tensor | None, positions: Tensor | None) -> BlockBatch:
        """Return a batch from the arguments of a model's forward, with blocks behind every token."""
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        documents = torch.zeros_like(ids)
        if positions is None:
            positions = (real.long().cumsum(1) - 1).clamp(min=0)
        else:
            positions = positions.expand(ids.shape)
            documents = nn.functional.pad(positions[:, 1:] <= positions[:, :-1], (1, 0)).long().cumsum(1)
        anchors = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return cls(ids, scored & real, documents.masked_fill(~real, -1), positions, anchors, real)

    def side_by_side(self) -> BlockBatch:
        """Return the same with all sequences in one row, each a document."""
        numbers = torch.arange(len(self.ids), device=self.ids.device)[:, None] * self.ids.shape[1]
        documents = torch.where(self.documents < 0, -1, self.documents + numbers)
        parts = (self.ids, self.scored, documents, self.positions, self.anchors + numbers, self.keep)
        return BlockBatch(*(part.reshape(1, -1) for part in parts))

    @property
    def ends(self) -> Tensor:
        """The columns behind the last token of every sequence, [B, 1]: padding on the right is no part of it."""
        columns = torch.arange(1, self.ids.shape[1] + 1, device=self.ids.device)
        return (columns * (self.documents >= 0)).amax(1, keepdim=True)

    def at(self, anchors: Tensor, keep: Tensor | None = None) -> BlockBatch:
        """Return the same with blocks at other anchors [B, A]; `keep` [B, A] are those that count."""
        anchors = anchors.to(self.ids.device)
        keep = torch.ones_like(anchors, dtype=torch.bool) if keep is None else keep.to(self.ids.device).bool()
        return replace(self, anchors=anchors, keep=keep.view_as(anchors))

    def may_begin(self, recipe: BlockRecipe, block_size: int) -> Tensor:
        """Return the tokens behind which a recipe lets blocks begin, [B, L] bool; none does behind a document's first.

        Nothing would stand before it, and where rows are joined it is no target.
        """
        same = self.documents[:, 1:] == self.documents[:, :-1]
        may = self.scored & nn.functional.pad(same, (1, 0))
        if recipe.anchors == "inside":
            columns = torch.arange(self.ids.shape[1], device=self.ids.device)
            return may & (columns < self.ends - block_size)
        return may & nn.functional.pad(self.scored[:, 1:] & same, (0, 1))

    def drawn(self, recipe: BlockRecipe, block_size: int, count: int, is_fixed: bool) -> BlockBatch:
        """Return the same with up to `count` random blocks per sequence; `is_fixed` are the same in every call.

        Blocks that count nowhere fill up sequences with fewer. Where sequences are long, an accelerator's host does not
        wait to see how many are needed.
        """
        may = self.may_begin(recipe, block_size)
        generator = torch.Generator().manual_seed(0) if is_fixed else None
        chance = torch.rand(may.shape, generator=generator, device="cpu" if is_fixed else may.device)
        best = chance.to(may.device).masked_fill(~may, -1).topk(min(count, may.shape[1]), -1)
        begins, is_long = best.values >= 0, may.shape[1] >= 4 * count
        most = count if is_long and may.device.type != "cpu" else max(int(begins.sum(-1).max()), 1)
        order = best.indices[:, :most].sort(-1)
        return self.at(order.values, begins[:, :most].gather(-1, order.indices))

    def places(self, count: int) -> Tensor:
        """Return the columns of the tokens that blocks predict, [B, A, m]; those beyond the end are clamped to it."""
        ahead = self.anchors[..., None] + torch.arange(1, count + 1, device=self.ids.device)
        return ahead.clamp(max=self.ids.shape[1] - 1)

    def counted(self, recipe: BlockRecipe, config: BlockDrafterConfig) -> Tensor:
        """Return which places count, [B, A, m] bool."""
        size = config.num_drafts
        columns = self.places(size)
        ahead = self.anchors[..., None] + torch.arange(1, size + 1, device=self.ids.device)
        inside = ahead < self.ends[..., None]
        read = (columns - int(config.sample_from_anchor and recipe.places == "rows")).clamp(min=0)
        found = inside & taken(self.scored, read)
        if recipe.within:
            found &= taken(self.documents, columns) == taken(self.documents, self.anchors)[..., None]
        found = found.long().cumprod(-1).bool() if recipe.places == "whole" else found
        return found & self.keep[..., None]


def taken(values: Tensor, columns: Tensor) -> Tensor:
    """Return values [B, L] at columns [B, ..]."""
    return values.gather(1, columns.flatten(1)).view_as(columns)


def block_rows(
    network: BlockNetwork, context: Tensor, batch: BlockBatch, from_anchor: bool = False, recomputes: bool = False
) -> Tensor:
    """Return the rows of all blocks of a batch, [B, A, S, d].

    Args:
        network: The drafter.
        context: [B, L, d].
        batch: The batch.
        from_anchor: Windows of the context are measured from the anchor, not from each row.
        recomputes: Rows are computed again in backward, and hold no memory until then.
    """
    source, size = DynamicCache(), network.config.block_size
    network.extend(context, batch.positions, source, network.joint_projection())
    layers = cast(list[CacheLayerMixin], source.layers)
    columns = [cast(Tensor, part) for layer in layers for part in (layer.keys, layer.values)]
    together = max(context.shape[1] // 2, _LEAST_ROWS) // size
    found = list[Tensor]()
    for anchors, keep in zip(batch.anchors.split(together, 1), batch.keep.split(together, 1)):
        part = batch.at(anchors, keep)
        embedded = network.embed_rows(taken(part.ids, anchors)).flatten(1, 2)  # [B, a S, d]
        ahead = torch.arange(size, device=anchors.device)
        positions = (taken(part.positions, anchors)[..., None] + ahead).flatten(1)  # [B, a S]
        masks = _masks(network.config, part, positions, embedded.dtype, from_anchor)
        run = partial(_run, network, positions, masks)
        rows = checkpoint(run, embedded, *columns, use_reentrant=False) if recomputes else run(embedded, *columns)
        found.append(cast(Tensor, rows).unflatten(1, (-1, size)))
    return torch.cat(found, 1)


def _run(
    network: BlockNetwork, positions: Tensor, masks: dict[str, Tensor | None], embedded: Tensor, *columns: Tensor
) -> Tensor:
    """Run rows behind the keys and values of a context, layer by layer."""
    cache = DynamicCache()
    for index in range(len(columns) // 2):
        cache.update(columns[2 * index], columns[2 * index + 1], index)
    return network.rows(embedded, positions, masks, cache)


def _masks(
    config: BlockDrafterConfig, batch: BlockBatch, positions: Tensor, dtype: torch.dtype, from_anchor: bool
) -> dict[str, Tensor | None]:
    """Return what rows at positions [B, R] of blocks next to each other see, by kind of layer: [B, 1, R, L + R]."""
    anchors, size, device = batch.anchors, config.block_size, positions.device
    columns = torch.arange(batch.ids.shape[1], device=device)
    before = columns < anchors[..., None]
    before &= batch.documents[:, None] == taken(batch.documents, anchors)[..., None]  # [B, a, L]
    before, masks = before.repeat_interleave(size, 1), dict[str, Tensor | None]()  # [B, R, L]
    same = torch.eye(anchors.shape[1], dtype=torch.bool, device=device)
    for kind in dict.fromkeys(config.layer_types or ()):
        window, seen = window_of(config, kind), before
        if window is not None:
            start = taken(batch.positions, anchors).repeat_interleave(size, 1) - 1 if from_anchor else positions
            seen = seen & (start[..., None] - batch.positions[:, None] < window)
        within = torch.kron(same, seen_rows(config, kind, device))  # [R, R]
        masks[kind] = model_mask(torch.cat([seen, within.expand(len(seen), -1, -1)], -1), config, dtype)
    return masks
