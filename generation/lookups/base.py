"""What drafters share that look their drafts up: in text, or in a table with an entry for every token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..attach import AttachableDrafter
from ..call.options import DraftOptions
from ..call.sequences import Sequences
from ..contract import DraftSession
from ..tensors.masks import cached_arange


class LookUpDrafter(AttachableDrafter):
    """A drafter that has no model; it drafts `num_tokens` where no option sets a number, which may be any."""

    drafts_trees, reads_prompt = True, False
    num_tokens: int

    @property
    def config(self) -> PreTrainedConfig:
        return self.backbone.config

    def longest_draft(self) -> int | None:
        return None

    def default_draft(self) -> int:
        return self.num_tokens


class TableDrafter(LookUpDrafter):
    """A drafter whose table has an entry for every token, shared by all sequences, and by all calls until `forget`.

    Attributes:
        table: [V + 1, k, ...] int64, candidates of every token, on the backbone's device; nobody reads the last entry.
            None before the first call.
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
        known = None if self.table is None else self.table.clone()

        def restore() -> None:
            self.forget()
            if self.table is not None and known is not None and known.shape == self.table.shape:
                self.table.copy_(known)

        return restore


class TableSession(DraftSession):
    """The drafts of one call from a table [V + 1, k, ...], or a part of it."""

    takes_fixed = True

    def __init__(self, options: DraftOptions, table: Tensor) -> None:
        self.options, self.table, self.num_tokens = options, table, options.num_tokens

    def candidates(self, tokens: Sequences) -> Tensor:
        """Return the entries of the last tokens, [B, k, ...], those first whose first token the constraints allow."""
        entries = self.table[tokens.last()]
        if (masks := self.options.masks(tokens, is_warped=False)) is None:
            return entries
        first = entries.flatten(2)[..., 0] if entries.dim() > 2 else entries  # [B, k]
        allowed = masks.allowed((len(first), len(self.table) - 1), first.device).gather(1, first)  # [B, k]
        order = (~allowed).sort(stable=True).indices
        return entries.gather(1, order.view(*order.shape, *[1] * (entries.dim() - 2)).expand_as(entries))

    def write(self, tokens: Tensor, entries: Tensor) -> None:
        """Replace the entries [N, k, ...] of tokens [N]; of equal tokens the last counts."""
        order = cached_arange(len(tokens), tokens.device)
        newest = tokens.new_zeros(len(self.table)).scatter_reduce_(0, tokens, order, "amax")  # [V + 1]
        self.table[tokens] = entries[newest[tokens]]


def merged(drafts: Tensor) -> Tensor:
    """Return parents [B, length * branches], level by level, by which branches [B, length, branches] share beginnings.

    The first branch with a beginning goes on for all.
    """
    length, count = drafts.shape[1:]
    same = (drafts[..., None] == drafts[:, :, None]).cumprod(1)  # [B, length, branch, other]: equal up to here
    node = same.argmax(-1) + count * cached_arange(length, drafts.device)[:, None]  # [B, length, branches]
    # -1, the bonus token, before the first level
    return torch.nn.functional.pad(node[:, :-1], (0, 0, 1, 0), value=-1).flatten(1)
