"""MuToR (Gerontopoulos et al. 2025, arXiv 2505.10518): registers between tokens train a model to look further ahead.

They are dropped after training: what is left is a plain model of the same size and speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...configuration.fields import check_values
from ...modeling.heads.losses import IGNORE
from ...modeling.ptp.registers import RegisterModel
from ..batches import Inputs
from .forwards import FixedDraws, RandomDraws, Sequences, at_columns, draw_starts
from .trainer import UpdateTrainer, next_tokens


@dataclass(frozen=True)
class MuToROptions:
    """Options of `MuToRTrainer`.

    Args:
        max_offset: d_max; the registers of a sequence all predict d tokens ahead, with d drawn from 1..d_max.
        weight: a, the weight of the registers' loss; that of the tokens is 1 - a.

    Raises:
        ValueError: A value out of range.
    """

    max_offset: int = 4
    weight: float = 0.3

    def __post_init__(self) -> None:
        check_values(self, {}, {"max_offset": "[1, inf)", "weight": "[0, 1)"})


@dataclass
class Registers:
    """A batch with R registers per sequence.

    The registers of a sequence predict `offsets` [B] tokens ahead; each is followed by the column in `starts` [B, R],
    and predicts the token in `targets` [B, R] (-100 where a sequence has fewer registers).
    """

    sequences: Sequences
    offsets: Tensor
    starts: Tensor
    targets: Tensor

    @classmethod
    def of(cls, sequences: Sequences, offsets: Tensor) -> Registers:
        """Put a register before every target that has a target d - 1 tokens further in its document; offsets are d."""
        tokens, documents = sequences.tokens, sequences.documents
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        seen = columns + offsets[:, None] - 1  # from column t + 1: the token t + d
        inside, seen = seen < tokens.shape[1], seen.clamp(max=tokens.shape[1] - 1)
        known = inside & at_columns(sequences.scored, seen) & (at_columns(documents, seen) == documents)
        wanted = sequences.startable & known
        most = max(1, int(wanted.sum(1).max()))
        starts, exists = draw_starts(wanted, most, (1.0 - columns / len(columns)).expand(tokens.shape))
        ahead = (starts + offsets[:, None] - 1).clamp(max=tokens.shape[1] - 1)
        return cls(sequences, offsets, starts, at_columns(tokens, ahead).masked_fill(~exists, IGNORE))

    def release(self) -> None:
        """Free nothing: there is no cache."""


class MuToRTrainer(UpdateTrainer):
    """transformers' Trainer with registers: the loss is (1 - a) that of the next tokens and a that of the registers.

    A register follows every token before a target (labels of -100 get none), and predicts the token d ahead of its
    position, with d drawn for every sequence. Tokens do not attend to registers, so that their loss is the plain one.
    The model is a plain model of transformers, or a PeftModel, and is trained in place: checkpoints and `save_model`
    write it as usual, with a file `register.safetensors`, which only a resumed training reads.

    The data are as for `PTPTrainer`; packed documents are separated. The log carries `next_token_loss` and
    `register_loss`. In evaluation d is a function of the length of a sequence.

    Args:
        model: A causal language model with full attention; parameters that require gradients are trained.
        args: `TrainingArguments`.
        options: Offsets and weight.
        **kwargs: For `Trainer`.

    Raises:
        ValueError: A model that cannot carry registers (`RegisterModel`), or arguments that would be ignored.

    Example:
        >>> MuToRTrainer(model, TrainingArguments("out"), train_dataset=data).train()
        >>> model.generate(**inputs)  # no registers here
    """

    def __init__(
        self, model: PreTrainedModel, args: Any = None, *, options: MuToROptions | None = None, **kwargs: Any
    ) -> None:
        self.options, self._owner = options or MuToROptions(), RegisterModel(model)
        super().__init__(self._owner, args, **kwargs)

    def _set_signature_columns_if_needed(self) -> None:
        """Set the columns of the data, which are not the arguments of `RegisterModel.forward`."""
        self._signature_columns = ["input_ids", "attention_mask", "position_ids", "labels"]

    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Registers:
        sequences = Sequences.of(inputs)
        draws = RandomDraws(1.0) if is_training else FixedDraws(sequences.documents)
        last = torch.full_like(sequences.tokens[:, :1], sequences.tokens.shape[1] - 1)
        return Registers.of(sequences, draws.gaps(last, self.options.max_offset)[:, 0])

    def _counts(self, task: Registers) -> Tensor:
        """Return the number of targets of tokens and of registers, [2]."""
        both = next_tokens(task.sequences), task.targets
        return torch.stack([(targets != IGNORE).sum().double() for targets in both])

    def _learn(
        self, model: nn.Module, task: Registers, totals: Tensor, counts: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `UpdateTrainer`; the outputs are the `logits` of tokens and then of registers."""
        sequences, a = task.sequences, self.options.weight
        logits = model(sequences.tokens, sequences.documents, sequences.positions, task.starts, task.offsets)
        length, following = sequences.tokens.shape[1], next_tokens(sequences)
        parts = (logits[:, : length - 1], following), (logits[:, length:], task.targets)
        sums = torch.stack([_summed(*part) for part in parts])
        weights = torch.tensor([1 - a, a], device=sums.device)
        self._means[model.training].add(sums.detach(), counts.to(sums))
        return (weights * (sums / totals.clamp(min=1).to(sums))).sum(), {"logits": logits}

    def _mean_names(self) -> list[str]:
        return ["next_token_loss", "register_loss"]

    def _pooled_loss(self, sums: Tensor, counts: Tensor) -> float:
        tokens, registers = (sums / counts.clamp(min=1)).tolist()
        return (1 - self.options.weight) * tokens + self.options.weight * registers


def _summed(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of logits [B, n, v], summed over targets [B, n]."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    return nn.functional.cross_entropy(wide, targets.flatten(), ignore_index=IGNORE, reduction="sum")
