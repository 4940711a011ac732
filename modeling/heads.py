"""Heads: modules from a hidden state to the parameters of a law over the next n tokens. They know no backbone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..configuration import MTPHeadConfig
from .circuits import circuit_from_logits
from .window_law import WindowLaw


class FFHead(nn.Linear):
    """Independent linear heads in the released EvaByte parametrisation: one matrix, head-major.

    Rows h V .. (h + 1) V - 1 of `weight` [N V, D] belong to head h, which predicts x_{t+1+h}.

    Args:
        hidden_size: D.
        vocab_size: V.
        num_heads: N.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads * vocab_size, bias=False)
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.target_frozen = False

    def forward(self, hidden_states: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Logits of the first `num_heads` heads (all by default).

        Args:
            hidden_states: [..., D].
            num_heads: How many heads to evaluate; 1 costs what an ordinary `lm_head` costs.

        Returns:
            [..., num_heads, V], in the dtype of the weights.
        """
        count = self.num_heads if num_heads is None else num_heads
        weight = self.weight[: count * self.vocab_size]
        if self.target_frozen and torch.is_grad_enabled():
            weight = torch.cat([weight[: self.vocab_size].detach(), weight[self.vocab_size :]])
        return nn.functional.linear(hidden_states, weight).unflatten(-1, (count, self.vocab_size))

    def extend(self, num_heads: int, std: float) -> None:
        """Appends heads, drawn from N(0, std^2), until there are `num_heads`; the old ones stay as they are."""
        missing = num_heads - self.num_heads
        if missing <= 0:
            return
        new = torch.randn(missing * self.vocab_size, self.in_features, device=self.weight.device) * std
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), new.to(self.weight.dtype)]))
        self.num_heads, self.out_features = num_heads, num_heads * self.vocab_size


class SharedHead(nn.Module):
    """Independent heads on a shared, frozen unembedding W: logits of head i are W A_i h, with A_i = I at the start.

    Memory: N d^2 parameters, whatever the vocabulary.

    Args:
        hidden_size: d.
        vocab_size: V.
        num_heads: N.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__()
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.maps = nn.Parameter(torch.eye(hidden_size).repeat(num_heads, 1, 1))
        self.unembed: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor, num_heads: int | None = None) -> torch.Tensor:
        """Logits [..., num_heads, V] of hidden states [..., d].

        Raises:
            RuntimeError: No unembedding was given (`MTPHeads.attach` gives the backbone's).
        """
        if self.unembed is None:
            raise RuntimeError("these heads share their backbone's unembedding: call attach(base) first")
        return self.unembed(torch.einsum("...d,nde->...ne", hidden_states, self.maps[:num_heads]))


def build_head(config: MTPHeadConfig, hidden_size: int, vocab_size: int, num_heads: int | None = None) -> nn.Module:
    """The head module that `config` describes; `num_heads` may exceed the window (released FF heads keep all rows)."""
    families = {("ff", "full"): FFHead, ("ff", "shared"): SharedHead}
    return families[config.head_type, config.leaf](hidden_size, vocab_size, num_heads or config.window)


def window_law(head: nn.Module, config: MTPHeadConfig, hidden_states: torch.Tensor) -> WindowLaw:
    """The law of the next `config.window` tokens given hidden states [..., D], in float32 (float64 kept)."""
    logits = head(hidden_states, config.window)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return circuit_from_logits(config.head_type, leaf_logits=logits.unsqueeze(-2), dtype=dtype)
