"""Independent heads with unembeddings of their own: one matrix, as EvaByte's checkpoints hold it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import initialization as init

from .backbone_parts import BackboneParts
from .chunks import SummedLinear, WeightTotal


class FFHead(nn.Module):
    """Independent linear heads in the released EvaByte parametrisation: one matrix, head-major.

    Rows h V .. (h + 1) V - 1 of `weight` [N V, D] belong to head h, which predicts x_{t+1+h}.

    Args:
        hidden_size: D.
        vocab_size: V.
        num_heads: N.
    """

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads * vocab_size, hidden_size))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)  # as in `nn.Linear`, which peft would adapt in the wrong shape
        self.bias = None  # asked for by those who take the unembedding of a model for a linear layer, TRL for one
        self.vocab_size, self.num_heads = vocab_size, num_heads
        self.target_frozen = False
        self.weight_total: WeightTotal | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        num_heads: int | None = None,
        backbone: BackboneParts | None = None,
        start: int = 0,
    ) -> torch.Tensor:
        """Logits of the first `num_heads` heads (all by default).

        Args:
            hidden_states: [..., D].
            num_heads: How many heads to evaluate; 1 costs what an ordinary `lm_head` costs.
            backbone: Not needed: these heads have unembeddings of their own.
            start: So many of them are left out at the beginning; not in training.

        Returns:
            [..., num_heads - start, V], in the dtype of the weights.
        """
        count = self.num_heads if num_heads is None else num_heads
        weight = self.weight[start * self.vocab_size : count * self.vocab_size]
        if self.weight_total is not None:
            total, skip = self.weight_total, self.vocab_size if self.target_frozen else 0
            logits = SummedLinear.apply(hidden_states, weight.detach(), total.total, total.anchor, skip)
            return logits.unflatten(-1, (count, self.vocab_size))
        if self.target_frozen and torch.is_grad_enabled():
            weight = torch.cat([weight[: self.vocab_size].detach(), weight[self.vocab_size :]])
        return nn.functional.linear(hidden_states, weight).unflatten(-1, (count - start, self.vocab_size))

    def extend(self, num_heads: int, std: float) -> None:
        """Appends heads, drawn from N(0, std^2), until there are `num_heads`; the old ones stay as they are."""
        missing = num_heads - self.num_heads
        if missing <= 0:
            return
        new = torch.randn(missing * self.vocab_size, self.weight.shape[1], device=self.weight.device) * std
        self.weight = nn.Parameter(torch.cat([self.weight.detach(), new.to(self.weight.dtype)]))
        self.num_heads = num_heads

    @torch.no_grad()
    def resize(self, vocab_size: int, std: float | None) -> None:
        """Changes the number of token ids; every head keeps its rows.

        Args:
            vocab_size: V from now on; rows beyond it are dropped.
            std: New rows are drawn from N(0, std^2); None: they are the mean of their head's old rows.
        """
        rows = self.weight.unflatten(0, (self.num_heads, self.vocab_size))
        new = rows.mean(1, keepdim=True).repeat(1, max(vocab_size - self.vocab_size, 0), 1)
        new = new if std is None else torch.randn_like(new) * std
        rows = torch.cat([rows[:, :vocab_size], new], dim=1).flatten(0, 1)
        self.weight, self.vocab_size = nn.Parameter(rows, self.weight.requires_grad), vocab_size

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Draws the weights from N(0, std^2)."""
        init.normal_(self.weight, std=std)
