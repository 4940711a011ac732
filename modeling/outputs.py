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
