"""Bits per byte of a model on held-out text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel


@torch.inference_mode()
def bits_per_byte(model: PreTrainedModel, windows: Sequence[Any], limit: int, batch_size: int = 16) -> list[float]:
    """Cross-entropy of every head on windows spread evenly over a text.

    Args:
        model: A model with `head_losses`.
        windows: The text (`ByteWindows`): entries with `input_ids` [L].
        limit: Windows to use, at most.
        batch_size: Windows per forward.

    Returns:
        Bits per byte of head 1, 2, ... (head j predicts the byte j ahead).
    """
    chosen = range(0, len(windows), -(-len(windows) // limit))
    total = 0.0
    for batch in torch.tensor(chosen).split(batch_size):
        ids = torch.stack([windows[int(index)]["input_ids"] for index in batch]).to(model.device)
        losses = model(ids, labels=ids, use_cache=False, logits_to_keep=1).head_losses
        total = total + losses * len(batch)
    return (total / len(chosen) / math.log(2)).tolist()


@torch.no_grad()
def window_bits(model: torch.nn.Module, ids: torch.Tensor, batch_size: int = 8) -> torch.Tensor:
    """Bits per byte of the next byte, window by window.

    Args:
        model: A causal language model over bytes.
        ids: [N, L] windows that begin with `<bos>`.
        batch_size: Windows per forward.

    Returns:
        [N] float64; windows are alike in length, so their mean is that of the text, and their spread its uncertainty.
    """
    found = []
    for part in ids.split(batch_size):
        logits = model(part, use_cache=False).logits[:, :-1].float()
        nats = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none").view(len(part), -1)
        found.append(nats.double().mean(1) / math.log(2))
    return torch.cat(found)
