"""What models return, and what a trainer reads of a drafter: its loss per depth. Imports no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from ...configuration.heads import MTPHeadConfig


@dataclass
class MTPOutput(CausalLMOutputWithPast):
    """Output of a model or drafter that is trained; losses with labels only.

    Attributes:
        loss: Scalar, discounted sum of the per-depth losses.
        logits: [B, L, V] of the ordinary next-token head ([B, L, N, V] with `return_all_pred_logits`); None where they
            were not requested in training.
        hidden_states: Tuple over layers of [B, L, D], the last after the final norm; unselected entries are None.
        head_losses: [n] detached mean of what the loss is made of per depth (step, place of a block), of heads the
            cross-entropy in nats, the ordinary next token first. Medusa and Hydra heads in training mode have NaN at
            depth 1, the backbone's own, where it weighs nothing.
        backbone_loss: Detached scalar, the mean cross-entropy in nats of the backbone's own next-token head, where that
            trains together with a head that also has a distribution of the first token; then a part of `loss`.
        acceptances: [n] detached mean probability that a token drawn at a depth is accepted after the true tokens
            before it, of heads NaN at depth 1; where the drafter learns the backbone's distribution.
        head_squares: [n] detached mean squared term per depth, where depths are balanced.
    """

    head_losses: Tensor | None = None
    backbone_loss: Tensor | None = None
    acceptances: Tensor | None = None
    head_squares: Tensor | None = None


@dataclass
class DeepSeekMTPOutput(MTPOutput):
    """Output of a model with D sequential modules: `head_losses` is [D + 1], `hidden_states` ends with h^0.

    Attributes:
        mtp_logits: Teacher-forced logits of depth k = 1..D, [B, L - k, V]: row i, made of the tokens up to i + k,
            predicts token i + k + 1. None in training and while generating, unless requested.
        aux_loss: Scalar, balance of the main model's experts; with `output_router_logits` only, and with labels it is
            part of `loss`, times `router_aux_loss_coef`.
        inputs_embeds: [B, L, H] that the first layer read, with features of images; of models with a tower for images
            and with a cache only.
        position_ids: Theirs, [B, L], or [3 or 4, B, L]: those of the text (4), then time, height and width.
    """

    mtp_logits: tuple[Tensor, ...] | None = None
    aux_loss: Tensor | None = None
    inputs_embeds: Tensor | None = None
    position_ids: Tensor | None = None


@dataclass
class EagleOutput(MTPOutput):
    """Output of an EAGLE head that is trained on its backbone, of whose last position `logits` are.

    Attributes:
        step_losses: [steps] detached, of each step of drafting; `head_losses` are the terms that the loss is made of.
    """

    step_losses: Tensor | None = None


@dataclass
class BlockOutput(MTPOutput):
    """Output of a block drafter that is trained on its backbone, of whose last position `logits` are.

    Attributes:
        terms: The parts of the loss by name, detached scalars, before their weights.
    """

    terms: dict[str, Tensor] | None = None


@dataclass
class PTPOutput(CausalLMOutputWithPast):
    """Output of a causal language model with auxiliary positions.

    `read` is the result of the function `read` on the last hidden states; `logits` are None then.
    """

    read: Any = None


class DraftDistributions(NamedTuple):
    """Distributions of drafts of m tokens along known sequences, two tokens ahead of a position and more.

    `draft` makes of rows [N], columns [N] and the tokens that follow [N, m + 1] log-probabilities [N, m, V].
    """

    draft: Callable[[Tensor, Tensor, Tensor], Tensor]
    target: Callable[[Tensor], Tensor]  # from states of the backbone [..., d] to its logits [..., V]
    states: Tensor  # [B, L, d], the backbone's last


def stacked_steps(steps: list[Tensor], length: int) -> Tensor:
    """Return the states [B, R, d] of m steps as one tensor [B, length, m, d], 0 beyond their ends."""
    return torch.stack([nn.functional.pad(step, (0, 0, 0, length - step.shape[1])) for step in steps], dim=2)


@runtime_checkable
class TrainableDrafter(Protocol):
    """A drafter that computes its own loss from labels; `MTPTrainer` trains it.

    Its `forward` takes `labels` and `num_items_in_batch` (targets per depth over the whole update, [n]) and returns an
    output with `loss` and `head_losses` [n = `num_losses`], whose entries the log names by `loss_unit`: `loss_head_1`.
    """

    config: PreTrainedConfig
    loss_unit: str

    @property
    def head_config(self) -> MTPHeadConfig | None: ...

    @property
    def num_losses(self) -> int: ...

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that draft and do nothing else, by name."""
        ...

    def loss_counts(
        self,
        labels: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the targets per depth of a batch with these arguments of `forward`, [n] int64."""
        ...

    def pooled_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Return the loss of data of which only sums of terms and targets per depth are known, [n] each."""
        ...
