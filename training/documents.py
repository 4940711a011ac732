"""Whether a model reads joined rows apart.

It is tried, not looked up in a list of models: the loss of a document must not depend on the document before it. That
holds where attention reads position ids; recurrent layers and short convolutions mix what they pass over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..modeling.common.recording import STATES, SUMMARIES
from ..modeling.heads.losses import IGNORE

_LENGTH = 36
"""Tokens of a document in the trial: more than short convolutions reach, and two are attended to one by one."""


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Switch dropout off within the context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def obstacle_to_joining(model: Any, row: Mapping[str, Any], device: torch.device) -> str:
    """Return why rows of a model may not be joined: it mixes documents, or its forward fails; empty where they may.

    Where it mixes them, the loss of a document changes with the document before it. It changes a little where experts
    sum other rows in another order; as much then, where the two are rows of a batch.

    Args:
        model: What is trained, without wrappers of distribution.
        row: A row of its data: where it has states of a backbone, the backbone is not run.
        device: The device of the inputs.
    """
    cards = [] if device.type == "cpu" else [device]
    with at_rest(model), torch.random.fork_rng(cards, device_type=device.type):
        try:
            joined, apart = (_change(model, row, device, is_joined) for is_joined in (True, False))
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:  # it takes no position ids, for example
            return f"its forward of two documents fails with {type(error).__name__}: {error}"
    return "it mixes documents" if joined > 4 * apart else ""


def _change(model: Any, row: Mapping[str, Any], device: torch.device, is_joined: bool) -> float:
    """Return how much the losses of a document change with the other one, joined or as rows of a batch."""
    losses = []
    for other in (7, 5):
        torch.manual_seed(0)  # a backbone apart may have dropout
        output = model(**_two_documents(model, row, other, device, is_joined), use_cache=False)
        losses.append(torch.cat([output.loss.flatten(), output.head_losses.flatten()]).double())
    return float((losses[0] - losses[1]).abs().nan_to_num(0.0).max())


def _two_documents(
    model: Any, row: Mapping[str, Any], other: int, device: torch.device, is_joined: bool
) -> dict[str, Tensor]:
    """Return a batch of two documents; `other` chooses the first one, and the second alone is scored."""
    places = torch.arange(_LENGTH, device=device)
    ids = torch.stack([other * places + 1, 3 * places + 2]) % model.config.get_text_config().vocab_size  # [2, N]
    labels = ids.clone()
    labels[0] = IGNORE
    batch = {"input_ids": ids, "labels": labels}
    if STATES in row:
        states = torch.randn([2, _LENGTH, *row[STATES].shape[1:]], generator=torch.Generator().manual_seed(0))
        states[0] *= other
        batch[STATES] = states.to(device, row[STATES].dtype)
        if SUMMARIES in row:  # any, which need no unembedding
            batch[SUMMARIES] = torch.zeros(2, _LENGTH, *row[SUMMARIES].shape[1:], device=device)
    if is_joined:
        batch = {name: each.flatten(0, 1)[None] for name, each in batch.items()}
        batch["position_ids"] = places.repeat(2)[None]
    return batch
