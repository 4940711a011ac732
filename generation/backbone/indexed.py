"""Layers of a cache that never moves, for attention that chooses columns by an index."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from ..tensors.masks import cached_arange, cached_range
from .cache import CacheLayout, Place, RaggedLayer, laid_out


class AlignedLayer(RaggedLayer):
    """A `RaggedLayer` that gives attention the columns up to the block's end, right-aligned after zeros (GLM5-next)."""

    fed = 0

    def _written(self, name: str, dim: int, states: Tensor, place: Place | None = None) -> Tensor:
        self.layout.is_maskless, self.fed = True, states.shape[dim]
        held = super()._written(name, dim, states)
        if self.layout.is_even:
            return held
        width, ends = held.shape[dim], self.layout.ends.to(held.device)
        source = cached_arange(width, held.device) - (width - self.layout.block_offset - self.fed - ends)[:, None]
        shape = [len(source), *[1] * (dim - 1), width, *[1] * (held.dim() - dim - 1)]
        aligned = held.gather(dim, source.clamp(min=0).view(shape).expand(held.shape))  # as `held`
        return aligned.masked_fill((source < 0).view(shape), 0)

    def get_seq_length(self) -> int:
        """Return the columns up to the end of the last block: what is asked after it was written."""
        return super().get_seq_length() + self.fed


class PositionedLayer(RaggedLayer):
    """A `RaggedLayer` with the positions [B, 3, C] of columns, if it is the first of its cache (Qwen4-Exp).

    A model puts the positions of a block behind those that it finds, but `target.note_positions` has written them.
    """

    positions: Tensor | None = None
    shown = 0

    def __init__(self, layout: CacheLayout, origin: DynamicLayer) -> None:
        super().__init__(layout, origin)
        self.states = (*self.states, ("positions", 2))
        given = cast(DynamicIndexedLayer, origin).indexer_position_ids
        if given is not None:
            self.positions = laid_out(given.transpose(0, 1), layout.prompt - given.shape[2], 2, layout.size(False))

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions [3, B, W] of the columns that attention gets."""
        return None if self.positions is None else self.positions[..., : self.shown].transpose(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        pass  # `note_positions` has written them

    def note(self, position_ids: Tensor) -> None:
        """Write positions of the next block, [B, F] or [1, 3 or 4, B, F], the last three rotated by."""
        three = (position_ids[-3:] if position_ids.dim() == 3 else position_ids).expand(3, -1, -1)  # [3, B, F]
        self.shown = self._written("positions", 2, three.transpose(0, 1)).shape[2]

    def restore(self, columns: int) -> DynamicLayer:
        layer = cast(DynamicIndexedLayer, super().restore(columns))
        positions = None if self.positions is None else self.positions[..., :columns].transpose(0, 1)
        layer.indexer_position_ids = positions
        return layer


class BlockLayer(RaggedLayer):
    """A `RaggedLayer` with keys of an index of blocks [B, 1, C, D], where its origin has them (MiniMax-M3)."""

    idx_keys: Tensor | None = None

    def __init__(self, layout: CacheLayout, origin: DynamicLayer) -> None:
        super().__init__(layout, origin)
        if "idx_keys" not in vars(origin):
            return
        self.own = self.states = (*self.own, ("idx_keys", 2))
        given = vars(origin)["idx_keys"]
        if given is not None:
            self.idx_keys = laid_out(given, layout.prompt - given.shape[2], 2, layout.size(False))

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Write the index's keys of a block [B, 1, F, D], and return a view of the columns that attention gets."""
        return self._written("idx_keys", 2, idx_k)


def real_tokens(layout: CacheLayout, fed: int) -> Tensor:
    """Return which positions of the next block are tokens, [B, F] bool."""
    columns = layout.ends[:, None] + cached_range(layout.block_offset, fed, layout.ends.device)  # [B, F]
    if layout.mask is None:
        return columns >= 0
    inside = layout.mask.gather(1, columns.clamp(0, layout.prompt - 1)) & (columns >= 0)  # [B, F]
    return inside | (columns >= layout.prompt)
