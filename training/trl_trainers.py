"""TRL's supervised fine-tuning and preference optimisation of models that draft. Needs the extra `train`.

`SFTTrainer` alone computes a next-token loss of its own and never calls the model's: the heads would get no gradient,
without a warning. DPO changes the backbone, and heads that are not trained with it would draft for the model as it was:
the model's own loss on the chosen completions, drafter included, is an auxiliary term.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
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
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


class _SFTBehaviour(BatchingMixin):
    """The behaviour of TRL's trainer besides its loss: unsupported settings are refused, and tokens are counted.

    Not derived from `SFTTrainer`, whose methods would then come before those of our trainers, the card among them.
    """

    _total_train_tokens: int
    _metrics: defaultdict[str, defaultdict[str, list[float]]]

    def __init__(
        self, model: nn.Module | None = None, args: TrainingArguments | None = None, *rest: Any, **kwargs: Any
    ) -> None:
        if isinstance(args, SFTConfig):
            if args.loss_type != "nll":
                raise ValueError(f"loss_type={args.loss_type!r} would replace the model's own loss: leave it at 'nll'")
            if (args.packing or args.eval_packing) and args.packing_strategy == "wrapped":
                raise ValueError("packing_strategy='wrapped' hides where documents end: choose 'bfd' or 'bfd_split'")
        super().__init__(model, args, *rest, **kwargs)

    def collates_rows(self) -> bool:
        """See `BatchingMixin`; TRL's collator of texts does nothing but pad, unless it joins rows itself."""
        return isinstance(self.data_collator, DataCollatorForLanguageModeling) or super().collates_rows()

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

    def compute_loss(self, model: nn.Module, inputs: Inputs, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of the next trainer among the bases, and count tokens as TRL does."""
        is_training = model.training
        if is_training:
            counts = [entry["num_tokens"] for entry in self.state.log_history if "num_tokens" in entry]
            earlier = 0 if self._total_train_tokens else int(max(counts, default=0))  # of a run that goes on
            self._total_train_tokens += earlier + self._tokens_in(inputs)
        self._metrics["train" if is_training else "eval"]["num_tokens"] = [self._total_train_tokens]
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _tokens_in(self, inputs: Inputs) -> int:
        real = inputs.get("attention_mask")
        count = torch.tensor(inputs["input_ids"].numel()) if real is None else real.sum()
        counts = self.accelerator.gather_for_metrics(count.to(self.accelerator.device))
        assert isinstance(counts, torch.Tensor)
        return int(counts.sum())


class MTPSFTTrainer(_SFTBehaviour, MTPTrainer, SFTTrainer):
    """`trl.SFTTrainer` that trains with the model's own loss, so that the heads learn.

    Everything else is TRL's: chat templates, `assistant_only_loss`, packing, LoRA through `peft_config`. `MTPTrainer`
    adds exact gradient accumulation per depth, `loss_head_1`, ... in the log, and windows that end where a packed
    document does. Pass a model, not a path.

    Raises:
        ValueError: Settings of TRL that would have no effect or a wrong one: `loss_type="dft"`, a loss of TRL's own,
            and `packing_strategy="wrapped"`, which does not say where documents end.

    Example:
        >>> model.train_only("drafter")
        >>> MTPSFTTrainer(model, SFTConfig("out"), train_dataset=data, processing_class=tokenizer).train()
    """


class PTPSFTTrainer(_SFTBehaviour, PTPTrainer, SFTTrainer):
    """`PTPTrainer` with TRL's preparation of data: chat templates, `assistant_only_loss`, packing.

    Raises:
        ValueError: As `MTPSFTTrainer`.

    Example:
        >>> PTPSFTTrainer(student, SFTConfig("out"), train_dataset=chats, processing_class=tokenizer).train()
    """


class MTPDPOTrainer(ResumingMixin, DPOTrainer):
    """`trl.DPOTrainer` for `EvaByteForMTPC` and `DeepSeekMTP`.

    The loss is TRL's, of the backbone's own next-token distribution, plus `drafter_weight` times the model's own loss
    (that of all its heads or modules, the next token included) on the chosen completions. The log carries
    `drafter_loss`.

    Args:
        model: The model.
        ref_model: As for `DPOTrainer`: a copy of the model, or None with a `peft_config`, whose adapters are switched
            off for reference.
        args: As for `DPOTrainer`.
        drafter_weight: Weight of the auxiliary term; 0: the drafter is not trained.
        kwargs: As for `DPOTrainer`.

    Raises:
        TypeError: Attached heads, or a model that does not draft for itself.
        ValueError: A weight below 0 or not finite; `torch_compile`, or `use_liger_kernel` without a GPU.

    Example:
        >>> MTPDPOTrainer(model, reference, DPOConfig("out"), train_dataset=pairs, processing_class=tokenizer).train()
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        ref_model: PreTrainedModel | None = None,
        args: DPOConfig | None = None,
        *,
        drafter_weight: float = 0.1,
        **kwargs: Any,
    ) -> None:
        owner = without_peft(model)
        if not (isinstance(owner, MTPGenerationMixin) and isinstance(owner, TrainableDrafter)):
            raise TypeError(f"MTPDPOTrainer trains a model that drafts for itself, not a {type(model).__name__}")
        if not 0 <= drafter_weight < math.inf:
            raise ValueError(f"drafter_weight={drafter_weight} must be a number of at least 0")
        self.drafter_weight = drafter_weight
        super().__init__(model, ref_model, args, **kwargs)
        check_kernels(self.args, model)

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
