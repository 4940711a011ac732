"""Uniforms that pick a token, their features as networks read them, and the choice among vectors of them.

`sampling` defines what a uniform picks. Imports no model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import interval

FEATURES = ("bits", "arithmetic", "threshold", "scalar", "interpolate")
"""Kinds of `uniform_features`."""
_LAST = 1 - 2**-24  # the last float32 below 1


def uniform_for(token: Tensor, probs: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return `uniform_between` of the interval that picks a token [...] in probs [..., v], at its share z [...]."""
    return uniform_between(*interval(token, probs), z)


def uniform_between(low: Tensor, high: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return a float32 in [low, high), at the share z.

    Rounding low + z (high - low) to float32 may leave the interval; the result is clamped to the floats inside it.

    Args:
        low: [...] float64.
        high: [...] float64.
        z: [...] in [0, 1].

    Returns:
        u [...] float32 in [0, 1), and valid [...] bool: False where the interval is empty or holds no float32.
    """
    first, last = low.float(), high.float()
    # rounding to float32 may have left the interval, on either side
    first = torch.where(first.double() < low, torch.nextafter(first, torch.ones_like(first)), first)
    last = torch.where(last.double() >= high, torch.nextafter(last, torch.zeros_like(last)), last)
    u = (low + (high - low) * z.double()).float()
    inside = torch.minimum(torch.maximum(u, first), last)
    return inside.clamp(0, _LAST), (low < high) & (first <= last)


def beta_shares(like: Tensor, concentration: float, generator: torch.Generator | None = None) -> Tensor:
    """Return shares z ~ Beta(b, b) of intervals, like `like` [...], in float64: b < 1 favours borders, 1 is uniform."""
    if concentration == 1:
        return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float64)
    shape = torch.full(like.shape, concentration, dtype=torch.float64, device=like.device)  # [...]
    one, other = (torch._standard_gamma(shape, generator=generator) for _ in range(2))
    return (one / (one + other)).nan_to_num(nan=0.5)


def uniform_features(u: Tensor, kind: str, dim: int) -> Tensor:
    """Return the features of uniforms, as networks read them.

    Args:
        u: [...] in [0, 1], float32 (float64 for more digits).
        kind: `"bits"`: the 32 bits of u as a float32, most significant first (PTP paper, Eq. 14); `"arithmetic"`:
            1{frac(u 2^(i-1)) < 1/2} for i = 1..dim, the complements of its binary digits; `"threshold"`:
            1{u <= i / dim}; `"scalar"`: u itself; `"interpolate"`: weights of three anchors at 0, 1/2 and 1.
        dim: Number of features: 32 for `"bits"`, 1 for `"scalar"`, 3 for `"interpolate"`.

    Returns:
        [..., dim] float32.

    Raises:
        ValueError: An unknown kind, or a `dim` that it cannot have.
    """
    if kind not in FEATURES:
        raise ValueError(f"features={kind!r} is unknown; choose one of {', '.join(FEATURES)}")
    fixed = {"bits": 32, "scalar": 1, "interpolate": 3}.get(kind, dim)
    if dim != fixed or dim < 1:
        raise ValueError(f"features={kind!r} has {fixed} dimensions, not {dim}")
    if kind == "bits":
        shifts = torch.arange(31, -1, -1, device=u.device, dtype=torch.int32)  # [32]
        return ((u.float().contiguous().view(torch.int32)[..., None] >> shifts) & 1).float()  # [..., 32]
    if kind == "scalar":  # [..., 1]
        return u.float()[..., None]
    steps = torch.arange(1, dim + 1, device=u.device, dtype=torch.float64)  # [dim]
    if kind == "arithmetic":
        return ((u.double()[..., None] * 2 ** (steps - 1)).frac() < 0.5).float()  # [..., dim]
    if kind == "threshold":  # [..., dim]
        return (u.double()[..., None] <= steps / dim).float()
    # hat functions around the anchors at 0, 1/2 and 1
    return (1 - (2 * u.double()[..., None] - (steps - 1)).abs()).clamp(min=0).float()


def best_of(teacher_positions: Tensor, num_correct: Tensor) -> Tensor:
    """Return the index of the best of M uniform vectors: its picks lie nearest the centres of the target's intervals.

    The score is sum_k |v_k - 1/2| over positions v_k of u_k in the interval of the *target's* pick, and the least wins
    (the paper's Eq. 18 has the sign reversed). v is independent of what is picked, so choosing by it changes no
    distribution, if uniforms after the first mismatch are drawn afresh.

    Args:
        teacher_positions: [..., M, N] in [0, 1].
        num_correct: [..., M] correct drafts; breaks ties, where more are better.

    Returns:
        [...] int64 index into M.
    """
    score = (teacher_positions.double() - 0.5).abs().sum(-1)  # [..., M]
    return (score - 1e-12 * num_correct).argmin(-1)
