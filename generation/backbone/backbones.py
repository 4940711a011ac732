"""What backbones and caches can do, the choice of the target that the loop calls, and those that share one layout.

Where backbones take no dense masks, or the cache cannot be rolled back, every sequence's tokens are right-aligned again
after verification, and its left padding grows: distances between columns stay distances between tokens.

    columns of the cache     before           + block of 4, new tokens 4 and 2   repacked
    sequence 0               . a b c          . a b c d e f g                    . a b c d e f g
    sequence 1               r s t u          r s t u v w - -                    . . r s t u v w

A layer with an attention window W holds its last W - 1 columns, and those of a block until it is verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from inspect import Parameter, signature
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ...configuration.cache_names import CACHE, NAMES
from ..call.sequences import NewTokens
from ..contract import DraftTree, each_state
from ..tensors.masks import cached_arange, cached_range, check_attention
from .cache import STATES
from .special import CompressedLayer, own_columns
from .static import PlannedCache, StaticBackbone
from .target import DynamicCacheBackbone, RaggedBackbone, Traits, is_recurrent, traits_of
from .wrapped_models import Kwargs, own_cache_of


class RealignedBackbone(DynamicCacheBackbone):
    """A model on transformers' caches, which are repacked; it takes chains."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts = self.mask.sum(1)
        self.moved: Tensor | None = None
        self.count = 0

    def extend(self, block: Tensor, **options: Any) -> Any:
        numbers = self.counts[:, None] + cached_range(self.count, block.shape[1], block.device)  # [B, F]
        self.count += block.shape[1]
        keep_all_columns(self.cache)
        return self.model(
            block,
            **{CACHE: self.cache},
            use_cache=True,
            attention_mask=pad(self.mask, (0, self.count), value=True) if self.is_padded else None,
            **(self.continuation.inputs(numbers, self.last_position) | options),
        )

    def keep(self, new: NewTokens, path: Tensor | None = None) -> None:
        self.new_tokens = new
        if self.replay is not None:
            self.replay.keep(new.counts)
        crop(self.cache, new.longest - self.count)
        self.mask, self.count = pad(self.mask, (0, new.longest), value=True), 0
        self.counts = self.counts + (new.longest if new.is_even else new.on_device.to(self.counts.device))
        if not new.is_even:
            shifts = new.longest - new.on_device.to(self.counts.device)  # [B]
            self.moved = shifts if self.moved is None else self.moved + shifts
            self.is_padded, self.mask = True, shift_cache(self.cache, shifts, self.mask)
        keep_window_columns(self.cache)

    def align(self, columns: int) -> None:
        """Drop the first columns, padding in all sequences by now: a layer with a window needs the last ones."""
        if self.moved is not None:
            surplus = self.mask.shape[1] - columns
            for layer, name, dim in _states_with_columns(self.cache):
                states = getattr(layer, name)
                width = min(columns, states.shape[dim])
                setattr(layer, name, states.narrow(dim, states.shape[dim] - width, width))
            for layer in window_layers(self.cache):
                layer.cumulative_length = columns
            shift_cache(self.cache, surplus - self.moved, self.mask[:, surplus:])


class LockstepBackbone(RealignedBackbone):
    """A model on a cache without rollback, such as a static one: one token at a time, also of sequences that ended."""

    supports_rollback = False

    def keep(self, new: NewTokens, path: Tensor | None = None) -> None:
        self.new_tokens, self.counts, self.count = new, self.counts + 1, 0
        self.mask = pad(self.mask, (0, 1), value=True)
        keep_window_columns(self.cache)

    def align(self, columns: int) -> None:
        pass


class CompressedBackbone(RaggedBackbone):
    """A model on a cache of `CompressedLayer`.

    Compressors without an index (`heavy`) count windows in columns, padding among them; single tokens see all entries.
    In a block they hide entries by positions, so that with padding they get columns instead.
    """

    takes_trees = False

    def __init__(self, *args: Any, limit: int, span: int) -> None:
        super().__init__(*args, limit=limit, span=span)
        self.heavy: list[nn.Module] = []
        for index, layer in enumerate(self.cache.layers):
            if isinstance(layer, CompressedLayer) and layer.compressors:
                compressor = self.model.get_decoder().get_submodule(f"layers.{index}.self_attn.compressor")
                layer.rotary = compressor.get_submodule("rotary_emb")
                self.heavy += [compressor] if layer.compressors == ["compressor"] else []

    def _call(self, block: Tensor, depths: Tensor, tree: DraftTree | None, last: int | None, options: Kwargs) -> Any:
        if block.shape[1] > 1 or self.layout.is_even:
            with self._given_columns(depths) if self.is_padded else nullcontext():
                return super()._call(block, depths, tree, last, options)
        # a token alone sees all entries, those of sequences that are ahead: of two, each sees its own
        options = options | {"logits_to_keep": 0}
        outputs = self._call(pad(block, (0, 1)), torch.cat([depths, depths + 1], dim=-1), None, last, options)
        outputs.logits = outputs.logits[:, :1]
        outputs.hidden_states = each_state(outputs.hidden_states, lambda state: state[:, :1])
        return outputs

    @contextmanager
    def _given_columns(self, depths: Tensor) -> Iterator[None]:
        columns, own = self.layout.ends[:, None] + depths, get_ident()  # [B, F]

        def changed(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (*args[:2], columns.to(args[2].device), *args[3:]) if get_ident() == own else args

        with ExitStack() as hooks:
            for compressor in self.heavy:
                hooks.enter_context(compressor.register_forward_pre_hook(changed))
            yield


class ConvolvedBackbone(RaggedBackbone):
    """A model on a cache of `ConvolvedLayer`."""

    takes_trees = False

    def __init__(self, *args: Any, limit: int, span: int) -> None:
        super().__init__(*args, limit=limit, span=span)
        self.replay = None  # convolutions remember their inputs, and no states

    def _call(self, block: Tensor, positions: Tensor, tree: DraftTree | None, last: int | None, options: Kwargs) -> Any:
        with own_columns(self.model.get_decoder(), self.cache):
            return super()._call(block, positions, tree, last, options)


def crop(cache: Cache, columns: int) -> None:
    """Remove the last `-columns` columns from all layers that have columns: a recurrent state has none."""
    for layer in cache.layers:
        is_bounded = isinstance(layer, DynamicSlidingWindowLayer)
        if is_bounded or isinstance(layer, LinearAttentionAndFullAttentionLayer):
            DynamicLayer.crop(layer, columns)
        elif isinstance(layer, DynamicLayer):
            layer.crop(columns)
        if is_bounded and layer.is_initialized:
            layer.cumulative_length += columns


def shift_cache(cache: Cache, shifts: Tensor, mask: Tensor) -> Tensor:
    """Move the columns of sequence b by `shifts[b]` [B] to the right, in every layer, and those of the mask [B, W]."""
    source = cached_arange(mask.shape[1], shifts.device) - shifts[:, None]  # [B, W], the column that moves there
    for layer, name, dim in _states_with_columns(cache):
        states = getattr(layer, name)
        index = source[:, : states.shape[dim]].to(states.device).clamp(0, states.shape[dim] - 1)  # [B, w]
        shape = [len(states), *[1] * (dim - 1), -1, *[1] * (states.dim() - dim - 1)]
        setattr(layer, name, states.gather(dim, index.view(shape).expand(*states.shape)))
    return mask.gather(1, source.clamp(0, source.shape[1] - 1)) & (source >= 0)  # [B, W]


def _states_with_columns(cache: Cache) -> list[tuple[object, str, int]]:
    """Return layer, name and dimension of columns of all states of single tokens in a cache."""
    found = ((layer, name, dim, getattr(layer, name, None)) for layer in cache.layers for name, dim in STATES)
    return [(layer, name, dim) for layer, name, dim, held in found if held is not None and held.numel()]


def window_layers(cache: Cache) -> list[DynamicSlidingWindowLayer]:
    """Return the layers that forget columns, without those that share another layer's keys and hold none."""
    return [layer for layer in cache.layers if type(layer) is DynamicSlidingWindowLayer and layer.is_initialized]


def keep_all_columns(cache: Cache) -> None:
    """Let no layer forget anything, until `keep_window_columns`."""
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.activate_past_recording()


def keep_window_columns(cache: Cache, more: int = 0) -> None:
    """Leave the last W - 1 columns, and some more; from now on older ones are forgotten, as in plain decoding."""
    for layer in window_layers(cache):
        if layer.keys is not None and layer.values is not None:
            first = max(layer.keys.shape[-2] - (layer.sliding_window - 1) - more, 0)
            layer.keys, layer.values = layer.keys[..., first:, :], layer.values[..., first:, :]
        layer.record_past = False


_EMPTY = getattr(cache_utils, "DummyLayer", DynamicLayer)  # the version that vLLM pins has none
_FIXED = (DynamicLayer, DynamicIndexedLayer, DynamicSlidingWindowLayer, LinearAttentionLayer, _EMPTY)
"""Layers that have a counterpart in a cache that never moves."""
_KINDS = (*_FIXED, LinearAttentionAndFullAttentionLayer)
_CONVOLVED = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""Layers with short convolutions and attention."""
_FORGETFUL = ("jamba", "zamba", "recurrent_gemma")
"""Models whose mixers compute a block of several tokens otherwise than single ones, without the state before it say."""


def check_model(model: PreTrainedModel, instead: str = "attach to another backbone") -> None:
    """Refuse a model whose blocks mean something else than its tokens one by one; the message ends with `instead`."""
    if (reason := _unfit(model)) is not None:
        raise ValueError(f"{type(model).__name__}: {reason}; {instead}")


def _unfit(model: PreTrainedModel) -> str | None:
    kind, config = type(model), model.config
    if config.is_encoder_decoder:
        return "an encoder-decoder is no causal language model"
    if not isinstance(model, PreTrainedModel):  # something that stands in for one is taken at its word
        return None
    # some decoders have a config of an encoder, and layers that are causal, or do not say it
    is_decoder = getattr(config, "is_decoder", True) or config.model_type == "gpt_neox_japanese"
    if not is_decoder and not any(getattr(part, "is_causal", False) for part in model.get_decoder().modules()):
        return "is_decoder=False: its tokens attend to later ones"
    if config.model_type == "git":
        return "its cache has columns of a picture that masks lack"
    if not model._is_stateful and not any(_takes(kind, cache) for cache in NAMES):
        return f"its forward takes no {CACHE}"
    # with ALiBi only distances count; a model of states decodes plainly, or has its own rollback
    is_free = traits_of(model).has_alibi or model._is_stateful or own_cache_of(model) is not None
    if not is_free and not any(_takes(type(part), "position_ids") for part in (model, model.get_decoder())):
        return "its forward takes no position_ids"
    return None


def _takes(kind: type, name: str) -> bool:
    """Return whether a class's forward takes a keyword, itself or by way of the base that it passes others to."""
    for forward in (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)):
        known = signature(forward).parameters
        if name in known:
            return True
        if not any(each.kind is Parameter.VAR_KEYWORD for each in known.values()):
            return False
    return False


def check_trees(backbone: PreTrainedModel) -> None:
    """Refuse a backbone that cannot verify trees: without dense masks, or where siblings have other distances."""
    check_attention(backbone.config, "trees of drafts")
    if (reason := traits_of(backbone).by_columns) is not None:
        name = backbone.config.get_text_config().model_type
        raise ValueError(f"{name}: {reason} takes distances from columns: leave draft_tree out")


def takes_dense_masks(model: PreTrainedModel) -> bool:
    """Return whether a mask may define for every token what it sees, as trees need it."""
    try:
        check_trees(model)
    except ValueError:
        return False
    return True


def is_repackable(cache: Cache, traits: Traits) -> bool:
    """Return whether sequences of a backbone's cache may accept different numbers of tokens: all layers roll back."""
    if traits.convolves:
        return all(type(layer) in _CONVOLVED for layer in cache.layers)
    return all(type(layer) in _KINDS or _has_blocks(layer) for layer in cache.layers)


def _has_blocks(layer: object) -> bool:
    """Return whether a layer has an index of blocks of columns, or windows of them that are compressed."""
    return isinstance(layer, DynamicLayer) and not {"idx_keys", "compressed_kv"}.isdisjoint(vars(layer))


def can_roll_back(model: PreTrainedModel) -> bool:
    """Return whether rejected drafts can be rolled back: columns are cropped, recurrent layers replayed."""
    if not type(model)._is_stateful:
        return True
    if model.config.model_type in _FORGETFUL:
        return False
    cache = DynamicCache(config=model.config)
    has_columns = any(isinstance(layer, DynamicLayer) for layer in cache.layers)
    is_known = is_recurrent(cache) or traits_of(model).compresses_windows
    return has_columns and is_known and is_repackable(cache, traits_of(model))


def takes_fixed_size(model: PreTrainedModel) -> bool:
    """Return whether drafts can be verified on columns that are allocated once and never counted by the host."""
    kinds = {type(layer) for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers}
    return kinds <= {DynamicLayer, DynamicSlidingWindowLayer, _EMPTY} and bool(kinds) and takes_dense_masks(model)


def target_of(
    model: PreTrainedModel,
    cache: Cache,
    like: Tensor,
    mask: Tensor | None,
    model_kwargs: Kwargs | None = None,
    limit: int = 0,
    span: int = 0,
) -> DynamicCacheBackbone:
    """Return the target of a model on a cache with the prompt in it; arguments as for `RaggedBackbone`."""
    traits = traits_of(model)
    if not is_repackable(cache, traits):
        return LockstepBackbone(model, cache, like, mask, model_kwargs)
    if traits.convolves:
        return ConvolvedBackbone(model, cache, like, mask, model_kwargs, limit=limit, span=span)
    if isinstance(cache, PlannedCache) and cache.room is not None:
        return StaticBackbone(model, cache, like, mask, model_kwargs, span=span)
    is_known = all(type(layer) in _FIXED or _has_blocks(layer) for layer in cache.layers)
    takes_masks = traits.chooses_blocks or traits.compresses_windows or takes_dense_masks(model)
    if is_known and takes_masks and not cache.offloading:
        kind = CompressedBackbone if traits.compresses_windows else RaggedBackbone
        return kind(model, cache, like, mask, model_kwargs, limit=limit, span=span)
    return RealignedBackbone(model, cache, like, mask, model_kwargs)
