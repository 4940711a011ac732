"""TRL's supervised fine-tuning and preference optimisation of models that draft. Needs the extra `train`.

`SFTTrainer` alone never calls the model's own loss: the heads would get no gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from ..generation.attach import MTPGenerationMixin
from ..modeling.common.outputs import TrainableDrafter
from .batches import BatchingMixin, Inputs
from .checkpoints import ResumingMixin
from .columns import read_rows
from .ptp.trainer import PTPTrainer
from .trainer import MTPTrainer
from .trainer_base import check_kernels, without_peft
from .utils import needs_extra

with needs_extra("train", "a trainer of TRL"):
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


class _SFTBehaviour(BatchingMixin):
    """What TRL's trainer does besides its loss; not derived from it, as its methods would come before our trainers'."""

    def __init__(
        self, model: nn.Module | None = None, args: TrainingArguments | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        if isinstance(args, SFTConfig):
            if args.loss_type != "nll":
                raise ValueError(f"loss_type={args.loss_type!r} would replace the model's own loss: leave it at 'nll'")
            if (args.packing or args.eval_packing) and args.packing_strategy == "wrapped":
                raise ValueError("packing_strategy='wrapped' hides where documents end: choose 'bfd' or 'bfd_split'")
        super().__init__(model, args, *rest, **kwargs)

    def _prepare_dataset(
        self,
        dataset: Dataset | IterableDataset,
        processing_class: Any,
        args: SFTConfig,
        packing: bool,
        formatting_func: Callable[[dict], str] | None,
        dataset_name: str,
    ) -> Dataset | IterableDataset:
        """Prepare data as TRL does; `drop_longer` of `TrainConfig` drops long rows before they are cut or packed."""
        if formatting_func is None:
            dataset = read_rows(dataset, f"a row of the {dataset_name} data", args, self.ignore_columns)
        parent: Any = super()
        prepare, longest = parent._prepare_dataset, args.max_length
        if longest is not None and getattr(args, "drop_longer", False):
            whole = copy.copy(args)
            whole.max_length, whole.shuffle_dataset = None, False
            rows = prepare(dataset, processing_class, whole, False, formatting_func, dataset_name)
            dataset, formatting_func = rows.filter(lambda row: len(row["input_ids"]) <= longest), None
            if next(iter(dataset), None) is None:
                raise ValueError(f"drop_longer=True leaves no row of the {dataset_name} data, max_length={longest}")
        return prepare(dataset, processing_class, args, packing, formatting_func, dataset_name)


class MTPSFTTrainer(_SFTBehaviour, MTPTrainer, SFTTrainer):
    """`MTPTrainer` with TRL's preparation of data: chat templates, `assistant_only_loss`, packing, `peft_config`.

    Example:
        >>> model.train_only("drafter")
        >>> MTPSFTTrainer(model, SFTConfig("out"), train_dataset=data, processing_class=tokenizer).train()
    """


class PTPSFTTrainer(_SFTBehaviour, PTPTrainer, SFTTrainer):
    """`PTPTrainer` with TRL's preparation of data, as `MTPSFTTrainer`.

    Example:
        >>> PTPSFTTrainer(student, SFTConfig("out"), train_dataset=chats, processing_class=tokenizer).train()
    """


class MTPDPOTrainer(ResumingMixin, DPOTrainer):
    """`trl.DPOTrainer` for `EvaByteForMTPC` and `DeepSeekMTP`.

    The loss is TRL's, of the backbone's own next-token distribution, plus `drafter_weight` times the model's own loss
    (that of all its heads or modules, the next token included) on the chosen completions, `drafter_loss` in the log.

    Args:
        model: The model; further arguments are those of `DPOTrainer`.
        drafter_weight: Weight of the auxiliary term; 0: the drafter is not trained.

    Example:
        >>> MTPDPOTrainer(model, reference, DPOConfig("out"), train_dataset=pairs, processing_class=tokenizer).train()
    """

    def __init__(
        self, model: PreTrainedModel | PeftModel, *args: Any, drafter_weight: float = 0.1, **kwargs: Any
    ) -> None:
        owner = without_peft(model)
        if not (isinstance(owner, MTPGenerationMixin) and isinstance(owner, TrainableDrafter)):
            raise TypeError(f"MTPDPOTrainer trains a model that drafts for itself, not a {type(model).__name__}")
        if not 0 <= drafter_weight < math.inf:
            raise ValueError(f"drafter_weight={drafter_weight} must be a number of at least 0")
        self.drafter_weight = drafter_weight
        super().__init__(model, *args, **kwargs)
        check_kernels(self.args)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Inputs,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return TRL's loss plus the model's own on the chosen half of the batch."""
        whole = without_peft(self.accelerator.unwrap_model(model))
        whole.learns_besides = True
        try:
            result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            del whole.learns_besides
        if not self.drafter_weight:
            return result
        loss, *rest = result if return_outputs else (result,)
        chosen = len(inputs["input_ids"]) // 2
        ids, mask = inputs["input_ids"][:chosen], inputs["attention_mask"][:chosen]
        labels = ids.masked_fill(inputs["completion_mask"][:chosen] == 0, -100)
        own = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        self._metrics["train" if model.training else "eval"]["drafter_loss"].append(own.detach().item())
        loss = loss + self.drafter_weight * own
        return (loss, *rest) if return_outputs else loss
