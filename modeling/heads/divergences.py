"""How far a drafter's distribution q is from the verifier's distribution p, at one place: what distillation minimises.

All are computed from log-probabilities and are finite and differentiable where q is. The acceptance of a drafted token
is alpha = sum_x min(p(x), q(x)) (Leviathan et al. 2023), so total variation is 1 - alpha, and LK is -log alpha.
"""

from __future__ import annotations

import torch

DIVERGENCES = ("cross_entropy", "kl", "reverse_kl", "tv", "lk", "lk_kl")
"""Cross-entropy of q under p; KL(p || q); KL(q || p); total variation; LK; LK with a KL that fades as alpha grows."""
_KL_SCALE, _KL_DECAY = 1.0, 3.0


def divergence(kind: str, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """How far q is from p, in nats (total variation: a probability).

    Args:
        kind: One of `DIVERGENCES`. `"lk_kl"` is -log alpha + exp(-3 alpha) KL(p || q), with alpha of the same place and
            detached: KL leads where q is still far from p.
        log_p: [..., v], normalised.
        log_q: [..., v], normalised; may be -inf where p is 0.

    Returns:
        [...].
    """
    if kind in ("cross_entropy", "kl"):
        p = log_p.exp()
        if kind == "kl":
            log_q = log_q - log_p
        return -torch.where(p > 0, p * log_q, 0.0).sum(-1)
    if kind == "reverse_kl":
        q = log_q.exp()
        return torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)
    if kind == "tv":
        return 1 - acceptance(log_p, log_q)
    lk = -log_acceptance(log_p, log_q)
    if kind == "lk":
        return lk
    fading = (-_KL_DECAY * (-lk).detach().exp()).exp()
    return lk + _KL_SCALE * fading * divergence("kl", log_p, log_q)


def acceptance(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """alpha = sum_x min(p(x), q(x)), [...]: the probability that a token drawn from q is kept."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def log_acceptance(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log alpha, [...], without underflow where p and q hardly meet."""
    return torch.minimum(log_p, log_q).logsumexp(-1)


def head_and_rest(log_p: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest tokens of a distribution, and all others as one.

    Lumping tokens together never makes two distributions look further apart: every KL is a lower bound of the true one,
    and with m the mass of the rest under p, TV - m <= TV of the lumped distributions <= TV.

    Args:
        log_p: [..., V], normalised.
        k: At least 1.

    Returns:
        ids [..., k] int64; log-probabilities [..., k + 1], the last of the rest, whose exponential is m.
    """
    best, ids = log_p.topk(min(k, log_p.shape[-1]), dim=-1)
    return ids, torch.cat([best, _log_rest(best)], -1)


def lumped(log_q: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A distribution [..., V] at the tokens `ids` [..., k], and all others as one: [..., k + 1]."""
    chosen = log_q.gather(-1, ids)
    return torch.cat([chosen, _log_rest(chosen)], -1)


def _log_rest(chosen: torch.Tensor) -> torch.Tensor:
    """log(1 - sum), kept away from -inf, where gradients end."""
    tiny = torch.finfo(chosen.dtype).eps ** 2
    return (1 - chosen.exp().sum(-1, keepdim=True)).clamp(min=tiny).log()
