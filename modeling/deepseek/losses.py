"""Loss of a chain of modules: what depths weigh, and the cross-entropy of all of them. Knows no module and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn

from ..heads.chunks import Part, chunked_sums
from ..heads.losses import IGNORE, check_targets, counts_of_update

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


def depth_weights(counts: torch.Tensor, options: ModuleLossOptions) -> torch.Tensor:
    """What the summed cross-entropy of each depth is multiplied with.

    Args:
        counts: [D + 1], targets per depth, the main model first; 0 counts as 1.
        options: The options.

    Returns:
        [D + 1] float32.
    """
    if options.normalization == "paper":
        counts = counts[:1].expand(len(counts))
    share = options.weight / max(len(counts) - 1, 1)
    weights = torch.tensor([1.0] + [share] * (len(counts) - 1), device=counts.device)
    return weights / counts.clamp(min=1)


def chain_loss(
    head: nn.Module,
    states: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    vocab_size: int,
    options: ModuleLossOptions,
    counts: torch.Tensor | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum over depths of the summed cross-entropy, in chunks.

    The depths are not independent: h^k is made from h^{k-1}. So all chunks first leave their gradients on the h^k, and
    autograd then goes down the chain once.

    Args:
        head: From states [R, H] to logits [R, V].
        states: Per depth [B, R_k, H].
        targets: Per depth [B, R_k] int64, -100 where there is none.
        vocab_size: V.
        options: How depths are weighed; with `detach_head`, only depth 0 trains the head.
        counts: `num_items_in_batch`, see `counts_of_update`.

    Returns:
        The scalar, and detached mean cross-entropy per depth in nats, [D + 1] (NaN where there is no target).

    Raises:
        ValueError: A target that is no token id, or counts of another number of depths.
    """

    def terms(state: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits, target = head(state).float(), target[:, 0]
        losses = nn.functional.cross_entropy(logits, target.to(logits.device), ignore_index=IGNORE, reduction="none")
        return losses[:, None]

    own = torch.stack([(check_targets(part, vocab_size) != IGNORE).sum() for part in targets])
    weights = depth_weights(counts_of_update(own, counts), options)
    parts = [
        Part(state, (target[..., None],), weight[None], trains_module=depth == 0 or not options.detach_head)
        for depth, (state, target, weight) in enumerate(zip(states, targets, weights))
    ]
    loss, sums = chunked_sums(terms, head, parts, vocab_size)
    return loss, torch.cat([part.to(own.device) for part in sums]) / own
