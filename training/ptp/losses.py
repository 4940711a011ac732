"""Losses of parallel token prediction: the distribution that is verified, and slots compared with it. Knows no
model."""

from __future__ import annotations

import torch

from .options import LOSSES

_FLOOR = 1e-6
_CANDIDATES = 64


def target_probs(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """The distribution that decoding verifies: what transformers' warpers leave, in their order, without sorting a
    vocabulary.

    Args:
        logits: [..., v].
        temperature: Above 0.
        top_k: Tokens to keep (and those that tie with the last); 0 keeps all.
        top_p: Mass to keep; 1 keeps all.

    Returns:
        [..., v] float64 probabilities.
    """
    scores = logits.double() / temperature
    if top_k and top_k < scores.shape[-1]:
        least = scores.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    distribution = scores.softmax(-1)
    return distribution if top_p >= 1.0 else _nucleus(distribution, top_p)


def _nucleus(distribution: torch.Tensor, top_p: float) -> torch.Tensor:
    """The most likely tokens of a distribution [..., v] that hold a mass of `top_p`, the last one crossing it, made a
    distribution."""
    count = min(_CANDIDATES, distribution.shape[-1])
    while True:
        values, tokens = distribution.topk(count, dim=-1)
        before = values.cumsum(-1) - values
        if count == distribution.shape[-1] or bool((before[..., -1] >= top_p).all()):
            break
        count = min(8 * count, distribution.shape[-1])
    kept = values.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(distribution).scatter_(-1, tokens, kept / kept.sum(-1, keepdim=True))


def slot_losses(
    logits: torch.Tensor, tokens: torch.Tensor, distribution: torch.Tensor | None = None, kind: str = "ce"
) -> torch.Tensor:
    """The loss of every slot; each kind has its minimum where the slot's distribution q equals the target p.

    Args:
        logits: [..., v] of the slots.
        tokens: [...] int64, the token that each slot should predict.
        distribution: [..., v], the target p; None where it is certain of the token.
        kind: `"ce"`: -log q(token), whatever p; `"kl"`: KL(p | q); `"reverse_kl"`: KL(q | p), with p floored at 1e-6,
            because folded distributions have zeros; `"bce"`: binary cross-entropy of every token's probability,
            -sum_v p log q + (1 - p) log(1 - q).

    Returns:
        [...] float32 (float64 for float64 logits), in nats.

    Raises:
        ValueError: An unknown kind.
    """
    if kind not in LOSSES:
        raise ValueError(f"loss={kind!r} is unknown; choose one of {', '.join(LOSSES)}")
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


def slot_weights(valid: torch.Tensor, gamma: float = 1.0) -> torch.Tensor:
    """What slots weigh in a loss: gamma^k where valid [..., L], else 0."""
    return torch.where(valid, gamma ** torch.arange(valid.shape[-1], device=valid.device), 0.0)


def _log_complement(log_q: torch.Tensor) -> torch.Tensor:
    """log(1 - q), kept off q = 1, where it and its gradient are infinite."""
    return torch.log(-torch.expm1(log_q.clamp(max=-_FLOOR)))
