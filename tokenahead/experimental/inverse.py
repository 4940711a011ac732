"""Parallel token prediction without a teacher: uniforms in the intervals of the student's own distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..configuration.ptp import SAMPLING
from ..generation.tensors.sampling import interval
from ..modeling.ptp.model import PTPForCausalLM
from ..training.ptp.forwards import Completions, PackedBatch, Scores, completion_tokens, unbroken, uniform_between
from ..training.ptp.losses import PTPOptions
from ..training.ptp.trainer import PTPTrainer


class InverseTrainer(PTPTrainer):
    """`PTPTrainer` without a teacher (PTP paper, Algorithm 3), for categorical slots.

    Uniforms lie in the intervals of the student's own distribution, computed one after the other; the loss is the
    likelihood of the data. It takes no `teacher=`, and options with `loss="ce"` and `sequences="dataset"` alone.
    """

    counts_correct = False  # inverted uniforms are right by construction

    def __init__(self, model: nn.Module, args: Any = None, *, options: PTPOptions | None = None, **kwargs: Any) -> None:
        options = options or PTPOptions()
        if (options.loss, options.sequences) != ("ce", "dataset") or kwargs.get("teacher") is not None:
            raise ValueError("options: inverse training has loss='ce', sequences='dataset' and no teacher=")
        config = model.config if isinstance(model, PTPForCausalLM) else None
        if config and (config.variant != "categorical" or config.sampling != SAMPLING):
            raise ValueError(f"inverse training needs variant='categorical' with sampling={SAMPLING}")
        super().__init__(model, args, options=options, **kwargs)

    @torch.no_grad()
    def _completions(self, packed: PackedBatch, own: Scores | None, exists: Tensor, shares: Tensor) -> Completions:
        """Return completions with uniforms with which the student itself writes them.

        u_k lies in the interval of token k under the student's distribution given u_0..u_{k-1}: one forward per token,
        with one new slot for every completion at once.
        """
        assert own is not None
        starts, count = packed.starts, shares.shape[-1]
        _, tokens, known, scored = completion_tokens(packed.sequences, starts, exists, count)

        def placed(logits: Tensor, own: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
            return uniform_between(*interval(own, logits.double().softmax(-1)), share)

        uniforms, scores = list[list[Tensor]](), own.at(starts - 1)
        for step in range(count):
            uniforms.append(scores.mapped(placed, tokens[..., step], shares[..., step]))
            if step < count - 1:
                scores = packed.following(step, starts, uniforms=uniforms[-1][0][..., None])
        packed.crop((count - 1) * starts.shape[1])
        u, valid = (torch.stack(parts, dim=-1) for parts in zip(*uniforms))
        return Completions(starts, tokens, scored, u, unbroken(valid & known))
