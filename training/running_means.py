"""Means of what a trainer measures beside its loss, over micro-batches and ranks, for its log and its evaluation."""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_utils import EvalLoopOutput


class RunningMeans:
    """Sums and counts of several quantities, kept where they are computed until they are taken."""

    def __init__(self) -> None:
        self.totals: torch.Tensor | None = None

    def add(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Adds a micro-batch: sums and counts, [n] each."""
        totals = torch.stack([sums, counts])
        self.totals = totals if self.totals is None else self.totals + totals

    def take(self, accelerator: Any, names: list[str]) -> dict[str, float]:
        """Means over all ranks, and starts anew; quantities that were never counted are left out."""
        if self.totals is None:
            return {}
        sums, counts = accelerator.gather(self.totals[None]).sum(0).tolist()
        self.totals = None
        return {name: total / count for name, total, count in zip(names, sums, counts) if count}


class RunningMeansMixin:
    """Adds running means to the log and to evaluation metrics; to be placed before `Trainer` among the bases.

    A trainer says in `_mean_names` what the quantities are called, and adds to `_means[model.training]`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._means = {True: RunningMeans(), False: RunningMeans()}

    def _mean_names(self) -> list[str]:
        raise NotImplementedError

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in `Trainer`, with the means among the metrics."""
        means = self._means[False] = RunningMeans()
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update(means.take(self.accelerator, [f"{prefix}_{name}" for name in self._mean_names()]))
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs what `Trainer` logs, and the means of training beside its `loss`."""
        if "loss" in logs:
            logs |= self._means[True].take(self.accelerator, self._mean_names())
        super().log(logs, start_time)
