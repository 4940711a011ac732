"""What mask slots learn (Samragh et al. 2025, arXiv 2507.11851): their tokens, twice, and the backbone's states."""

from __future__ import annotations

from typing import Any

import torch

from .losses import slot_weights
from .slots import SlotReader


class MaskReader(SlotReader):
    """The loss of masked prediction: of the backbone's head on mask states, of the sampler head, and LCM.

    The sampler head learns from ordinary rows, too: those that predict the same tokens as the masks. Latent consistency
    matching (LCM) is the mean of |z_mask - z_token|^2 over masks, z_token being the detached state of such a row.

    Args:
        model: The `PTPForCausalLM` itself, whose sampler head and embeddings are read.
        *args: Of `SlotReader`.
    """

    def __init__(self, model: Any, *args: Any) -> None:
        super().__init__(*args)
        self.model = model

    def _of_slots(self, slots: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # the sampler's rows are made first: a loss in chunks goes backward at once, and shards are given back then
        sampled = [] if self.model.sampler is None else self._sampled(slots)
        parts = [self._compared(slots, total, drafts=not sampled), self._matched(slots, total)]
        parts += [self._compared(states, total, drafts=index == 0) for index, states in enumerate(sampled)]
        losses, sums = zip(*parts)
        return sum(losses), sum(sums)

    def _sampled(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """What the sampler head makes of masks, and of ordinary rows."""
        before = self.model.get_input_embeddings()(self.task.before)
        return [self.model.sampler(states, before) for states in (slots, self.task.anchors.to(slots))]

    def _matched(self, slots: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latent consistency matching, and its sum [1]."""
        weights = slot_weights(self.task.valid, self.options.gamma).to(slots.device)
        wide = torch.promote_types(slots.dtype, torch.float32)
        distances = (slots.to(wide) - self.task.anchors.to(slots.device, wide)).square().sum(-1)
        summed = self.config.lcm_weight * (distances.masked_fill(weights == 0, 0.0) * weights).sum()[None]
        return (summed / total.to(summed)).sum(), summed.detach()
