"""Heads apart from their backbone: a small directory that makes any plain causal LM speculate; and their drafts.

The heads have the backbone only while attached to it, and save their own tensors alone. One hidden state describes the
next n tokens. Heads that attend (a decoder layer per head, or one before them, Hydra++) and draft layers have caches of
verified tokens only: drafts never enter them. A verified block is read as far as the most new tokens of any sequence;
columns after a sequence's own are seen by nobody and overwritten by the next block, or leave the cache at once.
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
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ...configuration.head_families import HEAD_FAMILIES
from ...configuration.heads import MTPHeadConfig
from ...configuration.loss_options import HeadLossOptions
from ...generation.attach import adopt_fields
from ...generation.backbone.cache import block_mask, drafter_layout, of_accepted
from ...generation.backbone.wrapped_models import check_whole, input_embeddings, untyped, unwrap
from ...generation.call.constraints import DraftMasks
from ...generation.call.options import DraftOptions, chosen, warped
from ...generation.call.sequences import Sequences
from ...generation.contract import (
    CacheView,
    DraftSession,
    DraftTree,
    HiddenLayers,
    PrefillOutput,
    SpeculativeCache,
    TargetOutput,
    VerificationResult,
    each_state,
    taken,
)
from ...generation.drafter import DRAFTERS
from ...generation.tensors.masks import cached_arange, to_device
from ...generation.tensors.saving import reads_whole, whole_directory
from ...generation.tensors.tensor_files import Fields, hub_options
from ...generation.trees.growth import grow
from ..common.backbone_parts import BackboneParts, compute_device
from ..common.draft_vocabulary import DraftVocabulary, TokenIds
from ..common.learning import DraftModel, States, WindowHeadMixin, counted_positions
from ..common.loading import local_files
from ..common.outputs import MTPOutput
from .context import tables_of
from .family import FAMILIES, HeadFamily, build_head, config_of_backbone, distribution_after, init_head, last_state
from .layer import DraftLayers, LayerAdapters
from .losses import depth_targets, head_loss
from .official import (
    backbone_from_official,
    engine_layout,
    export_head,
    heads_from_official,
    holds_backbone,
    published_layout,
)
from .window_distribution import FactorisedDistribution, PartialDistribution, WindowDistribution


class HeadSession(DraftSession):
    """Drafts from the window distribution of a head, conditioned on the token that the last verification added.

    The distribution comes from the hidden state just before that token. Greedy drafts are argmaxes of the exact
    conditionals. Where the target is warped by processors of scores alone, each conditional is warped in the same way
    before a token is drawn from it. The verifier gets the distributions that the tokens were really drawn from.

    `distribution` makes that of the next so many tokens from features [..., F] of one position and the token after it;
    `read` makes features [B, T, F] from the backbone's states at `hidden_layers` (None: the last).
    """

    supports_confidence_threshold, takes_fixed = True, True

    def __init__(
        self,
        distribution: Callable[[Tensor, Tensor, int], WindowDistribution],
        options: DraftOptions,
        hidden_layers: HiddenLayers = -1,
        read: Callable[..., Tensor] | None = None,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self.distribution, self.options, self.hidden_layers = distribution, options, hidden_layers
        self.vocabulary = vocabulary
        self.read: Callable[..., Tensor] = read or (lambda hidden_states: hidden_states[-1])
        self.num_tokens = options.num_tokens
        self.column = 0 if vocabulary is None else int(vocabulary.ids[0])  # which distributions have, if they have any

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.view = view
        self.hidden = view.held("heads.hidden", self.read(outputs.hidden_states)[:, -1])  # [B, F]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        last, masks = to_device(tokens.last(), self.hidden.device), self.options.masks(tokens)
        if self.options.draft_tree is None:
            return DraftTree.chain(*self._chain(self.distribution(self.hidden, last, length), length, masks))
        last = last[:, None]  # [B, 1]
        growth = WindowGrowth(self.distribution(self.hidden[:, None], last, length), last)
        return grow(growth, self.options, length, masks)

    def _chain(
        self, distribution: WindowDistribution, length: int, masks: DraftMasks | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return up to `length` tokens, up to one of which no sequence is sure, and their distributions where drawn."""
        options = self.options
        if masks is None and not options.do_sample and not options.threshold:
            return distribution.greedy(length, options.numbers.note), None
        if masks is None and options.do_sample and not options.processing.pointwise:  # a plain ancestral sample
            draft, probs = distribution.sample_with_probs(length)
            self._note(probs)
        else:
            draft, probs = distribution.draft(partial(self._choose, masks), length)
        if options.threshold:
            length = options.sure_length(draft, probs)
        return draft[:, :length], probs[:, :length] if options.do_sample else None

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        self._take(self.read(outputs.hidden_states or ()), result.num_accepted)

    def _take(self, states: Tensor, columns: Tensor) -> None:
        """Take the state of [B, T, F] before each sequence's last token, in its column; any where it has ended."""
        before = cached_arange(len(states), states.device), to_device(columns, states.device)
        self.hidden = self.view.held("heads.hidden", states[before])  # [B, F]

    def _note(self, probs: Tensor) -> None:
        self.options.numbers.note(probs[..., self.column])

    def _choose(self, masks: DraftMasks | None, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and their distributions; masks know one position after the other, also where all come."""
        if masks is not None and probs.dim() == 3:
            steps = [self._choose(masks, step) for step in probs.unbind(1)]
            return torch.stack([token for token, _ in steps], 1), torch.stack([q for _, q in steps], 1)
        self._note(probs)
        if self.options.do_sample or masks is not None:
            probs = warped(probs, self.options, self.vocabulary is not None, masks)
        return chosen(probs, self.options, masks), probs  # [B], [B, V]

    def coverage(self, tokens: Tensor) -> float | None:
        return None if self.vocabulary is None else self.vocabulary.coverage(tokens)


class WindowGrowth:
    """Grows a tree by the exact conditionals of a window distribution.

    `distribution` has the axes [B, 1], and `last`, the token before its window, is [B, 1] int64.
    """

    draft_ids: Tensor | None = None
    vocab_size: int = 0
    rows: Tensor | None = None  # [B, m, v] logits of independent tokens

    def __init__(self, distribution: WindowDistribution, last: Tensor) -> None:
        self.paths, self.next = last[..., None][..., :0], distribution.next_log_probs  # [B, 1, 0]
        if isinstance(distribution, PartialDistribution):
            part, self.next, distribution = distribution.vocabulary, distribution.next_columns, distribution.inner
            self.draft_ids, self.vocab_size = part.on(last.device), part.vocab_size
        if isinstance(distribution, FactorisedDistribution):
            self.rows = distribution.leaf_logits[:, 0, :, 0]

    def first(self) -> Tensor:
        return self.next(self.paths)[:, 0]  # [B, v]

    def after(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self.paths = torch.cat([taken(self.paths, parents.clamp(min=0)), tokens[..., None]], dim=-1)  # [B, k, j + 1]
        return self.next(self.paths)


class AttendingHeadSession(HeadSession):
    """The drafts of one call of attached heads, whose features `read` makes with a cache."""

    def __init__(self, heads: WindowHeadMixin, options: DraftOptions, read: Callable[..., Tensor]) -> None:
        super().__init__(heads.distribution_after, options, heads.hidden_layers, read, heads.draft_vocabulary)
        self.cache = DynamicCache()

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Run over the prompt; columns of an earlier call in the backbone's cache are ignored."""
        if not view.has_columns:
            raise ValueError("heads that attend need a backbone on transformers' own caches; use heads that do not")
        size = outputs.hidden_states[-1].shape[1]
        self.view, span = view, self.num_tokens + 1
        self.layout = drafter_layout(view, size, self.options.max_length, span, "heads")
        self.layout.install_layers(self.cache)
        self.layout.block_offset = -size
        self.hidden = view.held("heads.hidden", self._run(outputs.hidden_states, size)[:, -1])  # [B, F]
        self.layout.block_offset = 0

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        new = self.view.new_tokens
        if self.view.is_fixed:
            size = outputs.logits.shape[1]
            states = each_state(outputs.hidden_states, lambda state: of_accepted(state, new.on_device)) or ()
            last = (new.on_device - 1).clamp(min=0)  # [B]
        elif (size := new.longest) == 0:
            return
        else:
            states, last = outputs.first(size), result.num_accepted.clamp(max=size - 1)  # an ended one's is any
        self._take(self._run(states, size), last)
        self.layout.keep(new)

    def _run(self, states: tuple[Tensor | None, ...], size: int) -> Tensor:
        """Return features [B, T, F] of new columns."""
        layout, config = self.layout, self.options.backbone.config.get_text_config()
        return self.read(states, block_mask(layout, size, config), layout.positions(size), self.cache)


class DraftLayersSession(HeadSession):
    """The drafts of one call of heads on draft layers whose cache knows how long every sequence is (EvaByte).

    `run` makes features [B, T, F] of the backbone's states [B, T, D] at `layer`, and extends `cache`.
    """

    takes_fixed = False

    def __init__(
        self,
        distribution: Callable[[Tensor, Tensor, int], WindowDistribution],
        options: DraftOptions,
        layer: int,
        run: Callable[..., Tensor],
        cache: SpeculativeCache,
    ) -> None:
        super().__init__(distribution, options, [layer])
        self.layer, self.run, self.cache = layer, run, cache

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        states, self.view = outputs.hidden_states[self.layer], view
        mask = None if view.mask is None else view.mask[:, -states.shape[1] :]  # [B, L]
        self.hidden = self.run(states, attention_mask=mask, cache=self.cache)[:, -1]  # [B, F]

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        new = self.view.new_tokens
        if new.longest == 0:
            return
        features = self.run(outputs.state(self.layer)[:, : new.longest], cache=self.cache)  # [B, T, F]
        self.cache.keep_last(new.longest, new)
        self._take(features, result.num_accepted.clamp(max=new.longest - 1))


class MTPHeads(WindowHeadMixin, DraftModel):
    """Multi-token heads for a backbone that is unchanged.

    Attached heads pass as `assistant_model`: `backbone.generate(..., assistant_model=heads)` speculates losslessly, any
    batch size, greedy and sampled, with the options of `MTPGenerationMixin`. `Trainer(model=heads)` trains them on the
    frozen backbone. The config has `window`, `hidden_size` and `vocab_size`.

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
        """
        backbone = unwrap(backbone)
        if draft_ids is not None:
            draft_ids = DraftVocabulary(draft_ids, backbone.config.get_text_config().vocab_size, "draft_ids").ids
            options["draft_vocab_size"] = len(draft_ids)
        config = config_of_backbone(backbone, window=window, unembedding=unembedding, **options)
        heads = cls(config)
        if draft_ids is not None:
            heads.set_draft_ids(draft_ids)
        if (start := getattr(heads.head, "start_from", None)) is not None:
            start(BackboneParts(backbone, heads.draft_vocabulary))
        return heads.attach(backbone)

    def parts(self) -> dict[str, nn.Module]:
        return super().parts() | ({} if self.draft_layers is None else {"draft_layers": self.draft_layers})

    def _parts(self) -> BackboneParts | None:
        """Return what the heads borrow of the backbone for one call."""
        return BackboneParts(self.backbone, self.draft_vocabulary) if self.is_attached else None

    def _set_gradient_checkpointing(self, enable: bool = True, *args: object, **kwargs: object) -> None:
        """Never re-entrant, even on request: states of a frozen backbone need no gradient, and nothing would learn."""
        if any(isinstance(module, GradientCheckpointingLayer | LayerAdapters) for module in self.modules()):
            super()._set_gradient_checkpointing(enable, partial(checkpoint, use_reentrant=False))

    def get_input_embeddings(self) -> None:
        """Return None (FSDP2 would shard them apart)."""

    def without_code(self) -> str | None:
        unknown = f"head_type={self.config.head_type!r} is not of tokenahead, and its code is not known here"
        return None if self.family.is_built_in else unknown

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
        """
        heads, heads._expected_embedding = heads_from_official(cls, Path(folder), options, backbone, ignore_fields)
        return heads if backbone is None else heads.attach(backbone)

    @classmethod
    def recognises(cls, name: str | PathLike, fields: Fields, hub: Fields) -> bool:
        return published_layout(Path(name) if fields else local_files(name, hub, False), fields) is not None

    @classmethod
    def stored_with_backbone(cls, name: str | PathLike, fields: Fields) -> bool:
        return holds_backbone(Path(name), fields)

    @classmethod
    def read_other(cls, name: str | PathLike, dtype: Any, backbone: PreTrainedModel | None, options: Fields) -> Any:
        hub = hub_options(options)
        own = {key: value for key, value in options.items() if key not in hub}
        heads: Any = cls.from_official(local_files(name, hub), backbone, **own).detach()
        return heads if dtype == "auto" else heads.to(dtype)

    @classmethod
    @reads_whole
    def backbone_from_official(cls, folder: str | PathLike) -> PreTrainedModel:
        """Return the backbone in a directory that holds it with its heads (merged Medusa-2, Gloeckle et al.)."""
        return backbone_from_official(Path(folder))

    def export(self, folder: str | PathLike, layout: str) -> None:
        """Write the heads as their authors' tools, or an engine, will read them.

        Args:
            folder: The directory, which is created.
            layout: `"medusa"` (safetensors), `"vllm"` (Medusa, and independent heads as Medusa without blocks),
                `"hydra"`, or `"gloeckle"` (with the backbone, to which heads are attached for these two).
        """
        with whole_directory(folder) as directory:
            export_head(self.config, self.head.state_dict(), lambda: self.backbone, directory, layout)

    def export_to(self, engine: str, folder: Path) -> Fields:
        if engine_layout(self.config, engine) is None:
            self.save_pretrained(folder)
            return {"method": "custom_class", "num_speculative_tokens": self.config.num_drafts}
        self.export(folder, engine)
        return {"method": "medusa", "num_speculative_tokens": self.config.num_drafts}

    def made_for(self) -> Mapping[str, object]:
        sizes = {"hidden_size": self.config.hidden_size, "vocab_size": self.config.vocab_size}
        return {name: size for name, size in sizes.items() if size is not None}

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        super().check_backbone(backbone)
        own, expected = input_embeddings(backbone).weight, self._expected_embedding
        if expected is not None and not own.is_meta and not torch.allclose(expected.to(own), own, atol=1e-3):
            raise ValueError(f"{type(backbone).__name__} has other embeddings than these heads were trained on")
        if self.draft_layers is not None:
            check_whole(backbone, f"draft_layers={self.config.draft_layers}")

    def on_attach(self, backbone: PreTrainedModel) -> None:
        dtype = backbone.dtype if backbone.dtype.is_floating_point else None
        untyped(self).to(device=compute_device(backbone), dtype=dtype)
        adopt_fields(self.config, backbone)
        self.config.vocab_size = backbone.config.get_text_config().vocab_size
        if self.draft_vocabulary is None:
            self.draft_size = self.head.vocab_size = self.config.vocab_size  # type: ignore[assignment]
        self.family.fit(self.head, self.config, backbone)
        self._expected_embedding = None

    def start(self, options: DraftOptions) -> HeadSession:
        family, part = self.family, None if self.config.draft_vocab_size is None else self.draft_vocabulary
        parts = BackboneParts(self.backbone, part)
        after = partial(distribution_after, self.head, self.config, backbone=parts, vocabulary=part)
        if (tables := tables_of(self.head)) is not None:
            tables.table()  # recorded drafts read it where it lies
        reads_last = family.features is last_state and family.hidden_layers is HeadFamily.hidden_layers
        if self.draft_layers is None and reads_last:  # features are the states, and there is no cache
            return HeadSession(after, options, [-1], vocabulary=part)
        if self.attends:
            layers = self.draft_layers
            read = self.features if layers is None else partial(self.features, layers=layers.bind(self.backbone))
            return AttendingHeadSession(self, options, read)
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
        return self.config

    @property
    def whole_head(self) -> nn.Module:
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
        """Return the loss on the states that `learning_layers` names, [B, L, d] each; see `forward` and `head_loss`.

        `first` is the weight of depth 1, 0 where the backbone learns it itself.
        """
        if labels is None and shift_labels is None:
            return MTPOutput(logits=logits)
        targets = depth_targets(labels, self.config.num_depths, attention_mask, position_ids, shift_labels)
        features, scale = self.features(states, attention_mask, position_ids), self.loss_scale(first)
        last = states[-1] if self.config.loss_target == "teacher" else None
        inputs = features, targets, input_ids, counts, self._parts(), last, scale, balance
        output = head_loss(self.head, self.config, *inputs, self.draft_vocabulary, summaries)
        output.logits = logits
        return output

    def add_draft_layers(self, count: int, rank: int = 8, alpha: float | None = None) -> MTPHeads:
        """Add draft layers below heads that were trained without (MtPC's stage 2); they start as the backbone's.

        Args:
            count: k, the number of the backbone's last layers.
            rank: Rank of their adapters.
            alpha: Scale times rank; None: twice the rank.
        """
        if self.draft_layers is not None:
            raise ValueError(f"draft_layers={self.config.draft_layers} exist; make new heads for another number")
        changes = {"draft_layers": count, "draft_lora_rank": rank, "draft_lora_alpha": alpha}
        changes |= {"backbone_config": self.backbone.config.get_text_config().to_dict()}
        layers = DraftLayers(MTPHeadConfig.from_dict(self.config.to_dict() | changes))
        for module in layers.modules():
            init_head(module, self.config.initializer_range)
        for name, value in changes.items():
            setattr(self.config, name, value)
        own = next(self.head.parameters())
        self.draft_layers = layers.to(own.device, own.dtype)
        return self

    def features(
        self,
        hidden_states: Sequence[Tensor],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        layers: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Return the features of the distribution of every position, [B, T, F], from the states `hidden_layers` names.

        `attention_mask` is [B, past + T]; without `position_ids` [B or 1, T] the real tokens are counted. Heads that
        attend extend `cache`. `layers` are the draft layers, where they are bound already.
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
        """Return the distributions, with leading axes [B, T], of the next `window` tokens after every position.

        It runs the backbone on `input_ids` [B, T]; `attention_mask` [B, T] is 0 for padding on either side.
        """
        outputs = self._run_backbone(input_ids, attention_mask, position_ids)
        features = self.features(outputs.hidden_states, attention_mask, position_ids)
        return self.distribution_of_features(features)


DRAFTERS["heads"] = MTPHeads
