"""The targets of a batch's slots, and the losses that read them off hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...generation.tensors.sampling import pick
from ...modeling import PTPForCausalLM
from ...modeling.common.chunks import LossSegment, chunked_sums
from ...modeling.heads.losses import IGNORE
from ...modeling.heads.window_distribution import exact
from .forwards import Completions, PackedBatch, Scores
from .losses import PTPOptions, slot_losses, slot_weights, target_probs


@dataclass
class Task:
    """A batch, ready for the forward that learns.

    Attributes:
        packed: The batch in the model; its cache may be freed.
        completions: Of K tokens; a categorical slot predicts the token after its own, and so from token 1 on.
        tokens: [B, C, L] int64, what slots should predict; `uniforms` pick them, and `valid` ones are learned.
        scores: Of the target distributions, [B, C, L]; None: they are one-hot.
        anchors: [B, C, L, D], the backbone's states that predict the same tokens as the slots; for masks.
    """

    packed: PackedBatch
    completions: Completions
    tokens: Tensor
    uniforms: Tensor
    valid: Tensor
    scores: Scores | None
    anchors: Tensor | None = None

    def release(self) -> None:
        """Free the cache, so that only one exists at a time; the context is read again."""
        self.packed.cache = None

    @property
    def inputs(self) -> Tensor:
        """What slots read, [B, C, L]."""
        return self.completions.uniforms[..., : self.packed.config.num_slots]


@dataclass
class SlotReader:
    """Computes the losses of `PTPTrainer` from the last hidden states of tokens and slots.

    Sums of slots, and of the backbone's own targets `next_tokens` [B, T - 1] (None: it does not learn), are divided by
    `totals` [2].
    """

    task: Task
    options: PTPOptions
    totals: Tensor
    next_tokens: Tensor | None

    def __post_init__(self) -> None:
        self.config = self.task.packed.config
        self._hits: list[Tensor] = []

    def __call__(self, hidden: Tensor, head: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss; sums of slots and of the backbone [2]; hits [B, C, L] bool. States end with the slots'."""
        self._hits = []
        task, dtype = self.task, torch.promote_types(hidden.dtype, torch.float32)
        totals = self.totals.clamp(min=torch.finfo(torch.float32).tiny).to(dtype)
        slots = hidden[:, hidden.shape[1] - task.tokens[0].numel() :].unflatten(1, task.tokens.shape[1:])
        loss, slot_sum = self._of_slots(head, slots, totals[:1])
        base_sum = torch.zeros_like(slot_sum)
        if (targets := self.next_tokens) is not None:
            weight, before = self.options.base_weight / totals[1:], hidden[:, : targets.shape[1]]

            def own(states: Tensor, targets: Tensor) -> Tensor:
                losses = nn.functional.cross_entropy
                return losses(exact(head(states)), targets[:, 0], ignore_index=IGNORE, reduction="none")[:, None]

            part = LossSegment(before, [targets[..., None]], weight, scored=targets != IGNORE)
            base, (base_sum,) = chunked_sums(own, head, [part], self.config.vocab_size)
            loss = loss + base
        return loss, torch.cat([slot_sum, base_sum]), torch.cat(self._hits).view(task.tokens.shape)

    def _of_slots(self, head: nn.Module, slots: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return self._compared(head, slots, total, drafts=True)

    def _compared(self, head: nn.Module, states: Tensor, total: Tensor, drafts: bool = False) -> tuple[Tensor, Tensor]:
        """Return the loss of states that predict the slots' tokens, by `total` [1], and its sum; hits of `drafts`."""
        task = self.task
        weights, targets = slot_weights(task.valid, self.options.gamma), task.scores

        def terms(
            states: Tensor, tokens: Tensor, weights: Tensor, uniforms: Tensor, teacher: Tensor | None
        ) -> Tensor:  # [n, 1]
            tokens, weights, logits, distribution = tokens[:, 0], weights[:, 0], head(states), None
            with torch.no_grad():
                if teacher is not None and targets is not None:
                    distribution = target_probs(targets.logits(teacher), **self.config.sampling)
                if drafts:
                    self._hits.append(self._drafts(logits.detach(), uniforms[:, 0]) == tokens)
            losses = slot_losses(logits, tokens, distribution, self.options.loss)
            return (losses.masked_fill(weights == 0, 0.0) * weights)[:, None]

        values = [task.tokens[..., None], weights[..., None], task.uniforms[..., None], targets and targets.states]
        loss, (summed,) = chunked_sums(terms, head, [LossSegment(states, values, 1 / total)], self.config.vocab_size)
        return loss, summed

    def _drafts(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Return what slots with logits [n, v] draft; categorical ones pick with the uniforms of their targets."""
        likely = logits.argmax(-1)
        if self.config.is_one_hot:
            return likely
        return torch.where(uniforms < 0, likely, pick(uniforms.clamp(min=0), logits.double().softmax(-1)))


@dataclass
class MaskReader(SlotReader):
    """The loss of mask slots (Samragh et al. 2025, arXiv 2507.11851): backbone's head, sampler head, and LCM.

    The sampler head learns from ordinary tokens, too: those whose states predict the same tokens as the masks. Latent
    consistency matching (LCM) is the mean of |z_mask - z_token|^2 over masks, z_token being such a detached state.
    """

    model: PTPForCausalLM

    def _of_slots(self, head: nn.Module, slots: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        anchors, sampled = self.task.anchors, list[Tensor]()
        assert anchors is not None
        if (sampler := self.model.sampler) is not None:
            before = self.model.get_input_embeddings()(self.task.completions.tokens[..., :-1])
            # its states come first: a loss in chunks goes backward at once, and then frees gathered shards
            sampled = [sampler(states, before) for states in (slots, anchors.to(slots))]
        parts = [self._compared(head, slots, total, drafts=not sampled), self._matched(slots, anchors, total)]
        parts += [self._compared(head, states, total, drafts=index == 0) for index, states in enumerate(sampled)]
        losses, sums = zip(*parts)
        return torch.stack(losses).sum(0), torch.stack(sums).sum(0)

    def _matched(self, slots: Tensor, anchors: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of latent consistency matching, and its sum [1]."""
        weights = slot_weights(self.task.valid, self.options.gamma).to(slots.device)
        wide = torch.promote_types(slots.dtype, torch.float32)
        distances = (slots.to(wide) - anchors.to(slots.device, wide)).square().sum(-1)
        summed = self.config.lcm_weight * (distances.masked_fill(weights == 0, 0.0) * weights).sum()[None]
        return (summed / total.to(summed)).sum(), summed.detach()
