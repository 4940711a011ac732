"""MuToR (Gerontopoulos et al. 2025, arXiv 2505.10518): registers between tokens train a model to look further ahead."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..configuration.fields import check_values
from ..generation.attach import AttachableDrafter
from ..generation.backbone.wrapped_models import WrapperMixin, unwrap
from ..generation.tensors.masks import additive_mask
from ..generation.tensors.saving import reads_whole, whole_directory
from ..generation.tensors.tensor_files import below
from ..modeling.heads.joint import load_trained
from ..modeling.heads.losses import IGNORE
from ..modeling.heads.window_distribution import exact
from ..modeling.ptp.inputs import check_backbone, packed_mask, packed_positions
from ..training.batches import Inputs
from ..training.ptp.forwards import FixedDraws, RandomDraws, Sequences, at_columns, draw_starts
from ..training.ptp.trainer import UpdateTrainer, next_tokens

REGISTER = "register.safetensors"


class RegisterModel(WrapperMixin, PreTrainedModel):
    """A model and the one embedding that all its registers have; the model itself is unchanged.

    A register after token t sees the tokens up to t and itself. Its position, t + d - 1, says that it predicts token t
    + d. Tokens never see registers: their logits are the model's own. `save_pretrained` writes the plain model (or its
    adapters alone, where it has any), and `register.safetensors`, which nothing but further training needs.
    """

    config_class = None
    generation_config = AttachableDrafter.generation_config  # the backbone's, too
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, backbone: PreTrainedModel) -> None:
        plain, attention = unwrap(backbone), backbone.config._attn_implementation
        if hasattr(plain, "train_only"):
            raise ValueError(f"a {type(plain).__name__} owns a drafter; take a plain model of transformers")
        check_backbone(plain)
        super().__init__(backbone.config)
        backbone.config._attn_implementation = attention  # the new model resets it
        self.backbone = backbone
        self._no_split_modules = plain._no_split_modules
        table = plain.get_input_embeddings().get_parameter("weight").detach()
        mean = table.to(torch.promote_types(table.dtype, torch.float32)).mean(0, keepdim=True)  # [1, H]
        self.register = nn.Parameter(mean)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, starts: Tensor, offsets: Tensor
    ) -> Tensor:
        """Return the logits [B, T + R, V] of tokens and of the `Registers` after them; the mask numbers documents."""
        embeds = self.get_input_embeddings()(input_ids)
        registers = self.register.to(embeds.dtype).expand(*starts.shape, -1)  # [B, R, H]
        positions = packed_positions(attention_mask, starts, 1, offsets[:, None, None] - 2, position_ids)  # [B, T + R]
        outputs = self.backbone(
            inputs_embeds=torch.cat([embeds, registers], dim=1),  # [B, T + R, H]
            attention_mask=additive_mask(packed_mask(attention_mask, starts, 1), embeds.dtype),
            position_ids=positions,
            use_cache=False,
        )
        return outputs.logits

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the plain model and the register; `state_dict` holds tensors that had to be gathered."""
        state = self.state_dict() if state_dict is None else state_dict
        spread = kwargs.get("distributed_checkpoint", False)
        with whole_directory(save_directory, kwargs.get("variant"), (), ["README.md"], spread) as directory:
            own = below(state, "backbone.")
            self.backbone.save_pretrained(directory, is_main_process=is_main_process, state_dict=own, **kwargs)
            if is_main_process:
                save_file({"register": state["register"].detach().cpu()}, directory / REGISTER)

    @reads_whole
    def load_checkpoint(self, folder: str | PathLike) -> None:
        load_trained(self.backbone, Path(folder), "weights")
        with torch.no_grad():
            self.register.copy_(load_file(Path(folder) / REGISTER)["register"])


@dataclass(frozen=True)
class MuToROptions:
    """Options of `MuToRTrainer`.

    Args:
        max_offset: d_max; the registers of a sequence all predict d tokens ahead, with d drawn from 1..d_max.
        weight: a, the weight of the registers' loss; that of the tokens is 1 - a.
    """

    max_offset: int = 4
    weight: float = 0.3

    def __post_init__(self) -> None:
        check_values(self, {}, {"max_offset": "[1, inf)", "weight": "[0, 1)"})


@dataclass
class Registers:
    """A batch with R registers per sequence.

    The registers of a sequence predict `offsets` [B] tokens ahead (d); each is followed by the column in `starts`
    [B, R], t + 1, and predicts the token in `targets` [B, R] (-100 where a sequence has fewer registers).
    """

    sequences: Sequences
    offsets: Tensor
    starts: Tensor
    targets: Tensor

    @classmethod
    def of(cls, sequences: Sequences, offsets: Tensor) -> Registers:
        """Put a register before every target that has a target d - 1 tokens further in its document; offsets are d."""
        tokens, documents, length = sequences.tokens, sequences.documents, sequences.tokens.shape[1]
        columns = torch.arange(length, device=tokens.device)
        seen = columns + offsets[:, None] - 1  # from column t + 1: the token t + d
        inside, seen = seen < length, seen.clamp(max=length - 1)
        known = inside & at_columns(sequences.scored, seen) & (at_columns(documents, seen) == documents)
        wanted = sequences.startable & known
        most = max(1, int(wanted.sum(1).max()))
        starts, exists = draw_starts(wanted, most, (1.0 - columns / length).expand(tokens.shape))
        ahead = (starts + offsets[:, None] - 1).clamp(max=length - 1)
        return cls(sequences, offsets, starts, at_columns(tokens, ahead).masked_fill(~exists, IGNORE))

    def release(self) -> None:
        """Free nothing: there is no cache."""


class MuToRTrainer(UpdateTrainer):
    """transformers' Trainer with registers: the loss is (1 - a) that of the next tokens and a that of the registers.

    A register follows every token before a target (labels of -100 get none), and predicts the token d ahead, with d
    drawn for every sequence; in evaluation it is a function of its length. The model is a plain model of transformers,
    or a PeftModel, and is trained in place: checkpoints and `save_model` write it as usual. The data are as for
    `PTPTrainer`. The log carries `next_token_loss` and `register_loss`.

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
        self._signature_columns = ["input_ids", "attention_mask", "position_ids", "labels"]

    def _task(self, model: nn.Module, inputs: Inputs, is_training: bool) -> Registers:
        sequences = Sequences.of(inputs)
        draws = RandomDraws(1.0) if is_training else FixedDraws(sequences.documents)
        return Registers.of(sequences, 1 + (draws.keys(sequences.documents)[:, -1] * self.options.max_offset).long())

    def _counts(self, task: Registers) -> Tensor:
        both = next_tokens(task.sequences), task.targets
        return torch.stack([(targets != IGNORE).sum().double() for targets in both])

    def _learn(
        self, model: nn.Module, task: Registers, totals: Tensor, counts: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        sequences, a = task.sequences, self.options.weight
        logits = model(sequences.tokens, sequences.documents, sequences.positions, task.starts, task.offsets)
        length, following = sequences.tokens.shape[1], next_tokens(sequences)
        parts = (logits[:, : length - 1], following), (logits[:, length:], task.targets)
        losses = [
            nn.functional.cross_entropy(exact(part).flatten(0, 1), to.flatten(), ignore_index=IGNORE, reduction="sum")
            for part, to in parts
        ]
        sums = torch.stack(losses)
        weights = torch.tensor([1 - a, a], device=sums.device)
        self._means[model.training].add(sums.detach(), counts.to(sums))
        return (weights * (sums / totals.clamp(min=1).to(sums))).sum(), {"logits": logits}

    def _mean_names(self) -> list[str]:
        return ["next_token_loss", "register_loss"]

    def _pooled_loss(self, sums: Tensor, counts: Tensor) -> float:
        tokens, registers = (sums / counts.clamp(min=1)).tolist()
        return (1 - self.options.weight) * tokens + self.options.weight * registers
