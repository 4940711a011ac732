"""Drafts of heads above draft layers whose cache, as the backbone's, knows how long every row is (EvaByte).

The layers' own cache holds verified tokens only. A verified block is fed as far as the row that kept most of it, and
what other rows did not keep leaves the cache at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...modeling.heads.window_distribution import WindowDistribution
from ..contract import VerificationResult, cached_arange
from ..targets import TargetOutput
from .heads import HeadSession
from .protocol import DraftOptions, View


class DraftLayersSession(HeadSession):
    """The drafts of one call.

    Args:
        distribution: See `HeadSession`.
        options: Of the call.
        layer: Index of the backbone's state that the layers read.
        run: From such states [B, T, D], `attention_mask` and `cache` to features [B, T, F]; extends the cache.
        cache: Empty.
    """

    def __init__(
        self,
        distribution: Callable[[torch.Tensor, torch.Tensor, int], WindowDistribution],
        options: DraftOptions,
        layer: int,
        run: Callable[..., torch.Tensor],
        cache: Any,
    ) -> None:
        super().__init__(distribution, options, [layer])
        self.layer, self.run, self.cache = layer, run, cache
        self.view: View | None = None

    def begin(self, outputs: Any, view: View) -> None:
        """Runs over the prompt; what an earlier call left in the backbone's cache is not looked at."""
        states, self.view = outputs.hidden_states[self.layer], view
        mask = None if view.mask is None else view.mask[:, -states.shape[1] :]
        self.hidden = self.run(states, attention_mask=mask, cache=self.cache)[:, -1]

    def advance(self, fed: TargetOutput, result: VerificationResult) -> None:
        """Runs over the tokens that verification kept."""
        kept = self.view.kept
        if kept.longest == 0:
            return
        features = self.run(fed.hidden_states[self.layer][:, : kept.longest], cache=self.cache)
        self.cache.keep_last(kept.longest, kept)
        last = result.num_accepted.clamp(max=kept.longest - 1).to(features.device)  # a row that has ended keeps any
        self.hidden = features[cached_arange(len(features), features.device), last]
