"""Parallel token prediction without a teacher: uniforms in the intervals of the student's own distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..configuration.ptp import SAMPLING
from ..generation.tensors.uniforms import uniform_for
from ..modeling.ptp.model import PTPForCausalLM
from ..training.ptp.forwards import Completions, PackedBatch, Scores, SlotInputs, completion_tokens
from ..training.ptp.losses import PTPOptions
from ..training.ptp.tasks import Found, TaskMaker
from ..training.ptp.trainer import PTPTrainer


class InverseTrainer(PTPTrainer):
    """`PTPTrainer` without a teacher (PTP paper, Algorithm 3), for categorical slots.

    Uniforms lie in the intervals of the student's own distribution, computed one after the other; the loss is the
    likelihood of the data.

    Raises:
        ValueError: Other slots, a model that samples another distribution than the data's own, a teacher, or
            other options than `loss="ce"` and `sequences="dataset"`.
    """

    counts_correct = False  # inverted uniforms are right by construction

    def __init__(self, model: nn.Module, args: Any = None, *, options: PTPOptions | None = None, **kwargs: Any) -> None:
        options = options or PTPOptions()
        if (options.loss, options.sequences) != ("ce", "dataset") or kwargs.get("teacher") is not None:
            raise ValueError("options: inverse training has loss='ce', sequences='dataset' and no teacher=")
        config = model.config if isinstance(model, PTPForCausalLM) else None
        if config and (config.variant != "categorical" or not config.informative or config.sampling != SAMPLING):
            raise ValueError(f"inverse training needs variant='categorical', informative, with sampling={SAMPLING}")
        super().__init__(model, args, options=options, **kwargs)

    @property
    def _maker(self) -> TaskMaker:
        return InverseTaskMaker(*super()._maker.arguments)


class InverseTaskMaker(TaskMaker):
    """Makes tasks whose uniforms the student itself would write the completions with."""

    def found(self, packed: PackedBatch, own: Scores | None, exists: Tensor, shares: Tensor) -> Found:
        assert own is not None
        _, tokens, known, scored = completion_tokens(packed.sequences, packed.starts, exists, shares.shape[-1])
        nowhere = torch.zeros_like(shares)
        completions = Completions(packed.starts, tokens, known, scored, nowhere, nowhere)
        return completions, *inverted(packed, own.at(packed.starts - 1), tokens, known, shares)


@torch.no_grad()
def inverted(
    packed: PackedBatch, first: Scores, tokens: Tensor, known: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """Return uniforms with which the student itself writes the completions; as `Completions.place`.

    u_k lies in the interval of token k under the student's distribution given u_0..u_{k-1}: one forward per token, with
    one new slot for every completion at once. `first` [B, C] are the scores of the first tokens, from `read`.
    """

    def placed(logits: Tensor, own: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        return uniform_for(own, logits.double().softmax(-1), share)

    uniforms, scores, count = [], first, tokens.shape[2]
    for step in range(count):
        uniforms.append(scores.mapped(placed, tokens[..., step], shares[..., step]))
        if step < count - 1:
            scores = packed.following(step, packed.starts, slots=SlotInputs(uniforms[-1][0][..., None]))
    packed.crop((count - 1) * packed.starts.shape[1])
    u, valid = (torch.stack(parts, dim=-1) for parts in zip(*uniforms))
    return u, (valid & known).long().cumprod(-1).bool()
