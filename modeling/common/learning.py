"""How heads apart from their backbone learn: on a frozen backbone, on stored states of it, or jointly (joint.py)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from ...configuration.heads import MTPHeadConfig
from ...configuration.loss_options import HeadLossOptions
from ...generation.attach import AttachableDrafter, NoGenerationMixin
from ...generation.contract import requested_states
from ...generation.drafter import DrafterFacts
from ..heads.context import add_tables
from ..heads.family import distribution_after, init_head, window_distribution
from ..heads.losses import counts_of_update, depth_weights
from ..heads.window_distribution import WindowDistribution
from .backbone_parts import BackboneParts
from .draft_vocabulary import DraftVocabulary, drafted_tokens
from .loading import StrictLoadingMixin
from .online import OwnLossMixin
from .outputs import DraftDistributions, TrainableDrafter

States = Sequence[Tensor | None] | Mapping[int, Tensor]
"""Hidden states of the backbone: L + 1 entries [B, T, D], None where unused, or the used ones by index."""


class DraftModel(OwnLossMixin, StrictLoadingMixin, AttachableDrafter, PreTrainedModel):
    """A network that drafts for a frozen backbone, and learns on it or from stored states; a class offers `learn`."""

    supports_gradient_checkpointing = True
    travels_when_pushed = False
    draft_size: int  # number of the tokens that it drafts
    learn: Callable[..., CausalLMOutputWithPast]
    _part: tuple[Hashable, DraftVocabulary] | None = None
    # Auto classes give a class of foreign code GenerationMixin, unless the name of its `generate` has that in it
    generate = NoGenerationMixin.generate

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
            num_items_in_batch: Targets per depth (or step) over all micro-batches, [n] or one number (a Trainer's).
            cached_states: [B, L, S, d], the states that `learning_layers` names, from an earlier run of the backbone on
                the same tokens: it is then not run, and there are no logits.
            cached_summaries: [B, L, 2], the `logit_summaries` of these states; None: computed where a loss reads them.
            **kwargs: `shift_labels` [B, L], the target of every position, in place of `labels`; `balance` [n], factors
                of the depths (`balance="rms"`); `output_hidden_states`, of those that were read.
        """
        if cached_states is not None:
            states, logits = split_states(cached_states, self.learning_layers), None
        else:
            logits_to_keep = int(self.training) if logits_to_keep is None else logits_to_keep
            outputs = self._run_backbone(input_ids, attention_mask, position_ids, logits_to_keep)
            states, logits = outputs.hidden_states, outputs.logits
        drafter, shift_labels = cast(TrainableDrafter, self), cast(Tensor | None, kwargs.get("shift_labels"))
        counts = counts_of_update(drafter, num_items_in_batch, labels, attention_mask, position_ids, shift_labels)
        inputs = input_ids, attention_mask, position_ids, labels, counts
        output = self.learn(states, logits, *inputs, summaries=cached_summaries, **kwargs)
        if kwargs.get("output_hidden_states") and cached_states is None:
            output.hidden_states = cast(tuple, states)
        return output

    def _run_backbone(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, logits: int | Tensor = 1
    ) -> Any:
        """Return the backbone's outputs, with the states that the drafter reads; by default real tokens are counted."""
        if position_ids is None and attention_mask is not None:
            position_ids = counted_positions(input_ids[..., None], attention_mask)
        layers = [*dict.fromkeys([*self.learning_layers, -1])]
        with torch.no_grad():
            return run_backbone(self.backbone, input_ids, attention_mask, position_ids, layers, logits)

    def add_draft_ids(self, size: int | None, vocab_size: int | None) -> None:
        """Set `draft_size`, and register a buffer of the ids where that is not the whole vocabulary."""
        self.draft_size = size or vocab_size or 0
        if size is not None and size != vocab_size:  # offsets, as in every layout
            self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))

    @property
    def offsets(self) -> Tensor | None:
        """`d2t`, [Vd] int64: token id - draft id; None where all tokens are drafted."""
        return dict(self.named_buffers(recurse=False)).get("d2t")

    @property
    def draft_ids(self) -> Tensor:
        """Token ids that are drafted, [Vd] int64, on the drafter's device."""
        ids = torch.arange(self.draft_size, device=self.device)  # [Vd]
        return ids if self.offsets is None else ids + self.offsets

    @property
    def draft_vocabulary(self) -> DraftVocabulary | None:
        """The tokens that are drafted; None where all tokens are drafted."""
        offsets = self.offsets
        if offsets is None:
            return None
        key = (offsets.data_ptr(), offsets._version, offsets.device)
        if self._part is None or self._part[0] != key:
            ids = self.draft_ids
            if bool((ids[1:] <= ids[:-1]).any()):
                raise ValueError("d2t must name distinct token ids in ascending order")
            self._part = (key, DraftVocabulary(ids, self.config.vocab_size))
        return self._part[1]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_head(module, getattr(self.config, "initializer_range", 0.02))

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        super()._initialize_weights(module)  # of custom code, modules without weights of their own are left out

    def set_draft_ids(self, draft_ids: Tensor) -> None:
        """Set which tokens are drafted, [Vd] distinct token ids."""
        size = self.draft_size
        if len(DraftVocabulary(draft_ids, self.config.vocab_size, "draft_ids")) != size:
            raise ValueError(f"draft_ids are {len(draft_ids)}; they must be as many as draft_vocab_size={size}")
        if self.offsets is not None:
            self.offsets.copy_(draft_ids.to(self.offsets.device) - torch.arange(size, device=self.offsets.device))


class WindowHeadMixin(OwnLossMixin):
    """What a model with a window head offers, whether the backbone belongs to it or not."""

    window: int
    mtp_loss_weight: float = 1.0
    head_config: MTPHeadConfig
    head: nn.Module
    whole_head: nn.Module  # makes the distribution of the whole window
    hidden_layers: list[int]
    features: Callable[..., Tensor]
    policy: PreTrainedModel
    draft_vocabulary: DraftVocabulary | None
    _parts: Callable[[], BackboneParts | None]
    device: torch.device

    @classmethod
    def facts(cls, config: MTPHeadConfig, drafter: object = None) -> DrafterFacts:
        if config.window is None:
            raise TypeError("the config leaves the head's `window` open; set it before rendering a card")
        rows = [
            ("Head", f"`{config.head_type}`: {config.describe()} ({config.family.citation})"),
            ("Window", f"{config.window}: the next token and {config.window - 1} drafted"),
            *drafted_tokens(config),
        ]
        return DrafterFacts("heads", config.window, rows, (config.family.paper,) if config.family.paper else ())

    @property
    def loss_options(self) -> HeadLossOptions:
        return self.head_config.loss_options

    @property
    def loss_normalization(self) -> str:
        return self.loss_options.normalization

    def add_context(self, count: int, rank: int = 64, transitions: bool = False) -> None:
        """Let the leaves of a trained head read tokens of the window before theirs; its distribution is unchanged.

        Args:
            count: How many tokens.
            rank: Rank of the biases.
            transitions: Transitions of an `"hmm"` read the last token, too.
        """
        add_tables(self.head, self.head_config, count, rank, transitions)

    def distribution_of_features(self, features: Tensor) -> WindowDistribution:
        """Return the distribution of the next `window` tokens given `features` [..., F]."""
        return window_distribution(self.whole_head, self.head_config, features, self._parts(), self.draft_vocabulary)

    def distribution_after(
        self, features: Tensor, last: Tensor, length: int, parts: BackboneParts | None = None
    ) -> WindowDistribution:
        """Return the distribution of `length` tokens given `features` [..., F] and the token [...] that follows."""
        given = self.whole_head, self.head_config, features, last, length, parts or self._parts()
        return distribution_after(*given, self.draft_vocabulary)

    def distributions(self, batch: Mapping[str, Tensor], length: int) -> DraftDistributions:
        """Return the distributions of drafts of `length` tokens along `input_ids` of a batch."""
        padding = batch.get("attention_mask"), batch.get("position_ids")
        states = run_backbone(self.policy, batch["input_ids"], *padding, self.hidden_layers).hidden_states
        features = self.features(states, *padding)

        def draft(rows: Tensor, columns: Tensor, tokens: Tensor) -> Tensor:
            after = self.distribution_after(features[rows, columns], tokens[:, 0], length)
            drafts = nn.functional.pad(tokens[:, 1:], (0, after.window - length))  # trees of circuits: whole windows
            return after.conditional_log_probs(drafts)[:, :length].float()  # [N, length, V]

        return DraftDistributions(draft, BackboneParts(self.policy).unembed, states[-1])

    def window_distribution(self, hidden_states: Tensor) -> WindowDistribution:
        """Return the distribution of the next `window` tokens given the backbone's last hidden states [..., D]."""
        config = self.head_config
        if set(self.hidden_layers) != {-1} or config.family.attends(config):
            raise ValueError(f"head_type={config.head_type!r} reads several states here: use distribution(input_ids)")
        return self.distribution_of_features(hidden_states)

    def loss_scale(self, first: float = 1.0) -> Tensor:
        """Return the factors of the depths of the loss besides weights, [n]: lambda, and `first` at depth 1."""
        scale = torch.full((self.head_config.num_depths,), float(self.mtp_loss_weight), device=self.device)  # [n]
        scale[0] *= first
        return scale

    def pooled_loss(self, sums: Tensor, counts: Tensor, first: float = 1.0) -> Tensor:
        """Return the loss of the head, without `backbone_loss`, from sums of terms and targets per depth, [n] each.

        `first` is the weight of depth 1, 0 where the backbone learns it itself.
        """
        scale = self.loss_scale(first).to(sums)
        return (sums * scale * depth_weights(self.head_config, counts.to(sums))).sum()


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
        return torch.arange(states.shape[1], device=states.device)[None]  # [1, T]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -states.shape[1] :]  # [B, T]


def numbered(ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the positions of tokens, and the numbers of their documents, -1 for padding, [B, L] int64 each."""
    real = torch.ones_like(ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    positions, documents = (real.long().cumsum(1) - 1).clamp(min=0), torch.zeros_like(ids)
    if position_ids is not None:
        positions = position_ids.expand(ids.shape)
        documents = nn.functional.pad(positions[:, 1:] <= positions[:, :-1], (1, 0)).long().cumsum(1)
    return positions, documents.masked_fill(~real, -1)
