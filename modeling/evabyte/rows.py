"""Padded and packed batches as rows of real tokens, each starting in column 0. Knows no model.

EVA's window and chunk grid counts true positions. Once every sequence (or packed document) has a row of its own that
starts in column 0, no layer needs to know of padding: what follows a row's last token is never seen by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Rows:
    """A map between the columns of a batch [B, L] and the cells of rows [R, M].

    Attributes:
        source: [R, M] int64, flat index into B * L of each cell; unused cells point at any column.
        target: [B, L] int64, flat index into R * M of each column; padding points at any cell.
        counts: [R] int64, real tokens per row.
    """

    source: torch.Tensor
    target: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def from_mask(cls, mask: torch.Tensor) -> Rows:
        """One row per sequence of `mask` [B, L] (True: a real token, wherever the padding stands)."""
        batch, length = mask.shape
        order = (~mask).long().argsort(dim=1, stable=True)
        first = torch.arange(batch, device=mask.device)[:, None] * length
        return cls(source=order + first, target=order.argsort(dim=1) + first, counts=mask.sum(1))

    @classmethod
    def from_documents(cls, mask: torch.Tensor, position_ids: torch.Tensor) -> Rows:
        """One row per packed document: a document starts where `position_ids` [B, L] is 0, and with every sequence."""
        batch, length = mask.shape
        starts = mask & ((position_ids.expand(batch, length) == 0) | (mask.cumsum(1) == 1))
        real = mask.flatten().nonzero()[:, 0]
        if len(real) == 0:
            return cls.from_mask(mask)
        document = starts.flatten()[real].cumsum(0) - 1
        first = starts.flatten()[real].nonzero()[:, 0]
        column = torch.arange(len(real), device=mask.device) - first[document]
        counts = torch.bincount(document)
        source = real.new_zeros(len(counts), int(counts.max()))
        source[document, column] = real
        target = real.new_zeros(batch * length)
        target[real] = document * source.shape[1] + column
        return cls(source=source, target=target.view(batch, length), counts=counts)

    def gather(self, batch: torch.Tensor) -> torch.Tensor:
        """[B, L, ...] to [R, M, ...]."""
        return batch.flatten(0, 1)[self.source]

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, M, ...] to [B, L, ...]; padding columns hold arbitrary finite values."""
        return rows.flatten(0, 1)[self.target]
