"""EvaByte with multi-token heads: next-byte logits, the discounted loss, and the distribution of the next window."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from ...configuration.cache_names import CACHE, cache_of, given_cache
from ...configuration.evabyte import EvaByteConfig, config_and_options
from ...configuration.fields import check_options
from ...configuration.heads import MTPHeadConfig
from ...configuration.loss_options import HeadLossOptions
from ...generation.attach import MTPGenerationMixin
from ...generation.call.options import DraftOptions
from ...generation.drafter import DrafterFacts
from ...generation.tensors.masks import selected_positions
from ...generation.tensors.saving import reads_whole
from ...generation.tensors.tensor_files import HUB_OPTIONS
from ...generation.tensors.wrapped_models import Kwargs, untyped
from ..common.backbone_parts import BackboneParts
from ..common.learning import WindowHeadMixin, split_states
from ..common.loading import StrictLoadingMixin
from ..common.online import OnlineMixin
from ..common.outputs import MTPOutput, OwnLossMixin
from ..heads.attached import DraftLayersSession, HeadSession
from ..heads.circuit_head import FFHead
from ..heads.context import tables_of
from ..heads.family import build_head, init_head
from ..heads.losses import IGNORE, counted, counts_of_update, depth_targets, head_loss
from .backbone import EvaByteModel, EvaBytePreTrainedModel
from .cache import EvaByteCache
from .heads import (
    DraftLayersMixin,
    EvaDraftLayers,
    OwnAndDraftHeads,
    install_published,
    set_head_to_read,
    set_tables,
    split_state_dict,
    with_layer,
)

_APART = ("hidden_size", "vocab_size", "draft_vocab_size", "base_model_name_or_path")  # fields of attached heads only


class EvaByteForMTPC(
    OwnLossMixin,
    OnlineMixin,
    WindowHeadMixin,
    DraftLayersMixin,
    StrictLoadingMixin,
    MTPGenerationMixin,
    EvaBytePreTrainedModel,
):
    """EvaByte that predicts several bytes per call and emits exactly what byte-by-byte decoding emits.

    Official checkpoints load unchanged. `generate` speculates by default; `use_mtp=False` decodes byte by byte.

    Example:
        >>> model = EvaByteForMTPC.from_pretrained(path)
        >>> tokenizer = EvaByteTokenizer.from_pretrained(path)
        >>> out = model.generate(**tokenizer("def main(", return_tensors="pt"), max_new_tokens=64)
    """

    silent_part = "_silent_head"
    attends, learning_layers, draft_vocabulary = False, [-1], None
    remote_classes = {"AutoModel": "EvaByteModel", "AutoModelForCausalLM": "EvaByteForMTPC"}
    drafts_trees, reads_prompt = True, False
    not_served = "it needs a kind of cache that no engine has"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: EvaByteConfig) -> None:
        super().__init__(config)
        if config.mtp_head.family.rows_of_lm_head:
            config.num_pred_heads = max(config.num_pred_heads, config.mtp_head.window or 0)
        self.loss_type = "ForCausalLM"
        self.model = EvaByteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        drafts = config.num_pred_heads - 1
        self.draft_heads = FFHead(config.hidden_size, config.vocab_size, drafts) if drafts else None
        self.register_load_state_dict_pre_hook(split_state_dict)
        self.mtp_head = self._circuit()
        set_tables(self)
        self.draft_layers = EvaDraftLayers(config) if config.mtp_head.draft_layers else None
        self.post_init()
        self._freeze()

    @classmethod
    @reads_whole
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike | None, *args: Any, **kwargs: Any) -> Any:
        """Load a directory or a Hub repository.

        `mtp_head={...}` selects another head than the stored one: a smaller window of FF heads uses the first, a
        larger one appends new ones, and a circuit starts from stored FF heads (`set_head`).

        Raises:
            TypeError: An option of `mtp_head` that is no field of `MTPHeadConfig`.
            ValueError: A directory of another architecture, missing tensors, wrong shapes, a damaged file, or a stored
                circuit of another shape.
        """
        if isinstance(kwargs.get("mtp_head"), dict):
            check_options(kwargs["mtp_head"], MTPHeadConfig, "mtp_head", _APART)
        name = pretrained_model_name_or_path
        hub = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
        dtypes = {key: kwargs.pop(key) for key in ("dtype", "torch_dtype") if key in kwargs}  # a config would keep them
        cls.check_model_type(name, kwargs.get("config"), **hub)
        config, kwargs = config_and_options(name, **kwargs)
        wanted = config.mtp_head
        adds_layers = set_head_to_read(config, name, **hub)
        loaded = super().from_pretrained(name, *args, config=config, **(hub | dtypes | kwargs))
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if adds_layers:
            model.add_draft_layers(wanted.draft_layers, wanted.draft_lora_rank, wanted.draft_lora_alpha)
        elif config.mtp_head is not wanted:
            model.set_head(**wanted.options())
        model._freeze()  # loading replaces every parameter
        return loaded

    @classmethod
    @reads_whole
    def from_official(cls, folder: str | PathLike, backbone: str | PathLike | EvaByteForMTPC, **options: Any) -> Any:
        """Load MtPC's published heads, which hold no backbone, onto the EvaByte that they were trained on.

        Args:
            folder: A directory with `model@N.pt` (the last one is read) and `config.yaml`.
            backbone: The model, which gets these heads in place of its own, or its directory or name on the Hub.
            **options: Of `from_pretrained`, for a backbone that is loaded here.

        Raises:
            ValueError: Tensors or settings that are not known, by name, or another backbone.
        """
        model = backbone if isinstance(backbone, EvaByteForMTPC) else cls.from_pretrained(backbone, **options)
        install_published(model, Path(folder))
        model.train(model.training)
        model._freeze()
        return model

    @property
    def window(self) -> int:
        """n: tokens that the head's distribution covers; a draft has n - 1."""
        return self.config.mtp_head.window or 0

    @property
    def head(self) -> nn.Module:
        """The module that drafts: `mtp_head`, or `draft_heads` for FF heads (the own head, if there is no other)."""
        return self.mtp_head or self.draft_heads or self.lm_head

    @classmethod
    def facts(cls, config: EvaByteConfig, drafter: object = None) -> DrafterFacts:
        return super().facts(config.mtp_head)

    def parts(self) -> dict[str, nn.Module]:
        return {"head": self.head} | ({} if self.draft_layers is None else {"draft_layers": self.draft_layers})

    @property
    def _silent_head(self) -> nn.Module:
        """The head; nothing, where the own head is the only one."""
        return self.mtp_head or self.draft_heads or nn.Module()

    @property
    def drafting_part(self) -> nn.Module:
        """See `OnlineMixin`; heads on draft layers, and the model's own, cannot learn apart from the backbone."""
        if self.draft_layers is not None or self.head is self.lm_head:
            what = "draft_layers" if self.draft_layers is not None else "no head but its own (num_pred_heads=1)"
            raise ValueError(f"drafter: an {type(self).__name__} with {what} does not learn online")
        return self.head

    @property
    def head_config(self) -> MTPHeadConfig:
        """Options of the head."""
        return self.config.mtp_head

    @property
    def whole_head(self) -> nn.Module:
        """The module that gives the distribution of the whole window: the circuit, or all FF heads."""
        return self.mtp_head or self._all_heads

    def _parts(self) -> BackboneParts:
        return BackboneParts(self)

    @property
    def _all_heads(self) -> OwnAndDraftHeads:
        return OwnAndDraftHeads(self.lm_head, self.draft_heads, self.config.vocab_size)

    def set_head(self, **options: Any) -> None:
        """Replace the head; the new one is initialised from the FF heads.

        FF heads are appended (drawn like fresh weights) where the window needs more; a circuit starts with every
        state of position i equal to FF head i, so that its distribution is that of the FF heads, and with random sum
        weights. Tables of tokens before (`context`) are taken over where both heads have the same.

        Args:
            **options: Fields of `MTPHeadConfig`; the window and draft layers are unchanged by default.

        Raises:
            TypeError: An option that is no field of `MTPHeadConfig`.
            StrictDataclassError: Options out of range.
            ValueError: Unembeddings larger than this machine's memory.
        """
        check_options(options, MTPHeadConfig, "set_head", _APART)
        old = self.config.mtp_head
        unchanged = {"window": old.window, "loss_options": old.loss_options.changed()} | old.draft_options()
        self.config.mtp_head = MTPHeadConfig(**(unchanged | options))
        try:
            self.config.validate()
            head, layers = self._circuit(), self._layers(old)
        except Exception:
            self.config.mtp_head = old
            raise
        self.draft_layers, tables = layers, tables_of(self.head)
        self.mtp_head = None if head is None else head.to(self.lm_head.weight)
        if head is None:
            self._append_heads(self.window - self.config.num_pred_heads)
        else:
            for module in head.modules():
                init_head(module, self.config.initializer_range)
            if self.config.mtp_head.unembedding == "own":
                rows = torch.cat([each.weight for each in (self.lm_head, self.draft_heads) if each is not None])
                head.copy_leaves(rows.unflatten(0, (-1, self.config.vocab_size)))
        set_tables(self, tables)
        self.head.requires_grad_(True)
        self._freeze()

    def _append_heads(self, count: int) -> None:
        if count <= 0:
            return
        config = self.config
        more = FFHead(config.hidden_size, config.vocab_size, count).to(self.lm_head.weight)
        more.reset_head(config.initializer_range)
        if self.draft_heads is None:
            self.draft_heads = more
        else:
            self.draft_heads.append(more)
        config.num_pred_heads += count

    def _circuit(self) -> nn.Module | None:
        config = self.config.mtp_head
        if config.family.rows_of_lm_head:
            return None
        return build_head(config, self.config.hidden_size, self.config.vocab_size)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize embeddings and all heads; every head keeps its own rows, new ones are means, or drawn.

        Raises:
            ValueError: A head that cannot follow; nothing is changed.
        """
        if self.mtp_head is not None and not callable(getattr(self.mtp_head, "resize", None)):
            raise ValueError(f"heads of head_type={self.config.mtp_head.head_type!r} cannot be resized")
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for head in (self.draft_heads, self.mtp_head):
            if head is not None:
                head.resize(self.config.vocab_size, None if mean_resizing else self.config.initializer_range)
        return embeddings

    def train_only(self, part: str) -> None:
        """Choose what is trained: `"all"`, or `"drafter"` (also `"heads"`) with backbone and next-byte head frozen.

        Draft heads next to a circuit draft nothing and are always frozen.

        Raises:
            ValueError: An unknown part, or all of a model with draft layers, which need a frozen backbone.
        """
        if part not in ("all", "drafter", "heads"):
            raise ValueError(f"train_only({part!r}): choose 'all' or 'drafter'")
        if part == "all" and self.draft_layers is not None:
            raise ValueError("train_only('all'): draft layers need a frozen backbone; choose 'drafter'")
        self.head.requires_grad_(True)
        self.model.requires_grad_(part == "all")
        self.lm_head.requires_grad_(part == "all")
        self._freeze()

    def _freeze(self) -> None:
        """Freeze what never learns: draft heads that draft nothing, and the backbone below draft layers."""
        if self.draft_heads is not None and (self.mtp_head is not None or self.window == 1):
            self.draft_heads.requires_grad_(False)
        if self.draft_layers is not None:
            self.model.requires_grad_(False)
            self.lm_head.requires_grad_(False)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: EvaByteCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_all_pred_logits: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        past_key_values: EvaByteCache | None = None,
        **kwargs: Any,
    ) -> MTPOutput:
        """Return next-byte logits and, with labels, the discounted loss over all depths of the window.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, past columns + L], 0 for padding.
            position_ids: [B or 1, L]; only to mark packed documents (see `EvaByteModel`).
            cache: Cache to continue and to extend.
            inputs_embeds: [B, L, D] instead of `input_ids`.
            labels: [B, L] int64 as everywhere in transformers (shifted here, -100 ignored), or [B, L, n] with the
                target of every depth spelled out (the official form).
            use_cache: Return a cache.
            logits_to_keep: Compute logits of the last so many positions only (0: all), or of these positions.
            return_all_pred_logits: Logits of all N heads, [B, L, N, V].
            num_items_in_batch: Targets per depth over all micro-batches, [n] or one number (from the Trainer).
            past_key_values: The older name of `cache`.
            **kwargs: For the backbone; `shift_labels` [B, L], the target of every position, in place of `labels`;
                `balance` [n], factors of the depths (`balance="rms"`); `cached_states` [B, L, 1, D], the last
                hidden states from an earlier run: the backbone is then not run, and only the loss is returned.

        Returns:
            `logits` [B, L, V] in float32 where the config has `fp32_logits`, and the rest of `MTPOutput`.
        """
        shift_labels, balance = kwargs.pop("shift_labels", None), kwargs.pop("balance", None)
        learns = labels is not None or shift_labels is not None
        counts = counts_of_update(untyped(self), num_items_in_batch, labels, attention_mask, position_ids, shift_labels)
        if learns and (cached := kwargs.pop("cached_states", None)) is not None:
            hidden = split_states(cached, self.learning_layers)[-1]
            targets = depth_targets(labels, self.window, attention_mask, position_ids, shift_labels)
            return MTPOutput(**self._loss(hidden, hidden, targets, input_ids, counts, balance))
        if learns and self.draft_layers is not None:
            kwargs["output_hidden_states"] = with_layer(self.hidden_layers[0], kwargs.get("output_hidden_states"))
        outputs = self.model(
            input_ids,
            attention_mask,
            position_ids,
            given_cache(cache, past_key_values),
            inputs_embeds,
            use_cache,
            **kwargs | {"return_dict": True},
        )
        hidden = outputs.last_hidden_state
        selected = selected_positions(hidden, logits_to_keep)
        shows_all = return_all_pred_logits and self.config.num_pred_heads > 1
        logits = (self._all_heads if shows_all else self.lm_head)(selected)  # [B, K, V], or [B, K, N, V]
        losses = {}
        if learns:
            targets = depth_targets(labels, self.window, attention_mask, position_ids, shift_labels)
            states = outputs.hidden_states if self.draft_layers is not None else (hidden,)
            features = self.features(states, attention_mask, position_ids)
            losses = self._loss(features, hidden, targets, input_ids, counts, balance)
        return MTPOutput(
            logits=logits.float() if self.config.fp32_logits else logits,
            hidden_states=outputs.hidden_states,
            **{CACHE: cache_of(outputs)},
            **losses,
        )

    def _loss(
        self,
        features: Tensor,
        hidden: Tensor,
        targets: Tensor,
        input_ids: Tensor | None,
        counts: Tensor | None,
        balance: Tensor | None,
    ) -> Kwargs:
        """Return the loss of the head and its means; a drafter without depth 1 adds the next byte's to it."""
        tokens = input_ids if input_ids is None or input_ids.shape == targets.shape[:2] else None
        head, parts, config = self.whole_head, self._parts(), self.head_config
        counts = counted(targets != IGNORE, self.loss_normalization) if counts is None else counts
        scale = self.loss_scale().to(hidden.device)
        output = head_loss(head, config, features, targets, tokens, counts, parts, hidden, scale, balance)
        has_own = self.mtp_head is None and config.loss_options.divergence != "block"  # which leaves depth 1 out
        if has_own or not any(parameter.requires_grad for parameter in self.lm_head.parameters()):
            return dict(output)
        next_byte = MTPHeadConfig(window=1, loss_options=HeadLossOptions(normalization=self.loss_normalization))
        own = head_loss(self._all_heads, next_byte, hidden, targets[..., :1], tokens, counts[:1])
        return dict(output) | dict(loss=output["loss"] + own["loss"], backbone_loss=own["head_losses"][0])

    def loss_scale(self, first: float = 1.0) -> Tensor:
        """See `WindowHeadMixin`; depth 1 of FF heads is the next-byte head, which has the weight 1."""
        scale = super().loss_scale(first)
        if self.mtp_head is None:
            scale[0] = float(self.loss_options.divergence != "block")
        return scale

    def start(self, options: DraftOptions) -> HeadSession:
        """Return the draft session of one call of `generate`."""
        if self.draft_layers is None:
            return HeadSession(self.distribution_after, options)
        run, layer = self.draft_layers.bind(self.model), self.hidden_layers[0]
        return DraftLayersSession(self.distribution_after, options, layer, run, EvaByteCache(self.config))

    def own_cache(self) -> Callable[[], EvaByteCache]:
        """Return the function that makes the cache with which `generate` starts."""
        return partial(EvaByteCache, self.config)
