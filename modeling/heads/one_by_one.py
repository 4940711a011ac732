"""The loss of layer heads, one head after the other: memory that does not grow with their number (Gloeckle et al. 3.2).

z, the input of all heads, is cut off. Each head runs forward and backward on it before the next begins, so that the
activations of one head exist at a time; what reaches z is summed, and goes on into the trunk once. The gradients are
those of all heads together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .chunks import Part, chunked_sums

HeadStates = Callable[[int, torch.Tensor], torch.Tensor]
"""From the number of a head and z [B, L, d] to what the unembedding reads, [B, L, d]."""


def sums_one_by_one(
    run: HeadStates,
    layers: nn.ModuleList,
    z: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    unembed: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of the cross-entropies of all heads, whose gradients are made at once and wait for backward.

    Args:
        run: A head.
        layers: The heads' parameters, in order.
        z: [B, L, d], the input of all heads.
        targets: [B, L, heads] int64, -100 where nothing is scored.
        weights: [heads], what the sum of each head is multiplied with.
        unembed: From states to logits [..., V], with frozen parameters.
        vocab_size: V.

    Returns:
        The scalar, and detached sums per head, [heads].
    """
    parameters = [[p for p in layer.parameters() if p.requires_grad] for layer in layers]
    flat = [p for part in parameters for p in part]
    task = (run, parameters, targets, weights, unembed, vocab_size, torch.is_grad_enabled())
    return _OneByOne.apply(task, z, *flat)


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, task: tuple[Any, ...], z: torch.Tensor, *_: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        run, parameters, targets, weights, unembed, vocab_size, learns = task
        wanted = learns and ctx.needs_input_grad[1]
        into_z = torch.zeros_like(z) if wanted else None
        found, losses, sums = [], [], []
        for k, own in enumerate(parameters):
            with torch.set_grad_enabled(learns):
                inputs = z.detach().requires_grad_(wanted)
                part = Part(run(k, inputs), (targets[..., k : k + 1],), weights[k : k + 1])
                loss, (summed,) = chunked_sums(_terms(unembed), nn.Module(), [part], vocab_size)
                asked = [*([inputs] if wanted else []), *(own if learns else [])]
                gradients = list(torch.autograd.grad(loss, asked, allow_unused=True)) if asked else []
            if wanted:
                into_z += gradients.pop(0)
            found += gradients if learns else [None] * len(own)
            losses.append(loss.detach())
            sums.append(summed)
        ctx.gradients = [into_z, *found]
        total, sums = torch.stack(losses).sum(), torch.cat(sums)
        ctx.mark_non_differentiable(sums)
        return total, sums

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward went through this loss before; compute the loss again to go through it twice")
        gradients, ctx.gradients = ctx.gradients, None
        return None, *(None if part is None else part.mul_(gradient.to(part)) for part in gradients)


def _terms(unembed: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def terms(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = unembed(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(logits, targets[:, 0], reduction="none")[:, None]

    return terms
