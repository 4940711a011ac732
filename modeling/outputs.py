"""Output classes of the models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast


@dataclass
class MTPOutput(CausalLMOutputWithPast):
    """Output of a causal language model with multi-token heads.

    Attributes:
        loss: Scalar, discounted sum of the per-depth losses; with labels only.
        logits: [B, L, V] of the ordinary next-token head ([B, L, N, V] with `return_all_pred_logits`).
        past_key_values: The cache, where one is used.
        hidden_states: Tuple over layers of [B, L, D], the last after the final norm; unselected entries are None.
        head_losses: [n] detached mean cross-entropy in nats per depth, the ordinary next token first; with labels only.
    """

    head_losses: torch.Tensor | None = None


@dataclass
class DeepSeekMTPOutput(MTPOutput):
    """Output of a causal language model with sequential modules.

    `head_losses` is [D + 1], the main model first; `hidden_states` holds h^0, the last state after the final norm.

    Attributes:
        mtp_logits: Teacher-forced logits of depth k = 1..D, [B, L - k, V]: row i, made of the tokens up to i + k,
            predicts token i + k + 1. None in training and while generating, unless asked for.
        aux_loss: Scalar, balance of the main model's experts; with `output_router_logits` only, and with labels it is
            part of `loss`, times `router_aux_loss_coef`.
    """

    mtp_logits: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
