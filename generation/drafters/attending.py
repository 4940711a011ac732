"""Drafts of heads that attend: a decoder layer per head (Gloeckle et al., Mehra et al.), or one before them (Hydra++).

Their own cache has the columns of the backbone's and holds verified tokens only: drafts never enter it, so that nothing
is ever rolled back. A verified block is fed as far as the row that kept most of it; what other rows did not keep stands
behind all that they kept, is seen by nobody, and leaves the cache where rows are right-aligned again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from ..contract import VerificationResult, cached_arange
from ..targets import TargetOutput, shift_cache
from .heads import HeadSession
from .protocol import DraftOptions, View


class AttendingHeadSession(HeadSession):
    """The drafts of one call.

    Args:
        heads: The attached heads: `features`, `distribution_after` and `hidden_layers` are used.
        options: Of the call.
        read: Makes features [B, T, F] from the backbone's hidden states; the heads' own if not given.
    """

    def __init__(self, heads: Any, options: DraftOptions, read: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__(heads.distribution_after, options, heads.hidden_layers, read or heads.features)
        self.cache = DynamicCache()
        self.view: View | None = None
        self.mask = self.counts = None
        self.is_padded = False

    def begin(self, outputs: Any, view: View) -> None:
        """Runs over the prompt; what an earlier call left in the backbone's cache is not looked at.

        Raises:
            ValueError: A backbone whose cache shows no columns.
        """
        if not hasattr(view, "shifts"):
            raise ValueError("heads that attend need a backbone on transformers' own caches; use heads that do not")
        rows = outputs.hidden_states[-1].shape[1]
        self.view, self.is_padded, self.mask = view, view.is_padded, view.mask[:, :0]
        self.counts = view.counts - rows
        features = self._run(outputs.hidden_states, view.mask[:, -rows:])
        self.hidden, self.counts = features[:, -1], view.counts

    def advance(self, fed: TargetOutput, result: VerificationResult) -> None:
        """Runs over the tokens that verification kept, and moves the cache as the backbone's was moved."""
        shifts, longest = self.view.shifts, self.view.kept.longest
        if longest == 0:
            return
        states = tuple(None if state is None else state[:, :longest] for state in fed.hidden_states)
        features = self._run(states, torch.ones_like(self.mask[:, :1]).expand(-1, longest))
        last = result.num_accepted.clamp(max=longest - 1).to(features.device)  # a row that has ended keeps any
        self.hidden, self.counts = features[cached_arange(len(features), features.device), last], self.view.counts
        if shifts is not None:
            self.is_padded, self.mask = True, shift_cache(self.cache, shifts, self.mask)

    def _run(self, states: tuple[torch.Tensor | None, ...], real: torch.Tensor) -> torch.Tensor:
        """Features [B, T, F] of new columns; `real` [B, T] is False for padding."""
        self.mask = torch.cat([self.mask, real], dim=1)
        positions = (self.counts[:, None] + cached_arange(real.shape[1], real.device)).clamp(min=0)
        return self.read(states, self.mask if self.is_padded else None, positions, self.cache)
