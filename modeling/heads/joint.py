"""Heads and their backbone learning together (Medusa-2, Mehra et al.): one module, two directories."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any, cast

from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import can_return_tuple

from ...configuration.heads import MTPHeadConfig
from ...configuration.loss_options import ModuleLossOptions
from ...configuration.transformers_names import obstacle_of_peft
from ...generation.attach import AttachableDrafter
from ...generation.backbone.wrapped_models import WrapperMixin, untyped
from ...generation.tensors.saving import reads_whole, whole_directory
from ...generation.tensors.tensor_files import below, read_tensors
from ..common.learning import run_backbone
from ..common.online import OwnLossMixin
from ..common.outputs import MTPOutput
from ..deepseek.losses import chain_loss
from ..deepseek.modules import LMHeadView
from .attached import MTPHeads
from .losses import counts_of_update, depth_targets

BACKBONE = "backbone"
"""Directory of the backbone, or of its adapters, within that of the heads."""


class JointMTPModel(OwnLossMixin, WrapperMixin, PreTrainedModel):
    """Heads and the backbone that they are attached to, for training both.

    The loss is the backbone's own next-token loss, and lambda (`heads.mtp_loss_weight`) times that of the heads, whose
    gradient reaches the backbone's layers, and not its norm, embeddings or unembedding. `save_pretrained(folder)`
    writes the heads' directory, and the backbone (or its adapters alone, where it has any) in `folder/backbone`.
    """

    config_class = None
    generation_config = AttachableDrafter.generation_config  # the backbone's, too
    supports_gradient_checkpointing = True

    def __init__(self, heads: MTPHeads) -> None:
        super().__init__(heads.config)
        if heads.draft_layers is not None:
            raise ValueError("draft layers leave the backbone as it is: train heads with draft_layers on a frozen one")
        if heads.loss_options.normalization == "paper":
            raise ValueError("normalization='paper' is for heads on a frozen backbone; choose 'tokens'")
        self.heads, self.backbone = heads, heads.backbone
        self._no_split_modules = self.backbone._no_split_modules
        self.loss_type = "ForCausalLM"

    def parts(self) -> dict[str, nn.Module]:
        return {"heads": self.heads}

    @property
    def head_config(self) -> MTPHeadConfig:
        return self.heads.config

    @property
    def window(self) -> int:
        return self.heads.window

    @property
    def _first(self) -> float:
        return 0.0 if self.heads.config.borrows_first else 1.0

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> MTPOutput:
        """Return the joint loss; arguments as in `MTPHeads.forward`, `backbone_loss` is the backbone's own mean."""
        kept = int(self.training) if logits_to_keep is None else logits_to_keep
        layers = self.heads.hidden_layers
        outputs = run_backbone(self.backbone, input_ids, attention_mask, position_ids, layers, kept)
        states, shift_labels = outputs.hidden_states, kwargs.get("shift_labels")
        if labels is None and shift_labels is None:
            return MTPOutput(logits=outputs.logits)
        inputs = labels, attention_mask, position_ids, shift_labels
        counts = counts_of_update(untyped(self), num_items_in_batch, *inputs)
        found = self.heads.learn(
            states, outputs.logits, input_ids, attention_mask, position_ids, labels, counts,
            shift_labels, kwargs.get("balance"), self._first,
        )  # fmt: skip
        targets = depth_targets(labels, self.window, attention_mask, position_ids, shift_labels)[..., 0]
        readout, options = LMHeadView(self.backbone), ModuleLossOptions()
        counts = None if counts is None else counts[:1]
        first = chain_loss(readout, [states[-1]], [targets], self.config.vocab_size, options, counts)
        loss, own_loss = cast(Tensor, found.loss), cast(Tensor, first.loss)
        found.loss, found.backbone_loss = loss + own_loss.to(loss), cast(Tensor, first.head_losses)[0]
        found.hidden_states = states if kwargs.get("output_hidden_states") else None
        return found

    def pooled_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        return self.heads.pooled_loss(sums, counts, self._first)

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        state = self.state_dict() if state_dict is None else state_dict
        spread, card = kwargs.get("distributed_checkpoint", False), f"{BACKBONE}/README.md"
        with whole_directory(save_directory, kwargs.get("variant"), (), [card], spread) as directory:
            parts = {"heads": (self.heads, directory), "backbone": (self.backbone, directory / BACKBONE)}
            for name, (part, place) in parts.items():
                own = below(state, f"{name}.")
                if getattr(part, "_hf_peft_config_loaded", False) and obstacle_of_peft():
                    if is_main_process:
                        _save_adapters(part, place, own)
                else:
                    part.save_pretrained(place, is_main_process, own, **kwargs)

    @reads_whole
    def load_checkpoint(self, folder: str | PathLike) -> None:
        """Take over what `save_pretrained` wrote, into this very model."""
        load_trained(self.heads, Path(folder), "heads")
        load_trained(self.backbone, Path(folder) / BACKBONE, "backbone")


def _save_adapters(model: PreTrainedModel, folder: Path, state: dict[str, Tensor]) -> None:
    """Write the adapters of a model by peft's own functions, where transformers refuses the installed version."""
    untyped(model).peft_config["default"].save_pretrained(folder)
    tensors = get_peft_model_state_dict(model, state).items()
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})


def load_trained(model: PreTrainedModel, folder: Path, what: str) -> None:
    """Take over what `save_pretrained` of a model, or of one with adapters of peft, wrote; `what` is its name."""
    for name in getattr(model, "peft_config", {}):  # of a PeftModel, a property
        # peft writes the adapter "default" into the directory itself, and every other one into a directory of its name
        adapters = (folder if name == "default" else folder / name) / "adapter_model.safetensors"
        if adapters.exists():
            set_peft_model_state_dict(model, load_file(adapters), adapter_name=name)
            return
    state = read_tensors(sorted(folder.glob("model*.safetensors")))
    found = model.load_state_dict(state, strict=False)
    tied = set(model.all_tied_weights_keys or ())
    missing = [name for name in found.missing_keys if name not in tied]
    if missing or found.unexpected_keys or not state:
        raise ValueError(f"{folder} holds other {what}: missing {missing[:3]}, unexpected {found.unexpected_keys[:3]}")
