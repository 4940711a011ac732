"""A causal language model that is trained with registers after its tokens (MuToR, arXiv 2505.10518)."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...generation.attach import AttachableDrafter
from ...generation.tensors.masks import additive_mask
from ...generation.tensors.saving import reads_whole, whole_directory
from ...generation.tensors.tensor_files import below
from ...generation.tensors.wrapped_models import WrapperMixin, untyped, unwrap
from ..heads.joint import load_trained
from .inputs import check_config, check_model, packed_mask, packed_positions

REGISTER = "register.safetensors"
"""File of the register, in the model's directory."""


class RegisterModel(WrapperMixin, PreTrainedModel):
    """A model and the one embedding that all its registers have; the model itself is unchanged.

    A register after token t sees the tokens up to t and itself. Its position, t + d - 1, says that it predicts
    token t + d. Tokens never see registers: their logits are the model's own.

    `save_pretrained(folder)` writes the plain model (or its adapters alone, where it has any), and
    `folder/register.safetensors`, which nothing but further training needs.

    Args:
        backbone: A causal language model of transformers, or a PeftModel.

    Raises:
        ValueError: A model that owns a drafter, or that cannot carry positions after its tokens (sliding windows,
            recurrent states, positions that cannot be chosen, attention without dense masks).
    """

    config_class = None
    generation_config = AttachableDrafter.generation_config  # the backbone's, too
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, backbone: PreTrainedModel) -> None:
        plain, attention = unwrap(backbone), backbone.config._attn_implementation
        if hasattr(plain, "train_only"):
            raise ValueError(f"a {type(plain).__name__} owns a drafter; take a plain model of transformers")
        check_config(backbone.config)
        check_model(plain)
        super().__init__(backbone.config)
        backbone.config._attn_implementation = attention  # the new model resets it
        self.backbone = backbone
        self._no_split_modules = plain._no_split_modules
        table = untyped(plain).get_input_embeddings().weight.detach()
        mean = table.to(torch.promote_types(table.dtype, torch.float32)).mean(0, keepdim=True)  # [1, H]
        self.register = nn.Parameter(mean)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, starts: Tensor, offsets: Tensor
    ) -> Tensor:
        """Return the logits of tokens and of the registers after them.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T] int64, 0 for padding, else the number of a document.
            position_ids: [B, T] int64.
            starts: [B, R] int64, the columns after the tokens with registers: t + 1.
            offsets: [B] int64, d of every sequence.

        Returns:
            [B, T + R, V].
        """
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
        own = below(state, "backbone.")
        spread = kwargs.get("distributed_checkpoint", False)
        with whole_directory(save_directory, kwargs.get("variant"), (), ["README.md"], spread) as directory:
            self.backbone.save_pretrained(directory, is_main_process=is_main_process, state_dict=own, **kwargs)
            if is_main_process:
                save_file({"register": state["register"].detach().cpu()}, directory / REGISTER)

    @reads_whole
    def load_checkpoint(self, folder: str | PathLike) -> None:
        """Load what `save_pretrained` wrote into this model.

        Raises:
            ValueError: A directory of another model.
        """
        load_trained(self.backbone, Path(folder), "weights")
        with torch.no_grad():
            self.register.copy_(load_file(Path(folder) / REGISTER)["register"])
