"""Heads apart from their backbone: a small directory that makes any plain causal LM speculate.

The heads have the backbone only while attached to it, and save their own tensors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...configuration.head_families import HEAD_FAMILIES
from ...configuration.heads import MTPHeadConfig
from ...configuration.loss_options import HeadLossOptions
from ...generation.attach import adopt_fields
from ...generation.call.options import DraftOptions
from ...generation.drafter import DRAFTERS
from ...generation.tensors.saving import reads_whole, whole_directory
from ...generation.tensors.shared_models import check_whole
from ...generation.tensors.tensor_files import Fields
from ...generation.tensors.wrapped_models import untyped, unwrap
from ..common.backbone_parts import BackboneParts, compute_device
from ..common.draft_vocabulary import DraftVocabulary, TokenIds
from ..common.learning import DraftModel, States, WindowHeadMixin, counted_positions
from ..common.outputs import MTPOutput
from .context import make_table
from .conversion import (
    backbone_from_official,
    check_fit,
    engine_layout,
    export_head,
    heads_from_official,
    refuse_published,
)
from .draft_layers import BoundLayers, DraftLayers, LayerAdapters, new_layers
from .family import FAMILIES, HeadFamily, last_state
from .losses import depth_targets, head_loss
from .registry import build_head, config_of_backbone, distribution_after, init_head
from .session import AttendingHeadSession, HeadSession
from .window_distribution import WindowDistribution


class MTPHeads(WindowHeadMixin, DraftModel):
    """Multi-token heads for a backbone that is unchanged.

    Attached heads pass as `assistant_model`: `backbone.generate(..., assistant_model=heads)` speculates losslessly, any
    batch size, greedy and sampled, with the options of `MTPGenerationMixin`. `Trainer(model=heads)` trains them on the
    frozen backbone.

    Args:
        config: Head options, with `window`, `hidden_size` and `vocab_size`.

    Attributes:
        window: n: tokens that the distribution covers; a draft has n - 1.

    Raises:
        ValueError: A config without those three.

    Example:
        >>> heads = MTPHeads.from_backbone(backbone, window=4)
        >>> out = backbone.generate(**inputs, assistant_model=heads)
        >>> heads.save_pretrained("heads")
        >>> heads = MTPHeads.from_pretrained("heads").attach(backbone)
    """

    config: MTPHeadConfig
    config_class = MTPHeadConfig
    remote_classes = {"AutoModel": "MTPHeads"}
    drafts_trees, reads_prompt, not_served = True, False, None
    _expected_embedding: Tensor | None = None  # until heads that came with one are attached

    def __init__(self, config: MTPHeadConfig) -> None:
        super().__init__(config)
        config.loss_options = HeadLossOptions.of(config.loss_options)  # a dict where `from_pretrained` sets it
        sizes = {"window": config.window, "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        if "num_blocks" in HEAD_FAMILIES[config.head_type].options and config.unembedding == "shared":
            del sizes["vocab_size"]  # that of the backbone, once there is one
        if missing := [name for name, value in sizes.items() if value is None]:
            raise ValueError(f"the config of MTPHeads lacks {', '.join(missing)}")
        self.loss_type, self.window = "ForCausalLM", config.num_depths
        self.add_draft_ids(config.draft_vocab_size, config.vocab_size)
        self.head = build_head(config, cast(int, config.hidden_size), self.draft_size)
        self.draft_layers = DraftLayers(config) if config.draft_layers else None
        self._backbones = []
        self.post_init()

    @classmethod
    def from_backbone(
        cls,
        backbone: PreTrainedModel,
        window: int = 4,
        unembedding: str | None = "shared",
        draft_ids: TokenIds | None = None,
        **options: Any,
    ) -> MTPHeads:
        """Return new heads for `backbone`, attached; with its unembedding, or a copy, they start as its own head.

        Args:
            backbone: A causal language model of transformers; of a PeftModel, the model within.
            window: n; drafts have n - 1 tokens.
            unembedding: See `MTPHeadConfig`; None: the default there.
            draft_ids: [Vd] distinct ids of the only tokens that are drafted (see `frequent_tokens`); None: all, or the
                first `draft_vocab_size`.
            **options: Further fields of `MTPHeadConfig`.

        Raises:
            ValueError: `draft_ids` out of range or not distinct.
            TypeError: An option that is no field of `MTPHeadConfig`.
        """
        backbone = unwrap(backbone)
        if draft_ids is not None:
            draft_ids = DraftVocabulary(draft_ids, backbone.config.get_text_config().vocab_size, "draft_ids").ids
            options["draft_vocab_size"] = len(draft_ids)
        config = config_of_backbone(backbone, window=window, unembedding=unembedding, **options)
        heads = cls(config)
        if draft_ids is not None:
            heads.set_draft_ids(draft_ids)
        heads.family.start_from(heads.head, BackboneParts(backbone, heads.draft_vocabulary))
        return heads.attach(backbone)

    def parts(self) -> dict[str, nn.Module]:
        return super().parts() | ({} if self.draft_layers is None else {"draft_layers": self.draft_layers})

    def _parts(self) -> BackboneParts | None:
        """Return what the heads borrow of the backbone for one call."""
        return BackboneParts(self.backbone, self.draft_vocabulary) if self.is_attached else None

    def _set_gradient_checkpointing(self, enable: bool = True, *args: object, **kwargs: object) -> None:
        """Recompute layers of heads in backward; the loss is always chunked.

        Never re-entrant, even on request: states of a frozen backbone need no gradient, and nothing would learn.
        """
        if any(isinstance(module, GradientCheckpointingLayer | LayerAdapters) for module in self.modules()):
            super()._set_gradient_checkpointing(enable, partial(checkpoint, use_reentrant=False))

    def get_input_embeddings(self) -> None:
        """Return None: heads have no embeddings (FSDP2 would shard them apart)."""

    def without_code(self) -> str | None:
        """Return why no code can be saved with heads of a family that was registered elsewhere."""
        known = f"head_type={self.config.head_type!r} is not of tokenahead, and its code is not known here"
        return super().without_code() if self.family.is_built_in else known

    @classmethod
    @reads_whole
    def from_official(
        cls,
        folder: str | PathLike,
        backbone: PreTrainedModel | None = None,
        *,
        ignore_fields: Sequence[str] = (),
        **options: Any,
    ) -> MTPHeads:
        """Load heads from a directory of their authors: Medusa, Hydra, Gloeckle et al., MtPC.

        Args:
            folder: A local directory, whose files determine its layout: Medusa's version 1, 2, merged, vLLM's; MtPC's
                `model@N.pt` (the last one) and `config.yaml`.
            backbone: The model to attach them to; MtPC's with draft layers read its configuration by the recorded name
                if it is left out.
            ignore_fields: Fields of its config.json that are passed over; unknown ones are refused.
            **options: Fields of `MTPHeadConfig` that the directory lacks (`vocab_size` for Medusa's version 2), or that
                should differ, as `loss_options`.

        Returns:
            The heads, attached if there is a backbone, else in the dtype of their tensors.

        Raises:
            ValueError: An unknown layout or field, unknown or missing tensors, a pickle of more than tensors, another
                backbone.
        """
        heads, heads._expected_embedding = heads_from_official(cls, Path(folder), options, backbone, ignore_fields)
        return heads if backbone is None else heads.attach(backbone)

    @classmethod
    def check_model_type(cls, name: str | PathLike | None, config: Any = None, **hub: Any) -> None:
        """Refuse a directory that `from_official` reads, with that name, and others as every class does."""
        if config is None:
            refuse_published(name, cls)
        super().check_model_type(name, config, **hub)

    @classmethod
    @reads_whole
    def backbone_from_official(cls, folder: str | PathLike) -> PreTrainedModel:
        """Return the backbone in a directory that holds it with its heads (merged Medusa-2, Gloeckle et al.).

        Raises:
            ValueError: A directory of heads alone.
        """
        return backbone_from_official(Path(folder))

    def export(self, folder: str | PathLike, layout: str) -> None:
        """Write the heads as their authors' tools, or an engine, will read them.

        Args:
            folder: The directory, which is created.
            layout: `"medusa"` (safetensors), `"vllm"` (Medusa, and independent heads as Medusa without blocks),
                `"hydra"`, or `"gloeckle"` (with the backbone).

        Raises:
            ValueError: A layout that cannot hold these heads.
            RuntimeError: The heads are not attached: some layouts repeat tensors of the backbone.
        """
        with whole_directory(folder) as directory:
            export_head(self.config, self.head.state_dict(), lambda: self.backbone, directory, layout)

    def export_to(self, engine: str, folder: Path) -> Fields:
        """See `BaseDrafter`: in vLLM's Medusa layout, or as they are saved, for a class of vLLM's user to read."""
        is_held = engine_layout(self.config, engine) is not None
        if is_held:
            self.export(folder, engine)
        else:
            self.save_pretrained(folder)
        method = "medusa" if is_held else "custom_class"
        return {"method": method, "num_speculative_tokens": self.config.num_depths - 1}

    def made_for(self) -> Mapping[str, object]:
        vocabulary = {} if self.config.vocab_size is None else {"vocab_size": self.config.vocab_size}
        return {"hidden_size": self.config.hidden_size} | vocabulary

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuse a backbone with another hidden size or vocabulary."""
        super().check_backbone(backbone)
        check_fit(self._expected_embedding, self.hidden_layers, backbone)
        if self.draft_layers is not None:
            check_whole(backbone, f"draft_layers={self.config.draft_layers}")

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Follow the backbone's dtype and device, and adopt its special ids."""
        dtype = backbone.dtype if backbone.dtype.is_floating_point else None
        untyped(self).to(device=compute_device(backbone), dtype=dtype)
        adopt_fields(self.config, backbone)
        self.config.vocab_size = backbone.config.get_text_config().vocab_size
        if self.draft_vocabulary is None:
            self.draft_size = self.head.vocab_size = self.config.vocab_size  # type: ignore[assignment]
        self.family.fit(self.head, self.config, backbone)
        self._expected_embedding = None

    def start(self, options: DraftOptions) -> HeadSession:
        """Return the draft session of one call of `generate`."""
        family, part = self.family, None if self.config.draft_vocab_size is None else self.draft_vocabulary
        parts = BackboneParts(self.backbone, part)
        after = partial(distribution_after, self.head, self.config, backbone=parts, vocabulary=part)
        make_table(self.head)
        reads_last = family.features is last_state and family.hidden_layers is HeadFamily.hidden_layers
        if self.draft_layers is None and reads_last:  # features are the states, and there is no cache
            return HeadSession(after, options, [-1], vocabulary=part)
        if self.attends:
            return AttendingHeadSession(self, options, self.features_of_call())
        return HeadSession(after, options, self.hidden_layers, self.features, part)

    @property
    def family(self) -> HeadFamily:
        """The registered record of heads of this type."""
        return FAMILIES[self.config.head_type]

    @property
    def attends(self) -> bool:
        """Whether features depend on other positions; drafting then needs a cache, of verified positions only."""
        return self.draft_layers is not None or self.family.facts.attends(self.config)

    @property
    def hidden_layers(self) -> list[int]:
        """The states of the backbone that the heads read, as indices of `output_hidden_states`, and the last."""
        own = self.draft_layers is None
        return self.family.hidden_layers(self.config) if own else [-1 - self.config.draft_layers, -1]

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
        counts: Tensor | None,
        shift_labels: Tensor | None = None,
        balance: Tensor | None = None,
        first: float = 1.0,
        summaries: Tensor | None = None,
        **kwargs: object,
    ) -> MTPOutput:
        """Return the loss on states of the backbone, those that `learning_layers` names, [B, L, d] each; see `forward`.

        `counts` are targets per depth of an update, [n]; `summaries` is `cached_summaries`; `first` is the weight of
        depth 1, 0 where the backbone learns it itself.
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

    def add_draft_layers(self, count: int, rank: int = 8, alpha: float | None = None) -> MTPHeads:
        """Add draft layers below heads that were trained without (MtPC's stage 2); they start as the backbone's.

        Args:
            count: k, the number of the backbone's last layers.
            rank: Rank of their adapters.
            alpha: Scale times rank; None: twice the rank.

        Raises:
            ValueError: The heads have draft layers, or their own decoder layers.
        """
        if self.draft_layers is not None:
            raise ValueError(f"draft_layers={self.config.draft_layers} exist; make new heads for another number")
        if self.attends:
            raise ValueError(f"draft_layers={count}: {self.config.head_type} heads have their own decoder layers")
        own = next(self.head.parameters())
        self.draft_layers = new_layers(self.config, self.backbone, count, rank, alpha).to(own.device, own.dtype)
        return self

    def features_of_call(self) -> Callable[..., Tensor]:
        """Return `features` for one call of `generate`, in which no weight changes."""
        layers = self.draft_layers
        return self.features if layers is None else partial(self.features, layers=layers.bind(self.backbone))

    def features(
        self,
        hidden_states: Sequence[Tensor],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        layers: BoundLayers | None = None,
    ) -> Tensor:
        """Return the features of the distribution of every position, [B, T, F].

        Args:
            hidden_states: The backbone's output of that name, with those that `hidden_layers` names (or a mapping).
            attention_mask: [B, past + T], 0 for padding.
            position_ids: [B or 1, T]; None: the real tokens are counted.
            cache: The heads' own keys and values of earlier positions, where they attend; extended.
            layers: The draft layers, where they are bound already.
        """
        if position_ids is None and self.attends:
            position_ids = counted_positions(hidden_states[self.hidden_layers[0]], attention_mask)
        if self.draft_layers is not None:
            layers = self.draft_layers.bind(self.backbone) if layers is None else layers
            drafted = layers(hidden_states[self.hidden_layers[0]], attention_mask, position_ids, cache)
            states = [drafted] * len(self.family.hidden_layers(self.config))
            cache = None
        else:
            states = [hidden_states[index] for index in self.hidden_layers]
        return self.family.features(self.head, states, attention_mask, position_ids, self._parts(), cache)

    def distribution(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> WindowDistribution:
        """Return the distributions of the next `window` tokens after every position; runs the backbone.

        Args:
            input_ids: [B, T] int64.
            attention_mask: [B, T], 0 for padding, on either side.
            position_ids: [B or 1, T]; None: the real tokens are counted.

        Returns:
            A distribution whose tensors have leading axes [B, T].
        """
        outputs = self._run_backbone(input_ids, attention_mask, position_ids)
        features = self.features(outputs.hidden_states, attention_mask, position_ids)
        return self.distribution_of_features(features)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_head(module, self.config.initializer_range)


DRAFTERS["heads"] = MTPHeads
