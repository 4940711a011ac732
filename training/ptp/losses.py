"""The losses of slots, and their options."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...configuration.fields import check_values

LOSSES, SEQUENCES = ("ce", "kl", "reverse_kl", "bce"), ("dataset", "student")


@dataclass(frozen=True)
class PTPOptions:
    """Options of `PTPTrainer`.

    Args:
        loss: `"ce"`, `"kl"`, `"reverse_kl"` or `"bce"` (`slot_losses`). One-hot slots know their token, so that their
            target is one-hot; categorical ones have the teacher's distribution as target, or its sample with `"ce"`.
        sequences: `"dataset"`: completions are pieces of the data; `"student"`: the student writes them itself, after
            other training alone, as one that ignores its uniforms would keep ignoring them.
        completions: C, completions per sequence, each from a random start of its own.
        concentration: b; in training, a uniform lies at z ~ Beta(b, b) in the interval that picks its token. With 1,
            all positions are equally likely, as in decoding; the public code has 0.3, which prefers the ends.
        gamma: Slot k weighs gamma^k.
        greedy_share: Share of the completions that are the teacher's most likely continuations, for students with
            `config.greedy`. 0 leaves greedy decoding unlearned.
        base_weight: Weight of the backbone's own next-token loss on the data, for backbones that are trained too.

    Example:
        >>> PTPOptions(loss="kl", completions=16).concentration
        1.0
    """

    loss: str = "ce"
    sequences: str = "dataset"
    completions: int = 16
    concentration: float = 1.0
    gamma: float = 1.0
    base_weight: float = 0.0
    greedy_share: float = 0.2

    def __post_init__(self) -> None:
        choices = {"loss": LOSSES, "sequences": SEQUENCES}
        ranges = {"completions": "[1, inf)", "concentration": "(0, inf)", "gamma": "(0, 1]", "greedy_share": "[0, 1)"}
        check_values(self, choices, ranges | {"base_weight": "[0, inf)"})


_FLOOR = 1e-6
_CANDIDATES = 64


def target_probs(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return the distribution that decoding verifies, [..., v] float64: of transformers' warpers, without a sort."""
    scores = logits.double()
    if temperature != 1:
        scores = scores / temperature
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
    """Return the loss of every slot [...]; each kind has its minimum where its distribution q equals the target p.

    `distribution` [..., v] is p; None: it is one-hot at `tokens` [...]. `"ce"`: -log q(token), whatever p; `"kl"`:
    KL(p | q); `"reverse_kl"`: KL(q | p), with p floored at 1e-6, because folded distributions have zeros; `"bce"`:
    binary cross-entropy of every token's probability, -sum_v p log q + (1 - p) log(1 - q).
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
    complement = torch.log(-torch.expm1(log_q.clamp(max=-_FLOOR)))  # log(1 - q), bounded near q = 1
    return -(p * log_q + (1 - p) * complement).sum(-1)


def slot_weights(valid: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the weights of slots in a loss: gamma^k where valid [..., L], else 0."""
    return torch.where(valid, gamma ** torch.arange(valid.shape[-1], device=valid.device), 0.0)
