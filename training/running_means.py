"""Exact means of what a trainer measures, over micro-batches and ranks, for its log and its evaluation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import EvalLoopOutput

from ..modeling.heads.losses import IGNORE
from .pushing import TrainerPushMixin


class RunningMeans:
    """Sums and counts of several quantities, kept where they are computed until they are taken."""

    def __init__(self) -> None:
        self.totals: torch.Tensor | None = None

    def add(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Adds a micro-batch: sums and counts, [n] each; summed up in float64 where the device has it."""
        totals = torch.stack([sums, counts])
        totals = totals if totals.device.type == "mps" else totals.double()
        self.totals = totals if self.totals is None else self.totals + totals

    def take(self, accelerator: Any) -> torch.Tensor | None:
        """Sums and counts over all ranks, [2, n] on the CPU, and starts anew; None where nothing was added."""
        totals, self.totals = self.totals, None
        return None if totals is None else accelerator.gather(totals[None]).sum(0).cpu()


class RunningMeansMixin(TrainerPushMixin):
    """Adds running means to the log and to evaluation metrics; to be placed before `Trainer` among the bases.

    A trainer says in `_mean_names` what the quantities are called, and adds to `_means[model.training]`. Where its
    evaluation loss follows from them, `_pooled_loss` says how; the mean over batches would depend on their size.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._means = {True: RunningMeans(), False: RunningMeans()}

    def _mean_names(self) -> list[str]:
        raise NotImplementedError

    def _pooled_loss(self, sums: torch.Tensor, counts: torch.Tensor) -> float | None:
        return None

    def _named_means(self, totals: torch.Tensor | None, prefix: str = "") -> dict[str, float]:
        """Means by name; quantities that were never counted are left out."""
        pairs = () if totals is None else zip(self._mean_names(), *totals.tolist())
        return {prefix + name: total / count for name, total, count in pairs if count}

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in `Trainer`, with the means among the metrics, and the loss of all data as of one batch."""
        means = self._means[False] = RunningMeans()
        output = super().evaluation_loop(*args, **kwargs)
        prefix, totals = kwargs.get("metric_key_prefix", "eval"), means.take(self.accelerator)
        output.metrics.update(self._named_means(totals, f"{prefix}_"))
        loss = None if totals is None else self._pooled_loss(*totals)
        if loss is not None:
            output.metrics[f"{prefix}_loss"] = loss
        for callback in self.callback_handler.callbacks:  # so that they are logged, and decide on the best checkpoint
            measure = getattr(callback, "evaluation_metrics", None)
            if measure is not None:
                output.metrics.update(measure(self, prefix))
        return output

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`; rows that only fill up the last batch of several processes are no targets."""
        return super().prediction_step(model, self._without_repeated_rows(inputs), *args, **kwargs)

    def _without_repeated_rows(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The batch with labels of -100 in rows that another process, or this one, has seen already.

        accelerate fills the last batch up with rows of the first, so that every process has one; `Trainer` drops what
        they predict, but their losses would count twice. Rows that are joined without padding cannot be told apart: of
        these, only batches that are filled up from their first row on are left out.
        """
        state, labels = self.accelerator.gradient_state, inputs.get("labels")
        is_last = state.end_of_dataloader and self.accelerator.num_processes > 1
        if not is_last or state.remainder <= 0 or not isinstance(labels, torch.Tensor):
            return inputs
        first = self.accelerator.process_index * self.args.per_device_eval_batch_size
        repeated = torch.arange(first, first + len(labels), device=labels.device) >= state.remainder
        shape = [-1] + [1] * (labels.dim() - 1)
        return {**inputs, "labels": labels.masked_fill(repeated.view(shape), IGNORE)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs what `Trainer` logs, and the means of training beside its `loss`."""
        if "loss" in logs:
            logs |= self._named_means(self._means[True].take(self.accelerator))
        super().log(logs, start_time)
