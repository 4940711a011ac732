"""The losses of slots, and whether their drafts are right, made of hidden states a few rows at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ...modeling.heads.chunks import Part, chunked_sums
from ...modeling.heads.losses import IGNORE
from ...modeling.sampling import pick
from .losses import slot_losses, slot_weights, target_probs
from .options import PTPOptions
from .tasks import Task


class SlotReader:
    """What `PTPTrainer` makes of the last hidden states of tokens and slots, in place of logits.

    Args:
        task: The batch.
        options: What is learned.
        config: The student's.
        totals: [2] what the sums of slots and of the backbone's own targets are divided by.
        next_tokens: [B, T - 1] targets of the backbone's own loss, -100 for none; None where it does not learn.
    """

    def __init__(
        self, task: Task, options: PTPOptions, config: Any, totals: torch.Tensor, next_tokens: torch.Tensor | None
    ) -> None:
        self.task, self.options, self.config = task, options, config
        self.totals, self.next_tokens = totals, next_tokens
        self._head: nn.Module | None = None
        self._hits: list[torch.Tensor] = []

    def __call__(self, hidden: torch.Tensor, head: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The loss, with its gradient; sums of the losses of slots and of the backbone [2]; hits [B, C, L] bool.

        Args:
            hidden: [B, T + C L, D], or without the tokens.
            head: Makes logits.
        """
        self._head, self._hits = head, []
        task, totals = self.task, self.totals.clamp(min=torch.finfo(torch.float32).tiny).float()
        slots = hidden[:, hidden.shape[1] - task.tokens[0].numel() :].unflatten(1, task.tokens.shape[1:])
        loss, slot_sum = self._of_slots(slots, totals[:1])
        base_sum = torch.zeros_like(slot_sum)
        if self.next_tokens is not None:
            before = hidden[:, : self.next_tokens.shape[1]]
            part = Part(before, [self.next_tokens[..., None]], self.options.base_weight / totals[1:])

            def own(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                return _next_token_losses(head(states), targets[:, 0])[:, None]

            base, (base_sum,) = chunked_sums(own, head, [part], self.config.vocab_size)
            loss = loss + base
        hits = torch.cat(self._hits).view(task.tokens.shape)
        return loss, torch.cat([slot_sum, base_sum]), hits

    def _of_slots(self, slots: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of slots [B, C, L, D], and its sum [1], which `total` [1] divides."""
        return self._compared(slots, total, drafts=True)

    def _compared(
        self, states: torch.Tensor, total: torch.Tensor, drafts: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss of rows [B, C, L, D] that predict the slots' tokens, and its sum [1].

        Args:
            states: What the head reads.
            total: [1], divides the sum.
            drafts: Whether these rows draft; it is noted whether they are right.
        """
        task = self.task
        weights, scores = slot_weights(task.valid, self.options.gamma), task.scores
        given = [task.tokens[..., None], weights[..., None], task.uniforms[..., None], scores and scores.states]
        terms = partial(self._terms, drafts=drafts)
        loss, (summed,) = chunked_sums(terms, self._head, [Part(states, given, 1 / total)], self.config.vocab_size)
        return loss, summed

    def _terms(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        uniforms: torch.Tensor,
        teacher: torch.Tensor | None,
        drafts: bool,
    ) -> torch.Tensor:
        """Weighed losses of slots, [n, 1]."""
        tokens, weights = tokens[:, 0], weights[:, 0]
        logits, distribution = self._head(states), None
        if teacher is not None:
            with torch.no_grad():
                distribution = target_probs(self.task.completions.scores.logits(teacher), **self.config.sampling)
        if drafts:
            with torch.no_grad():
                self._hits.append(self._drafts(logits.detach(), uniforms[:, 0]) == tokens)
        losses = slot_losses(logits, tokens, distribution, self.options.loss)
        return (losses.masked_fill(weights == 0, 0.0) * weights)[:, None]

    def _drafts(self, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """What slots with logits [n, v] draft; categorical ones pick with the uniforms of their targets."""
        likely = logits.argmax(-1)
        if self.config.predicts_tokens:
            return likely
        return torch.where(uniforms < 0, likely, pick(uniforms.clamp(min=0), logits.double().softmax(-1)))


def _next_token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="none")
