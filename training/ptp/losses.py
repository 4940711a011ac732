"""The losses of slots, and whether their drafts are right: computed from hidden states in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...configuration.ptp import PTPConfig
from ...generation.tensors.sampling import pick
from ...modeling import PTPForCausalLM
from ...modeling.common.chunks import LossSegment, chunked_sums
from ...modeling.common.loss_options import check_values
from ...modeling.heads.losses import IGNORE

METHODS, LOSSES, SEQUENCES = ("distil", "inverse"), ("ce", "kl", "reverse_kl", "bce"), ("dataset", "student")
"""Values of fields of `PTPOptions`."""


@dataclass(frozen=True)
class PTPOptions:
    """Options of `PTPTrainer`.

    Args:
        method: `"distil"`: uniforms lie in the intervals of a teacher's distribution (PTP paper, Algorithm 2);
            `"inverse"`: in those of the student's own, computed one after the other (Algorithm 3, categorical slots, no
                teacher).
        loss: `"ce"`, `"kl"`, `"reverse_kl"` or `"bce"` (`slot_losses`). One-hot slots know their token, so that their
            target is certain; categorical ones have the teacher's distribution as target, or its sample with `"ce"`.
        sequences: `"dataset"`: completions are pieces of the data; `"student"`: the student writes every completion
            itself. Use `"student"` only after other training, because a student that ignores its uniforms would keep
            ignoring them. `training.regenerate` writes data of the teacher.
        completions: C, completions per sequence, each from a random start of its own.
        concentration: In training, a uniform lies at z ~ Beta(b, b) in the interval that picks its token, and this is
            b. 1 makes all positions equally likely, as they are in decoding, and evaluation always takes 1. The
            public code trains with 0.3, which prefers the ends of intervals; on the benchmark's chain 1 is better.
        gamma: Slot k weighs gamma^k.
        greedy_share: Share of the completions that are the teacher's most likely continuations, which slots learn
            without uniforms; for students with `config.greedy`. 0 leaves greedy decoding unlearned.
        base_weight: Weight of the backbone's own next-token loss on the data, for backbones that are trained too.

    Raises:
        ValueError: A value out of range, or options that exclude each other.

    Example:
        >>> PTPOptions(loss="kl", completions=16).concentration
        1.0
    """

    method: str = "distil"
    loss: str = "ce"
    sequences: str = "dataset"
    completions: int = 16
    concentration: float = 1.0
    gamma: float = 1.0
    base_weight: float = 0.0
    greedy_share: float = 0.2

    def __post_init__(self) -> None:
        choices = {"method": METHODS, "loss": LOSSES, "sequences": SEQUENCES}
        ranges = {"completions": "[1, inf)", "concentration": "(0, inf)", "gamma": "(0, 1]", "greedy_share": "[0, 1)"}
        check_values(self, choices, ranges | {"base_weight": "[0, inf)"})
        for name, value in {"loss": "ce", "sequences": "dataset"}.items():  # Algorithm 3: from data, by likelihood
            if self.method == "inverse" and vars(self)[name] != value:
                raise ValueError(f"method='inverse' has {name}={value!r}, not {vars(self)[name]!r}")


if TYPE_CHECKING:
    from .tasks import Task

_FLOOR = 1e-6
_CANDIDATES = 64


def target_probs(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return the distribution that decoding verifies: that of transformers' warpers, without sorting the vocabulary.

    Args:
        logits: [..., v].
        temperature: Above 0.
        top_k: Tokens to retain (and those that tie with the last); 0 retains all.
        top_p: Mass to retain; 1 retains all.

    Returns:
        [..., v] float64 probabilities.
    """
    scores = logits.double() / temperature
    if top_k and top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    distribution = scores.softmax(-1)
    return distribution if top_p >= 1.0 else _nucleus(distribution, top_p)


def _nucleus(distribution: Tensor, top_p: float) -> Tensor:
    """Return a distribution [..., v] cut to its likeliest tokens that reach a mass of `top_p`, renormalised."""
    count = min(_CANDIDATES, distribution.shape[-1])
    while True:
        values, tokens = distribution.topk(count, dim=-1)
        before = values.cumsum(-1) - values
        if count == distribution.shape[-1] or bool((before[..., -1] >= top_p).all()):
            break
        count = min(8 * count, distribution.shape[-1])
    retained = values.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(distribution).scatter_(-1, tokens, retained / retained.sum(-1, keepdim=True))


def slot_losses(logits: Tensor, tokens: Tensor, distribution: Tensor | None = None, kind: str = "ce") -> Tensor:
    """Return the loss of every slot; each kind has its minimum where the slot's distribution q equals the target p.

    Args:
        logits: [..., v] of the slots.
        tokens: [...] int64, the token that each slot should predict.
        distribution: [..., v], the target p; None if it is certain of the token.
        kind: `"ce"`: -log q(token), whatever p; `"kl"`: KL(p | q); `"reverse_kl"`: KL(q | p), with p floored at 1e-6,
            because folded distributions have zeros; `"bce"`: binary cross-entropy of every token's probability,
            -sum_v p log q + (1 - p) log(1 - q).

    Returns:
        [...] float32 (float64 for float64 logits), in nats.
    """
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    if kind == "ce":
        return -log_q.gather(-1, tokens[..., None])[..., 0]
    p = (torch.nn.functional.one_hot(tokens, logits.shape[-1]) if distribution is None else distribution).to(log_q)
    if kind == "kl":
        return (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    if kind == "reverse_kl":
        floored = p.clamp(min=_FLOOR)
        return (log_q.exp() * (log_q - (floored / floored.sum(-1, keepdim=True)).log())).sum(-1)
    return -(p * log_q + (1 - p) * _log_complement(log_q)).sum(-1)


def slot_weights(valid: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the weights of slots in a loss: gamma^k where valid [..., L], else 0."""
    return torch.where(valid, gamma ** torch.arange(valid.shape[-1], device=valid.device), 0.0)


def _log_complement(log_q: Tensor) -> Tensor:
    """Return log(1 - q), bounded near q = 1, where it and its gradient are infinite."""
    return torch.log(-torch.expm1(log_q.clamp(max=-_FLOOR)))


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
        task, totals = self.task, self.totals.clamp(min=torch.finfo(torch.float32).tiny).float()
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
    return nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="none")


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
