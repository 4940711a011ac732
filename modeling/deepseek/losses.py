"""Loss of a chain of modules: the head and the cross-entropy of all depths in chunks, then one way back down the chain.

The depths are not independent: h^k is made from h^{k-1}. So every depth's gradient is first accumulated on its own h^k,
chunk by chunk and without keeping logits, and autograd then goes through the chain once. Knows no module and no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from ..heads.losses import IGNORE, LOGITS_PER_CHUNK

NORMALIZATIONS = ("mean", "paper")


@dataclass
class ModuleLossOptions:
    """How the modules' losses are made and weighed.

    Attributes:
        weight: lambda; the loss is main + lambda / D * the sum over depths.
        normalization: `"mean"`: every depth is divided by its own number of targets; `"paper"`: every depth is divided
            by the main model's number of targets (DeepSeek-V3's report divides all by T).
        unroll_steps: Depths to train; beyond D the last module goes on from its own output, as when it is reused for
            longer drafts. None: D.
        detach_trunk: The modules' losses do not train the main model's layers.
        detach_head: They do not train the head.
        detach_embedding: They do not train the embeddings.

    Raises:
        ValueError: A value out of range.
    """

    weight: float = 0.3
    normalization: str = "mean"
    unroll_steps: int | None = None
    detach_trunk: bool = False
    detach_head: bool = False
    detach_embedding: bool = False

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight={self.weight} of the modules' losses must be at least 0")
        if self.normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization={self.normalization!r} is unknown; choose 'mean' or 'paper'")
        if self.unroll_steps is not None and self.unroll_steps < 1:
            raise ValueError(f"unroll_steps={self.unroll_steps} must be at least 1, or None for one step per module")

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> ModuleLossOptions:
        """Options from a config.json; fields that are not known are left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in (values or {}).items() if name in known})

    def changed(self) -> dict[str, Any]:
        """The options that differ from the defaults."""
        defaults = asdict(ModuleLossOptions())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


def depth_weights(
    targets: Sequence[torch.Tensor], options: ModuleLossOptions, counts: torch.Tensor | int | None = None
) -> torch.Tensor:
    """What the summed cross-entropy of each depth is multiplied with.

    Args:
        targets: Per depth [B, R_k] int64, the main model first; -100 where there is none.
        options: The options.
        counts: Targets per depth over all micro-batches, [n] or one number for all depths. Counted here if None.

    Returns:
        [n] float32.

    Raises:
        ValueError: `counts` of another length.
    """
    device = targets[0].device
    if counts is None:
        counts = torch.stack([(part != IGNORE).sum() for part in targets])
    counts = torch.as_tensor(counts, device=device).flatten().float()
    if len(counts) not in (1, len(targets)):
        raise ValueError(
            f"num_items_in_batch has {len(counts)} entries; give one number, or one for each of {len(targets)}"
        )
    if len(counts) == 1 or options.normalization == "paper":
        counts = counts[:1].expand(len(targets))
    share = options.weight / max(len(targets) - 1, 1)
    weights = torch.tensor([1.0] + [share] * (len(targets) - 1), device=device)
    return weights / counts.clamp(min=1)


def chunked_cross_entropy(
    head: nn.Module,
    states: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    weights: torch.Tensor,
    vocab_size: int,
    detach_head: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum over depths of the summed cross-entropy; gradients are made at once and no logits are kept.

    Memory beyond parameters and gradients is that of one chunk of logits, however many depths there are.

    Args:
        head: From states [R, H] to logits [R, V].
        states: Per depth [B, R_k, H].
        targets: Per depth [B, R_k] int64, -100 where there is none.
        weights: [n], one for each depth.
        vocab_size: V.
        detach_head: Only depth 0 trains the head.

    Returns:
        The scalar, and detached mean cross-entropy per depth in nats, [n] (NaN where there is no target).
    """
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    total, sums = _ChunkedCrossEntropy.apply(
        head, targets, weights, vocab_size, detach_head, len(states), *states, *parameters
    )
    return total, sums / torch.stack([(part != IGNORE).sum() for part in targets])


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        targets: Sequence[torch.Tensor],
        weights: torch.Tensor,
        vocab_size: int,
        detach_head: bool,
        num_depths: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        states, parameters = tensors[:num_depths], tensors[num_depths:]
        ctx.scale = weights.max()  # gradients are kept at the size of a sum: a mean's would underflow in half precision
        shares = weights / ctx.scale.clamp(min=torch.finfo(weights.dtype).tiny)
        wanted = ctx.needs_input_grad[6 : 6 + num_depths]
        totals = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
        sums, into_states = [], []
        for depth, (state, target) in enumerate(zip(states, targets)):
            trained = totals if depth == 0 or not detach_head else []
            value, gradient = _depth(head, state, target, shares[depth], vocab_size, wanted[depth], parameters, trained)
            sums.append(value)
            into_states.append(gradient)
        ctx.save_for_backward(*into_states, *(total.to(p.dtype) for total, p in zip(totals, parameters)))
        sums = torch.stack(sums)
        ctx.mark_non_differentiable(sums)
        return (sums * weights).sum(), sums

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = gradient * ctx.scale
        parts = (None if part is None else part * factor.to(part.dtype) for part in ctx.saved_tensors)
        return *(None,) * 6, *parts


def _depth(
    head: nn.Module,
    state: torch.Tensor,
    target: torch.Tensor,
    share: torch.Tensor,
    vocab_size: int,
    wanted: bool,
    parameters: Sequence[torch.Tensor],
    totals: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Summed cross-entropy of one depth and the gradient of its states, both by chunks; adds to `totals`."""
    into_state = torch.empty_like(state).flatten(0, 1) if wanted else None
    summed, done = torch.zeros((), device=state.device), 0
    for rows, ids in _chunks(state.flatten(0, 1), target.flatten(), vocab_size):
        with torch.enable_grad():
            rows = rows.detach().requires_grad_(wanted)
            value = nn.functional.cross_entropy(
                head(rows).float(), ids.to(rows.device), ignore_index=IGNORE, reduction="sum"
            )
        inputs = ([rows] if wanted else []) + (list(parameters) if totals else [])
        gradients = list(torch.autograd.grad(value, inputs, share.to(value))) if inputs else []
        if wanted:
            into_state[done : done + len(rows)] = gradients.pop(0)
        for sum_, part in zip(totals, gradients):
            sum_ += part
        summed, done = summed + value.detach().to(summed.device), done + len(rows)
    return summed, None if into_state is None else into_state.view_as(state)


def _chunks(
    states: torch.Tensor, targets: torch.Tensor, vocab_size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rows = max(1, LOGITS_PER_CHUNK // vocab_size)
    return zip(states.split(rows), targets.split(rows))
