"""What drafters share that look their drafts up: in text, or in a table with an entry for every token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..attach import AttachableDrafter
from ..call.options import DraftOptions
from ..tensors.masks import cached_arange


class LookUpDrafter(AttachableDrafter):
    """A drafter that looks its drafts up in text and has no model: they may be of any length.

    Attributes:
        num_tokens: Tokens to draft where no option sets a number.
    """

    drafts_trees, reads_prompt = True, False
    num_tokens: int

    @property
    def config(self) -> PreTrainedConfig:
        """The backbone's: its vocabulary and special ids are the drafter's."""
        return self.backbone.config

    def longest_draft(self) -> int | None:
        """Return None: any number."""
        return None

    def default_draft(self) -> int:
        """Return `num_tokens`."""
        return self.num_tokens


class TableDrafter(LookUpDrafter):
    """A drafter whose table has an entry for every token, shared by all sequences, and by all calls until `forget`.

    Attributes:
        table: [V + 1, ...] int64, on the backbone's device; nobody reads the last entry. None before the first call.
    """

    table: Tensor | None = None

    def first_entry(self, vocabulary: int) -> Tensor:
        """Return what every entry is before anything is known of its token."""
        raise NotImplementedError

    def table_of(self, options: DraftOptions) -> Tensor:
        """Return the table for a call, a new one where the vocabulary is another than before."""
        size, device = options.backbone.config.get_text_config().vocab_size, options.prompt.device
        with torch.inference_mode(False):  # later calls may be in another mode
            if self.table is None or len(self.table) != size + 1:
                entry = self.first_entry(size)
                self.table = entry.repeat(size + 1, *[1] * entry.dim())
            self.table = self.table.to(device)
        return self.table

    def forget(self) -> None:
        """Forget everything, in place: recorded cycles read the same table."""
        if self.table is not None:
            self.table.copy_(self.first_entry(len(self.table) - 1))

    def restore_point(self) -> Callable[[], None]:
        """Return a function by which the drafter forgets what it has read since."""
        known = None if self.table is None else self.table.clone()

        def restore() -> None:
            self.forget()
            if self.table is not None and known is not None and known.shape == self.table.shape:
                self.table.copy_(known)

        return restore


def write_newest(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Write values [N, ...] to rows [N] of a table; of equal rows the last counts."""
    order = cached_arange(len(rows), rows.device)
    newest = rows.new_zeros(len(table)).scatter_reduce_(0, rows, order, "amax")  # [V + 1]
    table[rows] = values[newest[rows]]
