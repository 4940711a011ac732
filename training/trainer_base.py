"""The base of all trainers: batches and their checks, exact means over micro-batches and processes, model parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, cast

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    DataCollatorWithPadding,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import EvalLoopOutput

from ..generation.backbone.wrapped_models import gathered_state, shares_hidden
from ..generation.tensors.saving import finish, whole_directory
from ..modeling.heads.joint import BACKBONE, JointMTPModel
from ..modeling.heads.losses import IGNORE, check_targets
from .batches import BatchingMixin, Collator, Inputs
from .checkpoints import ResumingMixin, check_checkpoint
from .pushing import TrainerPushMixin

BATCHES_TO_SEARCH = 1000
"""Batches that are searched for a target, where the first update has none."""


def check_depths(
    counts: torch.Tensor, count: Callable[[Inputs], torch.Tensor], batches: Callable[[], Iterable[Inputs]]
) -> None:
    """Refuse data without a target, in the counts [n] of the first update and, where it has none, in batches."""
    if not (counts.any() or any(count(batch).any() for batch in islice(batches(), BATCHES_TO_SEARCH))):
        raise ValueError("train_dataset has no targets: its labels are -100 everywhere, or its rows have one token")


def check_ids(batches: Sequence[Inputs], vocab_size: int) -> None:
    """Refuse ids outside the vocabulary: on an accelerator these would only show as a failed assertion of a kernel."""
    for batch in batches:
        for name in ("input_ids", "labels", "shift_labels"):
            if isinstance(ids := batch.get(name), torch.Tensor):
                check_targets(ids.cpu(), vocab_size, name)


def check_kernels(args: TrainingArguments) -> None:
    """Refuse compiled steps, and keep liger's kernel of the loss away."""
    if args.torch_compile:
        raise ValueError("torch_compile=True would compile losses again for every batch: leave it out")
    if args.use_liger_kernel:  # its loss, on by default, would replace the drafter's
        args.liger_kernel_config = {**(args.liger_kernel_config or {}), "fused_linear_cross_entropy": False}


class RunningMeans:
    """Sums and counts of several quantities, which stay on their device until they are taken."""

    def __init__(self) -> None:
        self.totals: torch.Tensor | None = None

    def add(self, sums: torch.Tensor, counts: torch.Tensor) -> None:
        """Add the sums and counts of a micro-batch, [n] each; totals are float64 where the device has it."""
        totals = torch.stack([sums, counts]).to(torch.float32 if sums.device.type == "mps" else torch.float64)
        self.totals = totals if self.totals is None else self.totals + totals

    def take(self, accelerator: Accelerator) -> torch.Tensor | None:
        """Return sums and counts over all processes, [2, n] on the CPU, and reset; None if nothing was added."""
        totals, self.totals = self.totals, None
        return None if totals is None else cast(torch.Tensor, accelerator.reduce(totals, "sum")).cpu()


def named_means(totals: torch.Tensor | None, names: list[str], prefix: str = "") -> dict[str, float]:
    """Return the means of totals [2, n] by name; quantities without counts are left out."""
    pairs = () if totals is None else zip(names, *totals.tolist())
    return {prefix + name: total / count for name, total, count in pairs if count}


class CpuParallelism(ParallelismConfig):
    """accelerate's settings of tensor parallelism, which also processes of a CPU may have."""

    def _validate_accelerator(self, accelerator: Accelerator) -> None: ...


class BaseTrainer(ResumingMixin, BatchingMixin, TrainerPushMixin, Trainer):
    """A `Trainer` that logs exact means and writes whole models where parameters are sharded.

    A subclass names the quantities in `_mean_names` and adds them to `_means[model.training]`. If its evaluation loss
    follows from them, `_pooled_loss` computes it. `_owner` is the model without wrappers of distribution.
    """

    def __init__(
        self, *args: Any, tokens_per_batch: int | None = None, ignore_columns: Sequence[str] = (), **kwargs: Any
    ) -> None:
        self.ignore_columns = ignore_columns
        super().__init__(*args, **kwargs)
        self.tokens_per_batch = tokens_per_batch
        if self.data_collator is default_data_collator or type(self.data_collator) is DataCollatorWithPadding:
            self.data_collator = Collator(cast(Any, self.processing_class))  # these do not pad labels
        check_kernels(self.args)
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        if plugin is not None and plugin.zero_stage == 3:
            raise ValueError("zero_stage=3 of DeepSpeed divides the unembedding that heads read: use 1 or 2, or FSDP2")
        if self.args.label_smoothing_factor:
            raise ValueError("label_smoothing_factor is for losses of labels, and drafters have their own: set it to 0")
        self._means = {True: RunningMeans(), False: RunningMeans()}
        self.check_batches()

    def create_accelerator_and_postprocess(self) -> None:
        """As in `Trainer`; FSDP2 leaves outputs in their dtype, as it would round losses to that of parameters."""
        if self.args.device.type == "cpu" and getattr(self.model, "tp_size", None) and not self.args.parallelism_config:
            self.args.parallelism_config = CpuParallelism()  # which gets its sizes from the model
        super().create_accelerator_and_postprocess()
        started = int(os.environ.get("WORLD_SIZE", 1))
        if started > self.accelerator.num_processes:
            raise ValueError(f"WORLD_SIZE={started} processes would train alone in one directory: pass use_cpu=True")
        plugin = self._fsdp_plugin
        if plugin is not None and isinstance(plugin.mixed_precision_policy, MixedPrecisionPolicy):
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)

    @property
    def _fsdp_plugin(self) -> FullyShardedDataParallelPlugin | None:
        return self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._shares_hidden():
            return super()._prepare_for_training(*args, **kwargs)

    def _shares_hidden(self) -> AbstractContextManager[None]:
        """Hide shares of a frozen backbone from DDP and loaders, but not what FSDP2 made of a model that learns."""
        return nullcontext() if self.is_fsdp_enabled else shares_hidden(self._owner)

    @property
    def _reader(self) -> str:
        return type(drafter_of(self._owner).policy).__name__

    def _mean_names(self) -> list[str]:
        raise NotImplementedError

    def _pooled_loss(self, sums: torch.Tensor, counts: torch.Tensor) -> float | None:
        return None

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As in `Trainer`, with the means among the metrics, and the loss of all data as of one batch."""
        means = self._means[False] = RunningMeans()
        output = super().evaluation_loop(*args, **kwargs)
        prefix, totals = kwargs.get("metric_key_prefix", "eval"), means.take(self.accelerator)
        metrics = cast(dict[str, float], output.metrics)
        metrics.update(named_means(totals, self._mean_names(), f"{prefix}_"))
        loss = None if totals is None else self._pooled_loss(totals[0], totals[1])
        if loss is not None:
            metrics[f"{prefix}_loss"] = loss
        for callback in self.callback_handler.callbacks:  # so that they are logged, and decide on the best checkpoint
            measure = getattr(callback, "evaluation_metrics", None)
            metrics.update({} if measure is None else measure(self, prefix))
        return output

    def prediction_step(self, model: nn.Module, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        return super().prediction_step(model, self.without_repeats(inputs), *args, **kwargs)

    def without_repeats(self, inputs: Inputs) -> Inputs:
        """Return the batch with labels of -100 in repeated sequences, with which accelerate fills the last one up.

        `Trainer` drops their predictions, but their losses would count twice. Of sequences that are joined without
        padding, only batches that consist of repeats are left out.
        """
        state, labels, size = self.accelerator.gradient_state, inputs.get("labels"), self.get_tp_size()
        is_last = state.end_of_dataloader and self.accelerator.num_processes > size
        if not is_last or state.remainder <= 0 or not isinstance(labels, torch.Tensor):
            return inputs
        first = self.accelerator.process_index // size * self.args.per_device_eval_batch_size
        repeated = torch.arange(first, first + len(labels), device=labels.device) >= state.remainder
        shape = [-1] + [1] * (labels.dim() - 1)
        return {**inputs, "labels": labels.masked_fill(repeated.view(shape), IGNORE)}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs |= named_means(self._means[True].take(self.accelerator), self._mean_names())
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`; also of a model that FSDP sharded, whatever `fsdp_state_dict_type` checkpoints have."""
        plugin = self._fsdp_plugin
        if plugin is None or _internal_call:
            super().save_model(output_dir, _internal_call)
            return
        of_checkpoints = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type(of_checkpoints)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As in `Trainer`, but model, tokenizer and arguments become one version of the directory."""
        state_dict = gathered_state(self._owner) if state_dict is None else state_dict  # of all processes together
        whole = whole_directory(output_dir or str(self.args.output_dir), updated=["README.md", f"{BACKBONE}/README.md"])
        with whole if self.args.should_save else nullcontext(output_dir) as directory:
            super()._save(None if directory is None else str(directory), state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        check_checkpoint(finish(resume_from_checkpoint), self._owner)
        if self._loads_itself:
            self._owner.load_checkpoint(resume_from_checkpoint)
            return
        with self._shares_hidden():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if self._loads_itself:
            self._owner.load_checkpoint(self.state.best_model_checkpoint)
            return
        with self._shares_hidden():
            super()._load_best_model()

    @property
    def _loads_itself(self) -> bool:
        """Whether the model consists of several directories; `Trainer` itself reads shards."""
        return hasattr(self._owner, "load_checkpoint") and not self.is_fsdp_enabled


def without_peft(model: Any) -> Any:
    """Return the model within a PeftModel, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def drafter_of(model: Any) -> Any:
    """Return what drafts of a trained model, without wrappers of peft and of joint training."""
    owner = without_peft(model)
    return owner.heads if isinstance(owner, JointMTPModel) else owner
