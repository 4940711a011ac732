"""What drafters share that look their drafts up in text."""

from __future__ import annotations

from transformers import PreTrainedConfig

from ..attach import AttachableDrafter


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
