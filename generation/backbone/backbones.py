"""What backbones, prompts and caches can do, and the choice of the backbone that the loop calls."""

from __future__ import annotations

from inspect import Parameter, signature

from torch import Tensor
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
from ..tensors.masks import check_attention
from .repacking import LockstepBackbone, RealignedBackbone
from .special import CompressedBackbone, ConvolvedBackbone
from .static import PlannedCache, StaticBackbone
from .target import DynamicCacheBackbone, RaggedBackbone, Traits, is_recurrent, traits_of
from .wrapped_models import Kwargs, has_own_cache

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
    is_free = traits_of(model).has_alibi or model._is_stateful or has_own_cache(model)
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
