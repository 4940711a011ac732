"""Per-token terms of a head over many positions, in chunks: memory grows with neither positions, rank nor window.

Two things would grow otherwise. The logits of a chunk, n r V per position, are bounded by taking fewer positions, and
are computed again in backward. The gradient of the leaf weights, n r V d numbers, would be made anew by every chunk;
here each chunk adds to one tensor in place, which then is the gradient. Knows no circuit and no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Terms = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""From hidden states [N, D], tokens [N, n] and holes [N, n] to terms [N, n]."""
_GRADIENTS_PER_BLOCK = 2**20


@dataclass
class WeightTotal:
    """Where the gradient of a weight is summed up.

    Attributes:
        total: As the weight, [R, D].
        anchor: A scalar that requires a gradient, so that backward visits the weight where nothing else asks it to.
    """

    total: torch.Tensor
    anchor: torch.Tensor


class SummedLinear(torch.autograd.Function):
    """x W^T whose gradient for W is added to a tensor in place, block by block."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, total: torch.Tensor, anchor: torch.Tensor, skip: int
    ) -> torch.Tensor:
        """Multiplies.

        Args:
            ctx: Of autograd.
            inputs: [..., D].
            weight: [R, D].
            total: [at least R, D], takes the gradient of the weight.
            anchor: See `WeightTotal`.
            skip: So many first rows get no gradient.

        Returns:
            [..., R].
        """
        ctx.save_for_backward(inputs, weight)
        ctx.total, ctx.skip = total, skip
        return nn.functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradient of the inputs, where one is wanted, and 0 for the anchor."""
        inputs, weight = ctx.saved_tensors
        flat, rows = gradient.flatten(0, -2), inputs.flatten(0, -2).to(gradient.dtype)
        step = max(1, _GRADIENTS_PER_BLOCK // rows.shape[-1])
        for start in range(ctx.skip, flat.shape[-1], step):
            part = flat[:, start : start + step]
            ctx.total[start : start + part.shape[1]] += part.T @ rows
        wanted = ctx.needs_input_grad[0]
        into_inputs = (gradient @ weight.to(gradient.dtype)).to(inputs.dtype) if wanted else None
        return into_inputs, None, None, ctx.total.new_zeros(()), None


def chunked_terms(
    terms: Terms,
    head: nn.Module,
    hidden_states: torch.Tensor,
    tokens: torch.Tensor,
    unknown: torch.Tensor | None,
    rows: int,
) -> torch.Tensor:
    """`terms` of all positions, `rows` at a time.

    Args:
        terms: Computes the terms of some positions with the head's parameters.
        head: Its modules that have `weight_total` put the gradient of their weight there while it is set.
        hidden_states: [N, D].
        tokens: [N, n] int64.
        unknown: [N, n] bool, or None.
        rows: Positions per chunk.

    Returns:
        [N, n]; gradients flow to the hidden states and to the head's parameters (once, not twice).
    """
    if len(hidden_states) <= rows:
        return terms(hidden_states, tokens, unknown)
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return _ChunkedTerms.apply(terms, head, hidden_states, tokens, unknown, rows, *parameters)


class _ChunkedTerms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        terms: Terms,
        head: nn.Module,
        hidden_states: torch.Tensor,
        tokens: torch.Tensor,
        unknown: torch.Tensor | None,
        rows: int,
        *parameters: nn.Parameter,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_states, tokens, unknown)
        ctx.terms, ctx.head, ctx.rows, ctx.parameters = terms, head, rows, parameters
        device = hidden_states.device.type
        ctx.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return torch.cat([terms(*part) for part in _parts(hidden_states, tokens, unknown, rows)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_states, tokens, unknown = ctx.saved_tensors
        totals = {parameter: torch.zeros_like(parameter) for parameter in ctx.parameters}
        parts = zip(_parts(hidden_states, tokens, unknown, ctx.rows), gradient.split(ctx.rows))
        with _summed(ctx.head, totals) as (anchor, others):
            into_hidden = [_backward(ctx, *part, into, [anchor, *others], totals) for part, into in parts]
        wanted = ctx.needs_input_grad[2]
        into_hidden = torch.cat(into_hidden) if wanted else None
        return None, None, into_hidden, None, None, None, *totals.values()


@contextmanager
def _summed(
    head: nn.Module, totals: dict[nn.Parameter, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, list[nn.Parameter]]]:
    """Makes the leaves of a head sum up their own gradients; gives the anchor, and the parameters that do not."""
    leaves = [module for module in head.modules() if hasattr(module, "weight_total") and module.weight in totals]
    anchor = torch.zeros((), device=next(iter(totals)).device, requires_grad=True)
    try:
        for leaf in leaves:
            leaf.weight_total = WeightTotal(totals[leaf.weight], anchor)
        yield anchor, [p for p in totals if not any(p is leaf.weight for leaf in leaves)]
    finally:
        for leaf in leaves:
            leaf.weight_total = None


def _backward(
    ctx: Any,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    unknown: torch.Tensor | None,
    gradient: torch.Tensor,
    inputs: list[torch.Tensor],
    totals: dict[nn.Parameter, torch.Tensor],
) -> torch.Tensor | None:
    """Computes one chunk again and goes back through it; returns the gradient of its hidden states, if wanted."""
    device, wanted = hidden.device.type, ctx.needs_input_grad[2]
    with torch.enable_grad(), torch.autocast(device, ctx.autocast[1], enabled=ctx.autocast[0]):
        hidden = hidden.detach().requires_grad_(wanted)
        value = ctx.terms(hidden, tokens, unknown)
    inputs = [hidden, *inputs] if wanted else inputs
    gradients = torch.autograd.grad(value, inputs, gradient, allow_unused=True)
    for parameter, part in zip(inputs, gradients):
        if part is not None and parameter in totals:
            totals[parameter] += part
    return gradients[0] if wanted else None


def _parts(
    hidden_states: torch.Tensor, tokens: torch.Tensor, unknown: torch.Tensor | None, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    pieces = [hidden_states.split(rows), tokens.split(rows)]
    pieces.append([None] * len(pieces[0]) if unknown is None else unknown.split(rows))
    return zip(*pieces)
