"""RMS balancing of depths over whole updates (Mehra et al. 2025), whatever the micro-batches.

The paper scales depth j by RMS(l_1) / RMS(l_j) over the batch. Over a batch in pieces this needs all pieces before the
first backward. Here the factors of an update are those of the update before it, which costs nothing and makes two
divisions of a batch take the same step; in the first update all are 1. They are saved with checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..modeling.heads.losses import balance_factors
from .files import replace_text
from .running_means import RunningMeans

FILE = "loss_balance.json"


class LossBalance(TrainerCallback):
    """Factors of the depths, from the mean squared terms of the last update.

    Attributes:
        factors: [n] float32; None before the first update has ended.
    """

    def __init__(self) -> None:
        self.factors: torch.Tensor | None = None
        self._squares = RunningMeans()
        self._accelerator: Any = None

    def add(self, squares: torch.Tensor, counts: torch.Tensor) -> None:
        """Takes in a micro-batch: mean squared terms and targets per depth, [n] each."""
        counts = counts.to(squares.device)
        self._squares.add(torch.where(counts > 0, squares * counts, 0.0), counts)

    def close(self, accelerator: Any) -> None:
        """Ends an update."""
        self._accelerator = accelerator
        totals = self._squares.take(accelerator)
        if totals is not None:
            self.factors = balance_factors(totals[0] / totals[1].clamp(min=1)).float()

    def for_update(self, depths: int) -> torch.Tensor:
        """The factors of the update that goes on, [n]."""
        return torch.ones(depths) if self.factors is None else self.factors

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the factors beside the checkpoint's weights."""
        if self._accelerator is not None:
            self.close(self._accelerator)
        if state.is_world_process_zero and self.factors is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            replace_text(folder / FILE, json.dumps(self.factors.tolist()))

    def load(self, folder: str) -> None:
        """Takes over what `on_save` wrote."""
        path = Path(folder) / FILE
        if path.exists():
            self.factors = torch.tensor(json.loads(path.read_text(encoding="utf-8")))
