"""EvaByte's own head and its draft heads: two modules of a model, one matrix `lm_head.weight` in checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..heads.backbone_parts import BackboneParts
from ..heads.ff import FFHead
from ..masks import to_device
from ..wrapped_models import call

OWN, DRAFTS = "lm_head.weight", "draft_heads.weight"


class OwnAndDraftHeads(nn.Module):
    """The own head, which predicts the next token, and the draft heads after it, called like one `FFHead`.

    Made for a call: the model holds the two modules under their own names.
    """

    def __init__(self, own: nn.Module, drafts: FFHead | None, vocab_size: int) -> None:
        super().__init__()
        self.own, self.drafts, self.vocab_size = own, drafts, vocab_size

    def forward(
        self,
        hidden_states: torch.Tensor,
        num_heads: int | None = None,
        backbone: BackboneParts | None = None,
        start: int = 0,
    ) -> torch.Tensor:
        """Return the logits [..., num_heads - start, V] of hidden states [..., D]; see `FFHead.forward`."""
        run = call if torch.is_grad_enabled() else nn.Module.__call__
        own = run(self.own, hidden_states)[..., None, :]
        if self.drafts is None or num_heads == 1:
            return own
        drafts = run(self.drafts, hidden_states, None if num_heads is None else num_heads - 1)
        return torch.cat([own, to_device(drafts, own.device)], dim=-2)[..., start:, :]


def split_heads(weight: torch.Tensor, vocab_size: int, num_drafts: int) -> dict[str, torch.Tensor]:
    """Return the weights of the own head and of the draft heads from those of all heads [N V, D], by name.

    A weight of the own head alone is returned as it is.
    """
    if not num_drafts or len(weight) == vocab_size:
        return {OWN: weight}
    return {OWN: weight[:vocab_size].clone(), DRAFTS: weight[vocab_size:].clone()}


def split_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, *args: Any) -> None:
    """Split the weight of a checkpoint in `state_dict`, before `load_state_dict` of a model reads it."""
    config: Any = model.config
    if (weight := state_dict.get(prefix + OWN)) is not None and len(weight) > config.vocab_size:
        parts = split_heads(weight, config.vocab_size, config.num_pred_heads - 1)
        state_dict |= {prefix + name: part for name, part in parts.items()}


class SplitHeads(ConversionOps):
    """Splits `lm_head.weight` of a checkpoint into the weights of the two modules, or joins them.

    Args:
        joins: Join.
    """

    def __init__(self, joins: bool = False) -> None:
        self.joins = joins

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: PreTrainedModel, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """Return the new weights by name.

        One weight alone is joined with nothing if there are no draft heads, or if the own head is tied.

        Raises:
            ValueError: One of the two is missing, as in a shard of an offloaded model.
        """
        config: Any = model.config
        parts = {name: weights[0] for name, weights in input_dict.items()}
        if not self.joins:
            return split_heads(parts[OWN], config.vocab_size, config.num_pred_heads - 1)
        if len(parts) == 2:
            return {OWN: torch.cat([parts[OWN], parts[DRAFTS]])}
        if config.num_pred_heads > 1 and not (DRAFTS in parts and config.tie_word_embeddings):
            raise ValueError(f"{', '.join(parts)} cannot be saved without the other heads, which lie in another shard")
        return parts

    @property
    def reverse_op(self) -> ConversionOps:
        """The opposite operation."""
        return SplitHeads(not self.joins)


register_checkpoint_conversion_mapping("evabyte", [WeightConverter(OWN, [OWN, DRAFTS], [SplitHeads()])], overwrite=True)
