"""How a token is drawn from a law: by a race, or by the uniform that picks it. A leaf that every room may use.

A token is a function of a uniform u in [0, 1): with F the cumulative law, Pick(u) is the first token j with F_j > u
(PTP paper, Eq. 3). Cumulative sums are float64, whatever the law's dtype: in float32 they misplace picks over large
vocabularies. Knows no model.
"""

from __future__ import annotations

import torch


def race(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draws from unnormalised weights [..., v] by an exponential race, argmax w / E with E ~ Exp(1): [...].

    Needs no cumulative sum (inaccurate in low precision) and no synchronisation; weights of 0 are never drawn.
    """
    return _speeds(weights, generator).argmax(-1)


def winner(weights: torch.Tensor, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What `race` returns, and the winner's speed [...]: NaN where a weight is."""
    best = _speeds(weights, generator).max(-1)
    return best.indices, best.values


def race_order(weights: torch.Tensor, count: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """The first `count` of the race that `race` takes the winner of: draws without replacement, in order.

    Args:
        weights: [..., v] unnormalised; where fewer than `count` are positive, weights of 0 come last.
        count: Draws, at most v.
        generator: Source of randomness.

    Returns:
        [..., count] int64, all different.
    """
    return _speeds(weights, generator).topk(count).indices


def pick(u: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF picks: the first token with positive probability whose cumulative probability exceeds u.

    Args:
        u: [...] in [0, 1).
        probs: [..., v] probabilities; where rounding leaves u beyond their sum, the last possible token is picked.

    Returns:
        [...] int64.
    """
    cumulative = probs.double().cumsum(-1)
    index = torch.searchsorted(cumulative, u.double()[..., None].contiguous(), right=True)[..., 0]
    return torch.minimum(index, _last_possible(probs))


def interval(token: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The uniforms [low, high) that pick a token.

    Args:
        token: [...] int64.
        probs: [..., v] probabilities.

    Returns:
        low and high, [...] float64; the last possible token's interval ends at 1, an impossible token's is empty.
    """
    cumulative = torch.nn.functional.pad(probs.double().cumsum(-1), (1, 0))
    low = cumulative.gather(-1, token[..., None])[..., 0]
    high = cumulative.gather(-1, token[..., None] + 1)[..., 0]
    return low, torch.where(token == _last_possible(probs), torch.ones_like(high), high)


def _speeds(weights: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """w / E with E ~ Exp(1), by which the tokens of a race arrive."""
    arrival = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device).exponential_(generator=generator)
    # an exponential can round to 0, and 0 / 0 would win the race
    return weights / arrival.clamp_min_(torch.finfo(weights.dtype).tiny)


def _last_possible(probs: torch.Tensor) -> torch.Tensor:
    """The last token of positive probability, [...]."""
    return probs.shape[-1] - 1 - (probs > 0).flip(-1).long().argmax(-1)
