"""A counter-based generator: numbers that are a function of a key and of where they stand, whatever was drawn before.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), on int64 tensors that hold 32 bits
each. Every position of every row can be computed at once, again, in any order, and alike on every device. A leaf that
every room may use; knows no model.
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox(counters: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10.

    Args:
        counters: [..., 4] int64 of 32 bits each, the least significant word first.
        keys: [..., 2] int64 of 32 bits each.

    Returns:
        [..., 4] int64 of 32 random bits each.
    """
    one, two, three, four = counters.unbind(-1)
    low_key, high_key = keys.unbind(-1)
    for _ in range(_ROUNDS):
        # an int64 product of two 32-bit words has the right 64 bits, although it may be shown as negative
        first, third = one * _MULTIPLIERS[0], three * _MULTIPLIERS[1]
        one, three = (third >> 32) & _LOW ^ two ^ low_key, (first >> 32) & _LOW ^ four ^ high_key
        two, four = third & _LOW, first & _LOW
        low_key, high_key = (low_key + _WEYL[0]) & _LOW, (high_key + _WEYL[1]) & _LOW
    return torch.stack([one, two, three, four], dim=-1)


def stream_uniforms(streams: torch.Tensor, start: int, count: int, purpose: int = 0) -> torch.Tensor:
    """Uniforms `start` .. `start + count - 1` of streams.

    Args:
        streams: [B, 2] int64: a seed of 64 bits, and the number (of 32 bits) of one of its streams.
        start: First position.
        count: Positions.
        purpose: Streams of different purposes have nothing to do with each other.

    Returns:
        [B, count] float32 in [0, 1), multiples of 2^-24, on the device of `streams`.
    """
    device = streams.device
    blocks = torch.arange(start // 4, (start + count + 3) // 4, device=device).expand(len(streams), -1)
    number = streams[:, 1:].expand_as(blocks)
    counters = torch.stack([blocks & _LOW, blocks >> 32, number, torch.full_like(blocks, purpose)], dim=-1)
    keys = torch.stack([streams[:, 0] & _LOW, (streams[:, 0] >> 32) & _LOW], dim=-1)
    bits = philox(counters, keys[:, None]).flatten(1)
    return ((bits >> 8).float() * 2.0**-24)[:, start % 4 : start % 4 + count]
