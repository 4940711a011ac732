"""Summed terms of a module over many positions, in chunks: memory grows with neither positions, depths nor vocabulary.

Logits of a chunk yield their terms and, at once, their gradients, and are freed before the next chunk. Positions where
nothing is scored have none. Gradients of linear maps and embeddings, V d numbers of an unembedding, are added to one
tensor in place. Knows no circuit, no chain and no loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import repeat, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...generation.backbone.wrapped_models import gather

LOGITS_PER_CHUNK = 2**24
"""Logits that exist at a time: 64 MiB of float32 (and a few copies in backward)."""
_LOGITS_ON_PROCESSOR, _SIZE_ON_PROCESSOR = 2**22, 32
"""Logits there (above 32 MiB malloc returns memory), and the least size of a chunk, which passes over all weights."""
_PRODUCT_ROWS, _PRODUCT_ROWS_ON_PROCESSOR = 256, 128
"""Least rows of a product with an unembedding W: with fewer, reading W takes longer than multiplying."""
TermFunction = Callable[..., Tensor]
"""From hidden states [N, D] and a part's arguments to terms [N, n], 0 where nothing is scored."""
_ROWS = 4096
"""Rows of a weight whose gradient exists at a time, where it is not added in place."""
Chunk = tuple[Tensor, list[Tensor | None]]
"""Hidden states [N, D] of some positions, and their arguments, [N, n] each."""


@dataclass
class LossSegment:
    """Positions whose terms are summed and weighed together; terms are 0 where not `scored` (None: all are)."""

    hidden_states: Tensor  # [..., D]
    arguments: Sequence[Tensor | None]  # of the terms, [..., n] each
    weights: Tensor  # [n] float, the factor of each column's sum over positions
    trains_module: bool = True  # whether the module's parameters learn from these positions
    terms: TermFunction | None = None  # in place of the function for all parts
    scored: Tensor | None = None  # [...] bool

    def only_scored(self) -> LossSegment:
        """Return the part without positions where nothing is scored, but for one where there is no other."""
        if self.scored is None:
            return self
        rows = self.scored.flatten().nonzero()[:, 0]  # [N]; an accelerator waits here
        if len(rows) == self.scored.numel():
            return self
        rows = rows if len(rows) else rows.new_zeros(1)

        def chosen(values: Tensor) -> Tensor:
            return values.flatten(0, -2).index_select(0, rows.to(values.device))

        arguments = [None if argument is None else chosen(argument) for argument in self.arguments]
        return replace(self, hidden_states=chosen(self.hidden_states), arguments=arguments, scored=None)

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Yield hidden states [N, D] and arguments [N, n] on the same device, chunk by chunk."""
        hidden = self.hidden_states.flatten(0, -2).split(size)
        pieces = [repeat(None) if each is None else each.flatten(0, -2).split(size) for each in self.arguments]
        for states, *arguments in zip(hidden, *pieces):
            yield states, [None if argument is None else argument.to(states.device) for argument in arguments]


def new_total(parameter: Tensor) -> Tensor:
    """Return zeros in which the gradients of a parameter are summed up, in float32 at least."""
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))


def add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Add a weight's gradient [R, D], of that of its outputs [N, R] and its inputs [N, D], to a total in place."""
    if total.dtype == gradient.dtype:
        total.addmm_(gradient.T, rows)
        return
    # by rows of the weight: a product in another dtype exists for some of them at a time
    for part, block in zip(gradient.split(_ROWS, -1), total.split(_ROWS)):
        block += part.T @ rows


class SummedWeight(torch.autograd.Function):
    """A linear map x W^T, or an embedding, whose gradient for the weight is added to a tensor in place."""

    @staticmethod
    def forward(ctx: Any, map_: Callable, inputs: Tensor, weight: Tensor, total: Tensor, anchor: Tensor) -> Tensor:
        """Return [..., R]; the scalar `anchor` requires a gradient, so that backward always runs."""
        ctx.save_for_backward(inputs, weight)
        ctx.is_embedding, ctx.total = map_ is nn.functional.embedding, total
        return map_(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        flat, into_inputs = gradient.flatten(0, -2), None  # [N, R]
        if ctx.is_embedding:  # each chunk reads few rows of the table
            ctx.total.index_add_(0, inputs.flatten(), flat.to(ctx.total.dtype))
        else:
            add_product(ctx.total, flat, inputs.flatten(0, -2).to(gradient.dtype))
        if ctx.needs_input_grad[1]:
            into_inputs = (gradient @ weight.to(gradient.dtype)).to(inputs.dtype)  # [..., D]
        return None, into_inputs, None, None, ctx.total.new_zeros(())


class _SummedWeights(TorchFunctionMode):
    """Makes linear maps and embeddings add the gradients of weights that have a total to it."""

    def __init__(self, totals: dict[Tensor, Tensor], anchor: Tensor) -> None:
        super().__init__()
        self.totals, self.anchor = totals, anchor

    def __torch_function__(self, func: Callable, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, is_map = kwargs or {}, func in (nn.functional.linear, nn.functional.embedding)
        if not (is_map and len(args) >= 2 and args[1] in self.totals and torch.is_grad_enabled()):
            return func(*args, **kwargs)
        inputs, weight, bias = (*args, kwargs.get("bias"))[:3]
        outputs = SummedWeight.apply(func, inputs, weight.detach(), self.totals[weight], self.anchor)
        return outputs if bias is None or func is nn.functional.embedding else outputs + bias


def chunked_sums(
    terms: TermFunction, module: nn.Module, parts: Sequence[LossSegment], logits_per_position: int, together: int = 1
) -> tuple[Tensor, list[Tensor]]:
    """Return the weighted total of terms that `module` makes of all positions, and detached sums by part, [n] each.

    Gradients, unless they are off, are computed together with the sums and wait for backward, which can run once.
    `logits_per_position` and `together` determine the size of a chunk (`rows_per_chunk`).
    """
    gather(module.modules())
    parts = [part.only_scored() for part in parts]
    states = [part.hidden_states for part in parts]
    parameters: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    size, device = rows_per_chunk(logits_per_position, states[0].device, together), parts[0].weights.device

    def made(needed: list[bool]) -> Made:
        totals = {parameter: new_total(parameter) for parameter in parameters} if any(needed) else {}
        scale = torch.cat([part.weights.to(device) for part in parts]).max()
        passes = [_pass(terms, size, part, totals, scale, want) for part, want in zip(parts, needed)]
        into_states, sums = zip(*passes)
        weighted = (summed * part.weights.to(summed) for summed, part in zip(sums, parts))
        value = reduce(torch.add, [part.sum().to(device) for part in weighted])
        return Made(value, list(sums), [*into_states, *(total.to(p.dtype) for p, total in totals.items())], scale)

    return made_in_forward(made, [*states, *parameters])


@torch.no_grad()
def term_rows(terms: TermFunction, part: LossSegment, logits_per_position: int) -> Tensor:
    """Return the terms of all positions of a part one by one, [positions, n], without gradients."""
    size = rows_per_chunk(logits_per_position, part.hidden_states.device)
    return torch.cat([terms(states, *arguments) for states, arguments in part.chunks(size)])


def rows_per_chunk(logits: int, device: torch.device, together: int = 4) -> int:
    """Return the positions of a chunk, each of which makes so many logits, `together` rows of one product."""
    most = max(1, LOGITS_PER_CHUNK // logits)
    if device.type != "cpu":
        return max(most, min(_PRODUCT_ROWS // together, 8 * most))  # memory has its limit, too
    least = max(_SIZE_ON_PROCESSOR, _PRODUCT_ROWS_ON_PROCESSOR // together)
    return min(most, max(least, _LOGITS_ON_PROCESSOR // logits))


@dataclass
class Made:
    """A loss with the gradients that were made together with it."""

    value: Tensor  # a scalar
    sums: list[Tensor]  # what else is returned, detached
    gradients: list[Tensor | None]  # divided by `scale`: those of a mean would underflow in half precision
    scale: Tensor  # a scalar


def made_in_forward(make: Callable[[list[bool]], Made], inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return a loss and its sums of `make`, which is told which inputs need a gradient; backward can run once."""
    value, *sums = _MadeInForward.apply(make, torch.is_grad_enabled(), *inputs)
    return value, sums


class _MadeInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[[list[bool]], Made], learns: bool, *inputs: Tensor) -> tuple[Tensor, ...]:
        made = make([learns and needed for needed in ctx.needs_input_grad[2:]])
        ctx.gradients, ctx.scale = made.gradients, made.scale
        ctx.mark_non_differentiable(*made.sums)
        return made.value, *made.sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that the forward made, scaled in place: a copy would be n r V d more."""
        if ctx.gradients is None:
            raise RuntimeError("backward ran through this loss before; compute the loss again for a second one")
        gradients, ctx.gradients = ctx.gradients, None
        factor = gradient * ctx.scale
        return None, None, *(None if part is None else part.mul_(factor.to(part)) for part in gradients)


def _pass(
    terms: TermFunction, size: int, part: LossSegment, totals: dict[Tensor, Tensor], scale: Tensor, wanted: bool
) -> tuple[Tensor | None, Tensor]:
    """Return the gradient of a part's hidden states, where `wanted`, and its sums [n]; add to the totals."""
    shares = part.weights / scale.clamp(min=torch.finfo(scale.dtype).tiny)
    totals, sums = totals if part.trains_module else {}, list[Tensor]()
    # written in place: small results that outlive a chunk would keep malloc from using its memory again
    into_states = torch.empty_like(part.hidden_states.flatten(0, -2)) if wanted else None
    pieces = () if into_states is None else into_states.split(size)
    for chunk, piece in zip_longest(part.chunks(size), pieces):
        summed, gradient = _chunk(part.terms or terms, chunk, shares, wanted, totals)
        sums.append(summed)
        if piece is not None:
            piece.copy_(gradient)
    return None if into_states is None else into_states.view_as(part.hidden_states), torch.stack(sums).sum(0)


def _chunk(
    terms: TermFunction, chunk: Chunk, shares: Tensor, wanted: bool, totals: dict[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return sums of one chunk, [n], and the gradient of its states, if wanted; add those of parameters to `totals`."""
    states, arguments = chunk
    learns = wanted or bool(totals)
    anchor = torch.zeros((), device=states.device, requires_grad=learns)
    with torch.set_grad_enabled(learns):
        states = states.detach().requires_grad_(wanted)
        with _SummedWeights(totals, anchor):
            sums = terms(states, *arguments).sum(0)
        if not learns:
            return sums, states
        inputs = [states, anchor, *totals] if wanted else [anchor, *totals]
        with torch.autocast(states.device.type, enabled=False):
            value = (sums * shares.to(sums)).sum()
            value = value + 0.0 * anchor  # of maps that learn nothing there is nothing else to derive by
            found = torch.autograd.grad(value, inputs, allow_unused=True)
    for parameter, gradient in zip(totals, found[len(inputs) - len(totals) :]):
        if gradient is not None:  # not a linear map's
            totals[parameter] += gradient
    return sums.detach(), found[0]
