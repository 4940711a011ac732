"""The loss that balances experts, as the main model's own forward adds it to its loss."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedModel


def router_loss(main: PreTrainedModel, outputs: Any, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Balance of the main model's experts; None where its family has no such loss or no router was recorded.

    The modules' own routers are not recorded by transformers and stay out of it.

    Args:
        main: The main model.
        outputs: What its decoder returned with `output_router_logits=True`.
        attention_mask: [B, L], 0 for padding.

    Returns:
        Scalar, not yet multiplied by `router_aux_loss_coef`.
    """
    balance = getattr(sys.modules[type(main).__module__], "load_balancing_loss_func", None)
    logits = getattr(outputs, "router_logits", None)
    if balance is None or logits is None or not hasattr(main, "router_aux_loss_coef"):
        return None
    return balance(logits, main.num_experts, main.num_experts_per_tok, attention_mask)
