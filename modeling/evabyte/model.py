"""EvaByte with multi-token heads: next-byte logits, the discounted loss, and the distribution of the next window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.utils.generic import can_return_tuple

from ...configuration.cache_names import CACHE, cache_of, given_cache
from ...configuration.evabyte import EvaByteConfig, config_and_options
from ...configuration.fields import check_options
from ...configuration.heads import MTPHeadConfig
from ...configuration.loss_options import HeadLossOptions
from ...generation.attach import MTPGenerationMixin
from ...generation.backbone.wrapped_models import Kwargs, call, untyped
from ...generation.call.options import DraftOptions
from ...generation.drafter import DrafterFacts
from ...generation.tensors.masks import selected_positions, to_device
from ...generation.tensors.saving import reads_whole
from ...generation.tensors.tensor_files import below, hub_options
from ..common.backbone_parts import BackboneParts
from ..common.learning import WindowHeadMixin, split_states
from ..common.loading import StrictLoadingMixin
from ..common.outputs import MTPOutput
from ..heads.attached import DraftLayersSession, HeadSession
from ..heads.circuit_head import FFHead
from ..heads.context import LeafContext, context_of, tables_of
from ..heads.family import build_head, init_head
from ..heads.layer import LayerAdapters
from ..heads.losses import IGNORE, counted, counts_of_update, depth_targets, head_loss
from ..heads.official import LAYERS, MTPC, load_tensors
from ..heads.window_distribution import WindowDistribution
from .backbone import EvaByteDecoderLayer, EvaByteModel
from .cache import EvaByteCache
from .fixed import FixedEvaByteCache

_APART = ("hidden_size", "vocab_size", "draft_vocab_size", "base_model_name_or_path")  # fields of attached heads only


class EvaDraftLayers(LayerAdapters):
    """Adapters for every linear map of EvaByte's last k layers."""

    def __init__(self, config: EvaByteConfig, head: MTPHeadConfig) -> None:
        if (count := head.draft_layers) > config.num_hidden_layers:
            raise ValueError(f"draft_layers={count}: the backbone has {config.num_hidden_layers} layers")
        with torch.device("meta"):
            shells = [EvaByteDecoderLayer(config, slot) for slot in range(count)]
        super().__init__(shells, head)

    def bind(self, body: EvaByteModel) -> Callable[..., Tensor]:
        """Return `EvaByteModel.continue_from` with the current weights, for a step or a call of `generate`."""
        weights = self.weights(list(body.layers)[-len(self.adapters) :])
        return partial(body.continue_from, layers=[partial(self.run, slot, own) for slot, own in enumerate(weights)])


def install_published(model: EvaByteForMTPC, folder: Path) -> None:
    """Give a model the heads in a directory of MtPC's authors; if independent, without the first, its own `lm_head`."""
    if not MTPC.recognises(folder, {}):
        raise ValueError(f"{folder}: no model@N.pt of MtPC's authors")
    fields, tensors = MTPC.read(folder)
    made_for = {name: fields.pop(name) for name in ("hidden_size", "vocab_size")} | fields.pop("backbone_config", {})
    for name, value in made_for.items():
        if (own := getattr(model.config, name)) != value:
            raise ValueError(f"{folder}: {name} of its backbone is {value}, and this backbone has {own}")
    del fields["base_model_name_or_path"]
    config, wanted = model.config, possible_head(model.config, MTPHeadConfig(**fields))
    adapters, what = below(tensors, LAYERS), f"{folder}: its tensors do not make {fields['head_type']!r} heads"
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYERS)}
    layers = EvaDraftLayers(config, wanted) if adapters else None
    if layers is not None:
        load_tensors(layers, adapters, what)
    is_independent = wanted.family.rows_of_lm_head
    if is_independent:
        tensors = {"weight": tensors["weight"][config.vocab_size :].clone()}  # [(n - 1) V, D]
    with torch.device("meta"):
        drafts = FFHead(config.hidden_size, config.vocab_size, wanted.num_drafts)
        head = drafts if is_independent else build_head(wanted, config.hidden_size, config.vocab_size)
    load_tensors(head, tensors, what, assign=True)
    like = model.lm_head.weight
    head.to(like)  # in place, as for every module
    model.mtp_head = None if is_independent else head
    model.draft_layers = None if layers is None else layers.to(like)
    if is_independent:
        model.draft_heads, config.num_pred_heads = drafts, wanted.num_depths
    config.mtp_head = wanted


def possible_head(config: EvaByteConfig, head: MTPHeadConfig) -> MTPHeadConfig:
    """Return a head, if a model of this config can have it."""
    changed = deepcopy(config)
    changed.mtp_head = head
    changed.validate()
    return head


def set_head_to_read(config: EvaByteConfig, name: str | PathLike | None, **hub: Any) -> bool:
    """Set a config's head to the one that a directory holds; return whether only draft layers tell the two apart."""
    wanted = config.mtp_head
    stored = wanted if name is None else EvaByteConfig.from_pretrained(name, **hub).mtp_head
    in_rows = wanted.family.rows_of_lm_head
    is_stored = wanted.same_parameters(stored)
    if not is_stored and not stored.family.rows_of_lm_head:
        raise ValueError(f"{name} holds mtp_head={stored.options()}, not {wanted.options()}; load that one")
    adds_layers = is_stored and not in_rows and wanted.draft_options() != stored.draft_options()
    config.mtp_head = stored if in_rows or not is_stored or adds_layers else wanted
    if config.mtp_head.family.rows_of_lm_head:
        config.mtp_head.window = min(config.mtp_head.window or 0, config.num_pred_heads)
    return adds_layers


OWN, DRAFTS = "lm_head.weight", "draft_heads.weight"


class OwnAndDraftHeads(nn.Module):
    """The own head, which predicts the next token, and the draft heads after it, called like one `FFHead`."""

    def __init__(self, own: nn.Module, drafts: FFHead | None, vocab_size: int) -> None:
        super().__init__()
        self.own, self.drafts, self.vocab_size = own, drafts, vocab_size

    @property
    def context(self) -> LeafContext | None:
        return None if self.drafts is None else self.drafts.context

    def forward(
        self, hidden_states: Tensor, backbone: BackboneParts | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        run = call if torch.is_grad_enabled() else nn.Module.__call__
        last = None if stop is None else stop - 1
        if start and self.drafts is not None:
            return run(self.drafts, hidden_states, None, start - 1, last)
        own = run(self.own, hidden_states)[..., None, :]  # [..., 1, V]
        if self.drafts is None or stop == 1:
            return own
        drafts = run(self.drafts, hidden_states, None, 0, last)
        return torch.cat([own, to_device(drafts, own.device)], dim=-2)


def _split(weight: Tensor, config: EvaByteConfig) -> dict[str, Tensor]:
    """Return the weights of the own head and of any draft heads from those of all heads [N V, D], by name."""
    size = config.vocab_size
    if config.num_pred_heads == 1 or len(weight) == size:
        return {OWN: weight}
    return {OWN: weight[:size].clone(), DRAFTS: weight[size:].clone()}


def _split_state_dict(model: EvaByteForMTPC, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
    if (weight := state_dict.get(prefix + OWN)) is not None:
        parts = _split(weight, model.config)
        state_dict |= {prefix + name: part for name, part in parts.items()}


class SplitHeads(ConversionOps):
    """Splits `lm_head.weight` of a checkpoint into the weights of the two modules, or joins them."""

    def __init__(self, joins: bool = False) -> None:
        self.joins = joins

    def convert(
        self, input_dict: dict[str, list[Tensor]], *args: object, model: PreTrainedModel, **kwargs: object
    ) -> dict[str, Tensor]:
        config = cast(EvaByteConfig, model.config)
        parts = {name: weights[0] for name, weights in input_dict.items()}
        if not self.joins:
            return _split(parts[OWN], config)
        if len(parts) == 2:
            return {OWN: torch.cat([parts[OWN], parts[DRAFTS]])}
        if config.num_pred_heads > 1 and not (DRAFTS in parts and config.tie_word_embeddings):
            raise ValueError(f"{', '.join(parts)} cannot be saved without the other heads, which are in another shard")
        return parts

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitHeads(not self.joins)


register_checkpoint_conversion_mapping("evabyte", [WeightConverter(OWN, [OWN, DRAFTS], [SplitHeads()])], overwrite=True)


class EvaByteForMTPC(WindowHeadMixin, StrictLoadingMixin, MTPGenerationMixin, PreTrainedModel):
    """EvaByte that predicts several bytes per call and emits exactly what byte-by-byte decoding emits.

    Official checkpoints load unchanged. `generate` speculates by default; `use_mtp=False` decodes byte by byte.

    Example:
        >>> model = EvaByteForMTPC.from_pretrained(path)
        >>> tokenizer = EvaByteTokenizer.from_pretrained(path)
        >>> out = model.generate(**tokenizer("def main(", return_tensors="pt"), max_new_tokens=64)
    """

    config_class, base_model_prefix = EvaByteConfig, "model"
    supports_gradient_checkpointing, _supports_sdpa = True, True
    silent_part = "_silent_head"
    attends, learning_layers, draft_vocabulary = False, [-1], None
    remote_classes = {"AutoModel": "EvaByteModel", "AutoModelForCausalLM": "EvaByteForMTPC"}
    drafts_trees, reads_prompt = True, False
    not_served = "it needs a kind of cache that no engine has"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    config: EvaByteConfig

    def __init__(self, config: EvaByteConfig) -> None:
        super().__init__(config)
        if config.mtp_head.family.rows_of_lm_head:
            config.num_pred_heads = max(config.num_pred_heads, config.mtp_head.window or 0)
        self.loss_type = "ForCausalLM"
        self.model = EvaByteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        drafts = config.num_pred_heads - 1
        self.draft_heads = FFHead(config.hidden_size, config.vocab_size, drafts) if drafts else None
        self.register_load_state_dict_pre_hook(_split_state_dict)
        self.mtp_head = self._circuit(config.mtp_head)
        self._set_tables()
        self.draft_layers = EvaDraftLayers(config, config.mtp_head) if config.mtp_head.draft_layers else None
        self.post_init()
        self._freeze()

    @classmethod
    @reads_whole
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike | None, *args: Any, **kwargs: Any) -> Any:
        """Load a directory or a Hub repository.

        `mtp_head={...}` selects another head than the stored one: a smaller window of FF heads uses the first, a
        larger one appends new ones, and a circuit starts from stored FF heads (`set_head`).
        """
        if isinstance(kwargs.get("mtp_head"), dict):
            check_options(kwargs["mtp_head"], MTPHeadConfig, "mtp_head", _APART)
        name = pretrained_model_name_or_path
        hub = hub_options(kwargs)
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
        """
        model = backbone if isinstance(backbone, EvaByteForMTPC) else cls.from_pretrained(backbone, **options)
        install_published(model, Path(folder))
        model.train(model.training)
        model._freeze()
        return model

    @property
    def window(self) -> int:
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
        return self.mtp_head or self.draft_heads or nn.Module()

    @property
    def drafting_part(self) -> nn.Module:
        if self.draft_layers is not None or self.head is self.lm_head:
            what = "draft_layers" if self.draft_layers is not None else "no head but its own (num_pred_heads=1)"
            raise ValueError(f"drafter: an {type(self).__name__} with {what} does not learn online")
        return self.head

    @property
    def head_config(self) -> MTPHeadConfig:
        return self.config.mtp_head

    @property
    def whole_head(self) -> nn.Module:
        return self.mtp_head or self._all_heads

    def _parts(self) -> BackboneParts:
        return BackboneParts(self)

    @property
    def _all_heads(self) -> OwnAndDraftHeads:
        return OwnAndDraftHeads(self.lm_head, self.draft_heads, self.config.vocab_size)

    def set_head(self, **options: Any) -> None:
        """Replace the head; `options` are fields of `MTPHeadConfig`, the old window and draft layers by default.

        FF heads are appended (drawn like fresh weights) where the window needs more; a circuit starts with every
        state of position i equal to FF head i, so that its distribution is that of the FF heads, and with random sum
        weights. Tables of tokens before (`context`) are taken over where both heads have the same.
        """
        check_options(options, MTPHeadConfig, "set_head", _APART)
        old = self.config.mtp_head
        unchanged = {"window": old.window, "loss_options": old.loss_options.changed()} | old.draft_options()
        wanted = possible_head(self.config, MTPHeadConfig(**(unchanged | options)))
        head, layers, tables = self._circuit(wanted), self._layers(wanted), tables_of(self.head)
        self.config.mtp_head, self.draft_layers = wanted, layers
        self.mtp_head = None if head is None else head.to(self.lm_head.weight)
        if head is None:
            if (missing := self.window - self.config.num_pred_heads) > 0:
                self._append_heads(missing)
        else:
            for module in head.modules():
                init_head(module, self.config.initializer_range)
            if self.config.mtp_head.unembedding == "own":
                rows = torch.cat([each.weight for each in (self.lm_head, self.draft_heads) if each is not None])
                head.copy_leaves(rows.unflatten(0, (-1, self.config.vocab_size)))
        self._set_tables(tables)
        self.head.requires_grad_(True)
        self._freeze()

    def add_draft_layers(self, count: int, rank: int = 8, alpha: float | None = None) -> EvaByteForMTPC:
        """Add draft layers below the head, as in `MTPHeads`, or remove them (0); the backbone is frozen."""
        changes = {"draft_layers": count, "draft_lora_rank": rank, "draft_lora_alpha": alpha}
        wanted = MTPHeadConfig.from_dict(self.config.mtp_head.to_dict() | changes)
        self.draft_layers = self._layers(wanted)
        self.config.mtp_head = wanted
        if self.draft_layers is not None:
            self.train_only("drafter")
        return self

    def _layers(self, wanted: MTPHeadConfig) -> EvaDraftLayers | None:
        """Return the draft layers of another head: those that are here where it has the same."""
        if not wanted.draft_layers:
            return None
        if self.draft_layers is not None and wanted.draft_options() == self.config.mtp_head.draft_options():
            return self.draft_layers
        layers = EvaDraftLayers(self.config, wanted)
        for module in layers.modules():
            init_head(module, self.config.initializer_range)
        return layers.to(self.lm_head.weight)

    @property
    def hidden_layers(self) -> list[int]:
        return [-1] if self.draft_layers is None else [-1 - self.config.mtp_head.draft_layers, -1]

    def features(
        self, hidden_states: Sequence[Tensor], attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        states = hidden_states[self.hidden_layers[0]]
        if self.draft_layers is None:
            return states
        run = self.draft_layers.bind(self.model)
        return run(states.detach(), attention_mask=attention_mask, position_ids=position_ids)

    def distribution(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> WindowDistribution:
        wanted = {"use_cache": False, "output_hidden_states": self.hidden_layers}
        states = self.model(input_ids, attention_mask, position_ids, **wanted).hidden_states
        return self.distribution_of_features(self.features(states, attention_mask, position_ids))

    def _set_tables(self, old: LeafContext | None = None) -> None:
        """Give FF heads the tables of the config, a circuit alone its own; take over the `old` ones where they fit."""
        if self.draft_heads is not None:
            tables = context_of(self.config.mtp_head, self.config.vocab_size) if self.mtp_head is None else None
            self.draft_heads.context = None if tables is None else tables.to(self.lm_head.weight)
        if old is not None and (tables := tables_of(self.head)) is not None:
            tables.take(old)

    def _append_heads(self, count: int) -> None:
        config = self.config
        more = FFHead(config.hidden_size, config.vocab_size, count).to(self.lm_head.weight)
        more.reset_head(config.initializer_range)
        if self.draft_heads is None:
            self.draft_heads = more
        else:
            self.draft_heads.append(more)
        config.num_pred_heads += count

    def _circuit(self, head: MTPHeadConfig) -> nn.Module | None:
        in_rows = head.family.rows_of_lm_head
        return None if in_rows else build_head(head, self.config.hidden_size, self.config.vocab_size)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resize embeddings and all heads; every head keeps its own rows, new ones are means, or drawn."""
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for head in (self.draft_heads, self.mtp_head):
            if head is not None:
                head.resize(self.config.vocab_size, None if mean_resizing else self.config.initializer_range)
        return embeddings

    def train_only(self, part: str) -> None:
        """Choose what is trained: `"all"`, or `"drafter"`, with backbone and next-byte head frozen."""
        if part not in ("all", "drafter"):
            raise ValueError(f"train_only({part!r}): choose 'all' or 'drafter'")
        if part == "all" and self.draft_layers is not None:
            raise ValueError("train_only('all'): draft layers need a frozen backbone; choose 'drafter'")
        self.head.requires_grad_(True)
        self.model.requires_grad_(part == "all")
        self.lm_head.requires_grad_(part == "all")
        self._freeze()

    def _freeze(self) -> None:
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
            input_ids: As for `EvaByteModel`, like all that is not named here.
            labels: [B, L] int64 as everywhere in transformers (shifted here, -100 ignored), or [B, L, n] with the
                target of every depth spelled out (the official form).
            logits_to_keep: Compute logits of the last so many positions only (0: all), or of these positions.
            return_all_pred_logits: Logits of all N heads, [B, L, N, V].
            num_items_in_batch: As for `MTPHeads`, like `shift_labels`, `balance` and `cached_states` [B, L, 1, D].
            **kwargs: For the backbone.
        """
        shift_labels, balance = kwargs.pop("shift_labels", None), kwargs.pop("balance", None)
        learns = labels is not None or shift_labels is not None
        counts = counts_of_update(untyped(self), num_items_in_batch, labels, attention_mask, position_ids, shift_labels)
        if learns and (cached := kwargs.pop("cached_states", None)) is not None:
            hidden = split_states(cached, self.learning_layers)[-1]
            targets = depth_targets(labels, self.window, attention_mask, position_ids, shift_labels)
            return MTPOutput(**self._loss(hidden, hidden, targets, input_ids, counts, balance))
        if learns and self.draft_layers is not None:
            wanted = kwargs.get("output_hidden_states") or []
            indices = [wanted] if isinstance(wanted, int) else wanted
            kwargs["output_hidden_states"] = wanted is True or [self.hidden_layers[0], *indices]
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
        """Depth 1 of FF heads is the next-byte head, which has the weight 1."""
        scale = super().loss_scale(first)
        if self.mtp_head is None:
            scale[0] = float(self.loss_options.divergence != "block")
        return scale

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        init_head(module, self.config.initializer_range)

    def start(self, options: DraftOptions) -> HeadSession:
        if self.draft_layers is None:
            return HeadSession(self.distribution_after, options)
        run, layer = self.draft_layers.bind(self.model), self.hidden_layers[0]
        return DraftLayersSession(self.distribution_after, options, layer, run, EvaByteCache(self.config))

    def own_cache(self) -> Callable[[], EvaByteCache]:
        return partial(EvaByteCache, self.config)

    def fixed_cache(
        self, cache: EvaByteCache, room: int, span: int, hold: Callable[[str, Tensor], Tensor]
    ) -> FixedEvaByteCache:
        """Return a cache of a fixed size with what another one holds; see `FixedEvaByteCache`."""
        summaries = [untyped(each).self_attn.summarise for each in self.model.layers]
        return FixedEvaByteCache(cache, summaries, room, span, hold)
