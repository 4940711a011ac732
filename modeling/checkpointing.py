"""Checkpointed activations where no gradient is wanted: nothing is computed again, so no cache has to be given up.

Layers of transformers drop their cache while they checkpoint, whether or not there will be a backward pass. A model
that is left in train mode would then decode every token as if it stood alone. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def caches_kept(model: nn.Module) -> Iterator[None]:
    """Without gradients, no layer inside `model` checkpoints; with gradients, nothing changes."""
    idle = model.training and not torch.is_grad_enabled()
    paused = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)] if idle else []
    try:
        for module in paused:
            module.gradient_checkpointing = False
        yield
    finally:
        for module in paused:
            module.gradient_checkpointing = True
