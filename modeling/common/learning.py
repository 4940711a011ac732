"""How heads apart from their backbone learn: on a frozen backbone, on stored states of it, or jointly (joint.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ...configuration import MTPHeadConfig
from ...configuration.fields import requested_states
from ..heads.draft_layers import DraftLayers
from ..heads.losses import depth_targets, depth_weights, head_loss
from ..heads.registry import distribution_after, window_distribution
from ..heads.window_distribution import WindowDistribution
from .backbone_parts import BackboneParts
from .draft_vocabulary import DraftVocabulary
from .loss_options import DepthCountsMixin
from .online import OnlineMixin
from .outputs import MTPOutput

States = Sequence[Tensor | None] | Mapping[int, Tensor]
"""Hidden states of the backbone: L + 1 entries [B, T, D], of which unused ones may be None, or those by index."""


class FrozenBackboneMixin(OnlineMixin):
    """The training forward of a drafter that learns on a frozen backbone, or from stored states of it."""

    training: bool
    backbone: PreTrainedModel
    check_backbone: Callable[[PreTrainedModel], None]
    learn: Callable[..., CausalLMOutputWithPast]

    @property
    def policy(self) -> PreTrainedModel:
        """See `OnlineMixin`."""
        return self.backbone

    def check_policy(self) -> None:
        """See `OnlineMixin`."""
        self.check_backbone(self.backbone)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cached_states: Tensor | None = None,
        cached_summaries: Tensor | None = None,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        """Return the loss of the drafter on the frozen backbone (`learn`), and the backbone's own logits.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, L], 0 for padding.
            position_ids: [B or 1, L]; where they restart, a packed document begins.
            labels: [B, L] int64, shifted here, -100 ignored.
            logits_to_keep: Number of last positions whose logits are returned (0: all), or these positions. None: the
                last one in training, which nothing reads, else all.
            num_items_in_batch: Targets per depth (or step) over all micro-batches, [n] or one number (from the
                Trainer).
            cached_states: [B, L, S, d], the states that `learning_layers` names, from an earlier run of the backbone on
                the same tokens: it is then not run, and there are no logits.
            cached_summaries: [B, L, 2], the `logit_summaries` of these states; None: computed where a loss reads them.
            **kwargs: `shift_labels` [B, L], the target of every position, in place of `labels`; `balance` [n], factors
                of the depths (`loss_balance="rms"`); with `output_hidden_states` the backbone's states that were read
                are returned; the rest is not read.

        Returns:
            `MTPOutput`, or the drafter's own.

        Raises:
            ValueError: Labels that are no token ids, or states of another number of layers.
        """
        if cached_states is not None:
            states, logits = split_states(cached_states, self.learning_layers), None
        else:
            logits_to_keep = int(self.training) if logits_to_keep is None else logits_to_keep
            outputs = self._run_backbone(input_ids, attention_mask, position_ids, logits_to_keep)
            states, logits = outputs.hidden_states, outputs.logits
        inputs = input_ids, attention_mask, position_ids, labels, num_items_in_batch
        output = self.learn(states, logits, *inputs, summaries=cached_summaries, **kwargs)
        if kwargs.get("output_hidden_states") and cached_states is None:
            output.hidden_states = cast(tuple, states)
        return output

    def _run_backbone(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        logits_to_keep: int | Tensor = 1,
    ) -> Any:
        """Return the backbone's outputs, with the states that the drafter reads, and the last."""
        layers = [*dict.fromkeys([*self.learning_layers, -1])]
        with torch.no_grad():
            return run_backbone(self.backbone, input_ids, attention_mask, position_ids, layers, logits_to_keep)


class WindowHeadMixin(DepthCountsMixin):
    """What a model with a window head offers, whether the backbone belongs to it or not.

    Attributes:
        mtp_loss_weight: lambda, what the heads' loss is multiplied with.
        head_config: Options of the head.
        whole_head: The module that makes the distribution of the whole window.
    """

    mtp_loss_weight: float = 1.0
    head_config: MTPHeadConfig
    whole_head: nn.Module
    hidden_layers: list[int]
    draft_vocabulary: DraftVocabulary | None = None
    _parts: Callable[[], BackboneParts | None]
    device: torch.device

    @property
    def normalization(self) -> str:
        """See `DepthCountsMixin`."""
        return self.head_config.loss_normalization

    def distribution_of_features(self, features: Tensor) -> WindowDistribution:
        """Return the distribution of the next `window` tokens given `features` [..., F]."""
        return window_distribution(self.whole_head, self.head_config, features, self._parts(), self.draft_vocabulary)

    def distribution_after(
        self, features: Tensor, last: Tensor, length: int, parts: BackboneParts | None = None
    ) -> WindowDistribution:
        """Return the distribution of `length` tokens given `features` [..., F] and the token [...] that follows.

        `parts` are those of the backbone, where they are looked up already.
        """
        backbone = parts or self._parts()
        return distribution_after(
            self.whole_head, self.head_config, features, last, length, backbone, self.draft_vocabulary
        )

    def window_distribution(self, hidden_states: Tensor) -> WindowDistribution:
        """Return the distribution of the next `window` tokens given the backbone's last hidden states [..., D].

        Raises:
            ValueError: Heads (or draft layers) that read more than one state; use `distribution`.
        """
        config = self.head_config
        if set(self.hidden_layers) != {-1} or config.family.attends(config):
            raise ValueError(f"head_type={config.head_type!r} reads several states here: use distribution(input_ids)")
        return self.distribution_of_features(hidden_states)

    def loss_scale(self, first: float = 1.0) -> Tensor:
        """Return the factors of the depths of the loss besides weights, [n]: lambda, and `first` at depth 1."""
        scale = torch.full((self.head_config.num_depths,), float(self.mtp_loss_weight), device=self.device)
        scale[0] *= first
        return scale

    def pooled_loss(self, sums: Tensor, counts: Tensor, first: float = 1.0) -> Tensor:
        """Return the loss of the head on data in one batch, without `backbone_loss`, from sums per depth.

        Args:
            sums: [n], summed terms in nats.
            counts: [n], targets.
            first: Weight of depth 1, 0 where the backbone learns it itself.
        """
        scale = self.loss_scale(first).to(sums)
        return (sums * scale * depth_weights(self.head_config, counts.to(sums))).sum()


class LearningMixin(FrozenBackboneMixin, WindowHeadMixin):
    """How `MTPHeads` learn."""

    config: MTPHeadConfig
    head: nn.Module
    draft_layers: DraftLayers | None
    backbone: PreTrainedModel
    features: Callable[..., Tensor]

    @property
    def head_config(self) -> MTPHeadConfig:
        """The whole configuration."""
        return self.config

    @property
    def whole_head(self) -> nn.Module:
        """The head."""
        return self.head

    @property
    def learning_layers(self) -> list[int]:
        """The states of the backbone that training reads, as indices of `output_hidden_states`."""
        layers = sorted(set(self.hidden_layers), key=self.hidden_layers.index)
        needs_last = self.draft_layers is None or self.config.loss_target == "teacher"
        return [index for index in layers if index != -1 or needs_last]

    def learn(
        self,
        states: States,
        logits: Tensor | None,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        labels: Tensor | None,
        counts: Tensor | int | None,
        shift_labels: Tensor | None = None,
        balance: Tensor | None = None,
        first: float = 1.0,
        summaries: Tensor | None = None,
        **kwargs: object,
    ) -> MTPOutput:
        """Return the loss on states of the backbone, those that `learning_layers` names, [B, L, d] each; see `forward`.

        `counts` is `num_items_in_batch`, `summaries` is `cached_summaries`; `first` is the weight of depth 1, 0 where
        the backbone learns it itself.
        """
        if labels is None and shift_labels is None:
            return MTPOutput(logits=logits)
        targets = depth_targets(labels, self.config.num_depths, attention_mask, position_ids, shift_labels)
        output = head_loss(
            self.head,
            self.config,
            self.features(states, attention_mask, position_ids),
            targets,
            input_ids,
            counts,
            self._parts(),
            states[-1] if self.config.loss_target == "teacher" else None,
            self.loss_scale(first),
            balance,
            self.draft_vocabulary,
            summaries,
        )
        output.logits = logits
        return output


def run_backbone(
    backbone: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    layers: list[int],
    logits_to_keep: int | Tensor = 1,
) -> Any:
    """Return the backbone's outputs for whole sequences, with the hidden states that `layers` names."""
    return backbone(
        input_ids,
        attention_mask=attention_mask,
        **({} if position_ids is None else {"position_ids": position_ids}),
        use_cache=False,
        logits_to_keep=logits_to_keep,
        output_hidden_states=requested_states(layers),
        return_dict=True,
    )


def split_states(cached: Tensor, layers: list[int]) -> dict[int, Tensor]:
    """Return cached states [B, L, S, d] by the indices of their layers."""
    if cached.dim() != 4 or cached.shape[2] != len(layers):
        wanted = f"[B, L, {len(layers)}, d], the hidden states {layers}"
        raise ValueError(f"cached_states has shape {tuple(cached.shape)}, but this drafter needs {wanted}")
    return dict(zip(layers, cached.unbind(2)))


def counted_positions(states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the position ids [B or 1, T] of states [B, T, d]; padding has 0."""
    if attention_mask is None:
        return torch.arange(states.shape[1], device=states.device)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -states.shape[1] :]
