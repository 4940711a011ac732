"""Laws over a window of n tokens: evaluation, conditioning, drawing. A law knows parameters, not where they come from.

Layouts: `leaf_logits` [..., n, r, v], a softmax over the last axis; any leading batch dimensions. Computation is in
float32 (float64 where the logits are float64), whatever the model's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class WindowLaw(ABC):
    """A probability law q over windows x_1..x_n of token ids."""

    window: int
    """n, the number of positions that are still free."""

    @abstractmethod
    def conditional_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """log q(X_i = . | x_1..x_{i-1}) for tokens [..., n]: [..., n, v]."""

    @abstractmethod
    def condition(self, first: torch.Tensor) -> WindowLaw:
        """The law of x_2..x_n given x_1 = `first` [...], in the same family."""

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """One window per batch element, [..., n]."""

    @abstractmethod
    def greedy(self) -> torch.Tensor:
        """Argmax of each exact conditional in turn, [..., n]."""

    def prefix_log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        """log q(x_1..x_i) for every i and tokens [..., n]: [..., n]."""
        conditionals = self.conditional_log_probs(tokens)
        return conditionals.gather(-1, tokens[..., None])[..., 0].cumsum(-1)

    def log_prob(self, tokens: torch.Tensor) -> torch.Tensor:
        """log q(x) for tokens [..., n]: [...]."""
        return self.prefix_log_prob(tokens)[..., -1]


class FactorisedLaw(WindowLaw):
    """FF: q(x) = prod_i leaf_i[x_i] (Gloeckle et al. 2024).

    Args:
        leaf_logits: [..., n, 1, v].
    """

    def __init__(self, leaf_logits: torch.Tensor) -> None:
        self.leaf_logits = leaf_logits
        self.window = leaf_logits.shape[-3]

    @property
    def log_leaves(self) -> torch.Tensor:
        """Normalised leaves, [..., n, v]."""
        logits = self.leaf_logits[..., 0, :]
        return logits.log_softmax(-1, dtype=_at_least_float32(logits.dtype))

    def conditional_log_probs(self, tokens: torch.Tensor) -> torch.Tensor:
        """log leaf_i, whatever the tokens."""
        return self.log_leaves.expand(*tokens.shape, -1)

    def condition(self, first: torch.Tensor) -> FactorisedLaw:
        """Independence: the other positions as they are."""
        return FactorisedLaw(self.leaf_logits[..., 1:, :, :])

    def sample(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Every position at once."""
        return race(self.log_leaves.exp(), generator)

    def greedy(self) -> torch.Tensor:
        """Argmax of every leaf; no normalisation needed."""
        return self.leaf_logits[..., 0, :].argmax(-1)


def circuit_from_logits(
    head_type: str,
    *,
    leaf_logits: torch.Tensor,
    root_logits: torch.Tensor | None = None,
    trans_logits: torch.Tensor | None = None,
    node_logits: torch.Tensor | None = None,
) -> WindowLaw:
    """Builds the law of a head family from unnormalised parameters.

    Args:
        head_type: One of `HEAD_TYPES`.
        leaf_logits: [..., n, r, v]; r = 1 for `"ff"`.
        root_logits: Of latent-variable families; `"ff"` has none.
        trans_logits: Of chains; `"ff"` has none.
        node_logits: Of trees; `"ff"` has none.

    Raises:
        ValueError: An unknown `head_type`, or parameters that the family does not have.

    Example:
        >>> law = circuit_from_logits("ff", leaf_logits=torch.zeros(4, 1, 10))
        >>> law.greedy().shape
        torch.Size([4])
    """
    if head_type != "ff":
        raise ValueError(f"head_type={head_type!r} is unknown; choose one of ff")
    latent = {"root_logits": root_logits, "trans_logits": trans_logits, "node_logits": node_logits}
    given = [name for name, value in latent.items() if value is not None]
    if given or leaf_logits.shape[-2] != 1:
        raise ValueError(f"'ff' has leaf_logits [..., n, 1, v] only; got {tuple(leaf_logits.shape)} and {given}")
    return FactorisedLaw(leaf_logits)


def race(weights: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draws from unnormalised weights [..., v] by an exponential race, argmax w / E with E ~ Exp(1): [...].

    Needs no cumulative sum (inaccurate in low precision) and no synchronisation; weights of 0 are never drawn.
    """
    # an exponential can round to 0, and 0 / 0 would win the argmax
    arrival = torch.empty_like(weights).exponential_(generator=generator).clamp_min_(torch.finfo(weights.dtype).tiny)
    return (weights / arrival).argmax(-1)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
