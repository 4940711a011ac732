"""Drawing tokens from distributions: freely, or by the uniform that picks them; and counter-based uniforms.

A token is a function of a uniform u in [0, 1): with F the cumulative distribution, Pick(u) is the first token j with
F_j > u (PTP paper, Eq. 3). Cumulative sums are float64: in float32 they misplace picks over large vocabularies. CPUs
draw freely by one uniform per token; accelerators by an exponential race, argmax w / E with E ~ Exp(1), which saves the
cumulative sum. Neither waits for the device, and no weight of 0 is ever drawn.

Counter-based uniforms (Philox4x32-10; Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") are a function
of a key and a position: they can be computed in any order, and again. Words of 32 bits are held in int64 tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return one token from each of the unnormalised distributions [..., v]: [...] int64."""
    return draw_checked(weights, generator)[0]


def draw_checked(weights: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return the tokens of `draw`, and a number [...] that is NaN where a weight is."""
    return (picked if weights.device.type == "cpu" else raced)(weights, generator)


def picked(weights: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return `draw_checked` by one uniform per draw; the number is the sum of the weights."""
    cumulative = weights.cumsum(-1, dtype=torch.float64).contiguous()  # [..., v]
    total = cumulative[..., -1:]  # [..., 1]
    thresholds = torch.rand(total.shape, dtype=torch.float64, device=weights.device, generator=generator).mul_(total)
    # no sum exceeds its threshold where all weights are 0, or NaN
    tokens = torch.searchsorted(cumulative, thresholds, right=True).clamp_max_(weights.shape[-1] - 1)  # [..., 1]
    return tokens[..., 0], total[..., 0]


def raced(weights: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return `draw_checked` by a race of all tokens; the number is the winner's speed."""
    best = _speeds(weights, generator).max(-1)  # [...] each
    return best.indices, best.values


def race_order(weights: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Return the first `count` of an exponential race of weights [..., v]: draws without replacement, in order."""
    return _speeds(weights, generator).topk(count).indices


def pick(u: Tensor, probs: Tensor) -> Tensor:
    """Return the inverse-CDF picks: the first possible token whose cumulative probability exceeds u [...] in [0, 1).

    Where rounding leaves u beyond the sum of probs [..., v], the last possible token is picked.
    """
    cumulative = probs.double().cumsum(-1)  # [..., v]
    index = torch.searchsorted(cumulative, u.double()[..., None].contiguous(), right=True)[..., 0]  # [...]
    return torch.minimum(index, _last_possible(probs))


def interval(token: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the uniforms [low, high) that pick a token [...] of probs [..., v], [...] float64.

    The last possible token's interval ends at 1, an impossible token's is empty.
    """
    cumulative = probs.double().cumsum(-1)  # [..., v]: F up to every token
    before = cumulative.gather(-1, (token - 1).clamp(min=0)[..., None])[..., 0]  # [...]
    high = cumulative.gather(-1, token[..., None])[..., 0]  # [...]
    return before.masked_fill(token == 0, 0.0), high.masked_fill(token == _last_possible(probs), 1.0)


def _speeds(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return w / E with E ~ Exp(1), the order in which the tokens of a race arrive."""
    dtype = torch.float64 if weights.dtype == torch.float64 else torch.float32  # float16 would round E to 0
    return weights / exponentials(weights.shape, dtype, weights.device, generator)


def exponentials(
    shape: torch.Size | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return draws of Exp(1), never 0: 0 / 0 would win a race."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device).exponential_(generator=generator)
    # a third of the time of `exponential_`; uniforms of 53 bits are below 1, but float16 would round E to 0
    uniforms = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
    return uniforms.log_().neg_().clamp_(min=torch.finfo(dtype).tiny).to(dtype)


def _last_possible(probs: Tensor) -> Tensor:
    """Return the last token of positive probability, [...]."""
    possible = (probs > 0).flip(-1).view(torch.uint8)  # [..., v], from the end: argmax is the first that is possible
    return probs.shape[-1] - 1 - possible.argmax(-1)


_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox(counters: Tensor, keys: Tensor) -> Tensor:
    """Return Philox4x32-10 of counters [..., 4] and keys [..., 2], words of 32 bits in int64: [..., 4] random words."""
    one, two, three, four = counters.unbind(-1)  # [...] each
    low_key, high_key = keys.unbind(-1)
    for _ in range(_ROUNDS):
        # an int64 product of two 32-bit words has the right 64 bits, although it may be shown as negative
        first, third = one * _MULTIPLIERS[0], three * _MULTIPLIERS[1]
        one, three = (third >> 32) & _LOW ^ two ^ low_key, (first >> 32) & _LOW ^ four ^ high_key
        two, four = third & _LOW, first & _LOW
        low_key, high_key = (low_key + _WEYL[0]) & _LOW, (high_key + _WEYL[1]) & _LOW
    return torch.stack([one, two, three, four], dim=-1)


def stream_uniforms(streams: Tensor, start: int, count: int, purpose: int = 0) -> Tensor:
    """Return uniforms `start` .. `start + count - 1` of streams, [B, count] float32 in [0, 1), multiples of 2^-24.

    `streams` [B, 2] are a seed of 64 bits, and the number (of 32 bits) of one of its streams. Those of different
    purposes are independent.
    """
    device = streams.device
    blocks = torch.arange(start // 4, (start + count + 3) // 4, device=device).expand(len(streams), -1)
    number = streams[:, 1:].expand_as(blocks)  # [B, n]
    counters = torch.stack([blocks & _LOW, blocks >> 32, number, torch.full_like(blocks, purpose)], dim=-1)  # [B, n, 4]
    keys = torch.stack([streams[:, 0] & _LOW, (streams[:, 0] >> 32) & _LOW], dim=-1)  # [B, 2]
    bits = philox(counters, keys[:, None]).flatten(1)  # [B, n * 4]
    return ((bits >> 8).float() * 2.0**-24)[:, start % 4 : start % 4 + count]  # 24 bits: float32 holds them
