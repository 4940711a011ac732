"""What is read from the last hidden states of slots: their losses, in chunks, and whether drafts are right."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...configuration.ptp import PTPConfig
from ...generation.tensors.sampling import pick
from ...modeling import PTPForCausalLM
from ...modeling.common.chunks import LossSegment, chunked_sums
from ...modeling.heads.losses import IGNORE
from ...modeling.heads.window_distribution import exact
from .losses import PTPOptions, slot_losses, slot_weights, target_probs
from .tasks import Task


class SlotReader:
    """Computes the losses of `PTPTrainer` from the last hidden states of tokens and slots.

    Args:
        task: The task of the batch.
        options: What is learned.
        config: The student's configuration.
        totals: [2], what the sums of slots and of the backbone's own targets are divided by.
        next_tokens: [B, T - 1] targets of the backbone's own loss, -100 for none; None if it does not learn.
    """

    def __init__(
        self, task: Task, options: PTPOptions, config: PTPConfig, totals: Tensor, next_tokens: Tensor | None
    ) -> None:
        self.task, self.options, self.config = task, options, config
        self.totals, self.next_tokens = totals, next_tokens
        self._hits: list[Tensor] = []

    def __call__(self, hidden: Tensor, head: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss; sums of the losses of slots and of the backbone [2]; hits [B, C, L] bool.

        Args:
            hidden: [B, T + C L, D], or without the tokens.
            head: From hidden states to logits.
        """
        self._hits = []
        task, dtype = self.task, torch.promote_types(hidden.dtype, torch.float32)
        totals = self.totals.clamp(min=torch.finfo(torch.float32).tiny).to(dtype)
        slots = hidden[:, hidden.shape[1] - task.tokens[0].numel() :].unflatten(1, task.tokens.shape[1:])
        loss, slot_sum = self._of_slots(head, slots, totals[:1])
        base_sum = torch.zeros_like(slot_sum)
        if self.next_tokens is not None:
            before = hidden[:, : self.next_tokens.shape[1]]
            weight, scored = self.options.base_weight / totals[1:], self.next_tokens != IGNORE
            part = LossSegment(before, [self.next_tokens[..., None]], weight, scored=scored)

            def own(states: Tensor, targets: Tensor) -> Tensor:
                return _next_token_losses(head(states), targets[:, 0])[:, None]

            base, (base_sum,) = chunked_sums(own, head, [part], self.config.vocab_size)
            loss = loss + base
        hits = torch.cat(self._hits).view(task.tokens.shape)
        return loss, torch.cat([slot_sum, base_sum]), hits

    def _of_slots(self, head: nn.Module, slots: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of slots [B, C, L, D], and its sum [1], which `total` [1] divides."""
        return self._compared(head, slots, total, drafts=True)

    def _compared(self, head: nn.Module, states: Tensor, total: Tensor, drafts: bool = False) -> tuple[Tensor, Tensor]:
        """Return the loss of states [B, C, L, D] that predict the slots' tokens, divided by `total` [1], and its sum.

        `drafts`: these states draft, so that hits are counted.
        """
        task = self.task
        weights, scores = slot_weights(task.valid, self.options.gamma), task.scores
        values = [task.tokens[..., None], weights[..., None], task.uniforms[..., None], scores and scores.states]
        terms = partial(self._terms, head=head, drafts=drafts)
        loss, (summed,) = chunked_sums(terms, head, [LossSegment(states, values, 1 / total)], self.config.vocab_size)
        return loss, summed

    def _terms(
        self,
        states: Tensor,
        tokens: Tensor,
        weights: Tensor,
        uniforms: Tensor,
        teacher: Tensor | None,
        head: nn.Module,
        drafts: bool,
    ) -> Tensor:
        """Return the weighted losses of slots, [n, 1]."""
        tokens, weights = tokens[:, 0], weights[:, 0]
        logits, distribution, scores = head(states), None, self.task.completions.scores
        if teacher is not None and scores is not None:
            with torch.no_grad():
                distribution = target_probs(scores.logits(teacher), **self.config.sampling or {})
        if drafts:
            with torch.no_grad():
                self._hits.append(self._drafts(logits.detach(), uniforms[:, 0]) == tokens)
        losses = slot_losses(logits, tokens, distribution, self.options.loss)
        return (losses.masked_fill(weights == 0, 0.0) * weights)[:, None]

    def _drafts(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Return what slots with logits [n, v] draft; categorical ones pick with the uniforms of their targets."""
        likely = logits.argmax(-1)
        if self.config.predicts_tokens:
            return likely
        return torch.where(uniforms < 0, likely, pick(uniforms.clamp(min=0), logits.double().softmax(-1)))


def _next_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(exact(logits), targets, ignore_index=IGNORE, reduction="none")


class MaskReader(SlotReader):
    """The loss of mask slots (Samragh et al. 2025, arXiv 2507.11851): backbone's head, sampler head, and LCM.

    The sampler head learns from ordinary tokens, too: those whose states predict the same tokens as the masks. Latent
    consistency matching (LCM) is the mean of |z_mask - z_token|^2 over masks, z_token being such a detached state.
    """

    def __init__(self, model: PTPForCausalLM, *args: Any) -> None:
        super().__init__(*args)
        self.model = model

    def _of_slots(self, head: nn.Module, slots: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        anchors = self.task.anchors
        assert anchors is not None
        # the sampler's states come first: a loss in chunks goes backward at once, and then frees gathered shards
        sampled = self._sampled(slots, anchors.to(slots))
        parts = [self._compared(head, slots, total, drafts=not sampled), self._matched(slots, anchors, total)]
        parts += [self._compared(head, states, total, drafts=index == 0) for index, states in enumerate(sampled)]
        losses, sums = zip(*parts)
        return torch.stack(losses).sum(0), torch.stack(sums).sum(0)

    def _sampled(self, slots: Tensor, anchors: Tensor) -> list[Tensor]:
        """Return the sampler head's states for masks and for ordinary tokens; none without such a head."""
        if self.model.sampler is None:
            return []
        before = self.model.get_input_embeddings()(self.task.before)
        return [self.model.sampler(states, before) for states in (slots, anchors)]

    def _matched(self, slots: Tensor, anchors: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of latent consistency matching, and its sum [1]."""
        weights = slot_weights(self.task.valid, self.options.gamma).to(slots.device)
        wide = torch.promote_types(slots.dtype, torch.float32)
        distances = (slots.to(wide) - anchors.to(slots.device, wide)).square().sum(-1)
        summed = self.config.lcm_weight * (distances.masked_fill(weights == 0, 0.0) * weights).sum()[None]
        return (summed / total.to(summed)).sum(), summed.detach()
