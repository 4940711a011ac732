"""How the heads of the box are trained: on hidden states of the frozen backbone that are computed once for all heads.

The same states, in the same order, for the same time: what differs between the heads is the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...modeling import EvaByteForMTPC
from .loop import Batch
from .model import WINDOW
from .text import RowOrder

STATES_PER_ROW = 256
"""States that count as one row for the loop."""
_EVERY = 2  # of the positions of a window are kept
_GAMMA = 0.9


@dataclass(frozen=True)
class States:
    """Hidden states of a frozen backbone and the bytes that follow each.

    Attributes:
        hidden: [N, d].
        tokens: [N, n] int64.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor

    def batch(self, first: int, count: int, _: int) -> Batch:
        """States of `count` rows from row number `first` on; after the last row comes the first."""
        rows = len(self.hidden) // STATES_PER_ROW
        chosen = [index % rows for index in range(first, first + count)]
        pick = torch.cat([torch.arange(STATES_PER_ROW) + STATES_PER_ROW * index for index in chosen])
        return Batch((self.hidden[pick].float(), self.tokens[pick].long()), len(pick))


@torch.no_grad()
def backbone_states(model: EvaByteForMTPC, order: RowOrder, rows: int, length: int, amp: bool, seed: int) -> States:
    """Runs the backbone over packed rows.

    Args:
        model: The model.
        order: The rows.
        rows: How many.
        length: Ids per window.
        amp: Multiply in bfloat16.
        seed: Of the order of the states.

    Returns:
        Half of the positions that have a whole window of bytes behind them, in random order.
    """
    hidden, tokens = [], []
    for first in range(0, rows, 8):
        ids = order.windows(first, min(8, rows - first), length)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            states = model.model(ids, use_cache=False).last_hidden_state
        positions = torch.arange(first // 8 % _EVERY, length - WINDOW, _EVERY)
        ahead = torch.stack([ids[:, positions + depth] for depth in range(1, WINDOW + 1)], dim=-1)
        hidden.append(states[:, positions].flatten(0, 1).bfloat16())
        tokens.append(ahead.flatten(0, 1).to(torch.int16))
    order_of_states = torch.randperm(sum(map(len, hidden)), generator=torch.Generator().manual_seed(seed))
    return States(torch.cat(hidden)[order_of_states], torch.cat(tokens)[order_of_states])


def kept_states(file: Path, make: Callable[[], States]) -> States:
    """The states in a file, which is written first if it does not exist."""
    if not file.exists():
        states = make()
        scratch = file.with_suffix(".part")
        save_file({"hidden": states.hidden.contiguous(), "tokens": states.tokens.contiguous()}, scratch)
        scratch.replace(file)
    return States(**load_file(file))


def head_step(model: EvaByteForMTPC, compile_step: bool) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The discounted loss of a model's head on states [N, d] and the bytes behind them [N, n]."""
    weights = _GAMMA ** torch.arange(WINDOW)
    weights = weights / weights.sum()

    def loss(hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return -(model.window_distribution(hidden).token_log_probs(tokens).mean(0) * weights).sum()

    return torch.compile(loss, dynamic=False) if compile_step else loss


@torch.no_grad()
def window_nll(model: EvaByteForMTPC, states: States) -> dict[str, float]:
    """-log q of the whole window, in nats, mean over states."""
    parts = zip(states.hidden.split(512), states.tokens.split(512))
    total = sum(float(model.window_distribution(h.float()).log_prob(t.long()).sum()) for h, t in parts)
    return {"window_nll": -total / len(states.hidden)}
