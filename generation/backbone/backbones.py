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
from ..tensors.wrapped_models import Kwargs, has_own_cache
from .repacking import LockstepBackbone, RealignedBackbone
from .special import CompressedBackbone, ConvolvedBackbone
from .static import PlannedCache, StaticBackbone
from .target import DynamicCacheBackbone, RaggedBackbone, Traits, is_recurrent, traits_of

_EMPTY = getattr(cache_utils, "DummyLayer", DynamicLayer)  # the version that vLLM pins has none
_KINDS = (
    DynamicLayer,
    DynamicIndexedLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    _EMPTY,
)
_FIXED = tuple(kind for kind in _KINDS if kind is not LinearAttentionAndFullAttentionLayer)
"""Layers that have a counterpart in a cache that never moves."""
_CONVOLVED = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)
"""Layers with short convolutions and attention."""
_FORGETFUL = ("jamba", "zamba", "recurrent_gemma")
"""Models whose mixers compute a block of several tokens otherwise than single ones, without the state before it say."""
_CAUSAL = ("gpt_neox_japanese",)
"""Decoders that neither config nor layers identify."""
_IMAGES_APART = ("git",)
"""Models whose cache begins with columns of an image, which masks lack."""


def check_model(model: PreTrainedModel, instead: str = "attach to another backbone") -> None:
    """Refuse a model whose blocks mean something else than its tokens one by one; the message ends with `instead`."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder, and no causal language model; {instead}")
    if not isinstance(model, PreTrainedModel):  # something that stands in for one is taken at its word
        return
    if _looks_ahead(model):
        raise ValueError(f"{name}: is_decoder=False: its tokens attend to later ones, it is no causal model; {instead}")
    if not model.can_generate():
        raise ValueError(f"{name} has no head of a language model (no GenerationMixin); {instead}")
    if model.config.model_type in _IMAGES_APART:
        raise ValueError(f"{name}: its cache has columns of a picture that masks lack; {instead}")
    if not model._is_stateful and not any(_takes(type(model), cache) for cache in NAMES):
        raise ValueError(f"{name}: its forward takes no {CACHE}; {instead}")
    # with ALiBi only distances count; a model of states decodes plainly, or has its own rollback
    is_free = traits_of(model).has_alibi or model._is_stateful or has_own_cache(model)
    if not is_free and not any(_takes(type(part), "position_ids") for part in (model, model.get_decoder())):
        raise ValueError(f"{name}: its forward takes no position_ids; {instead}")


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


def _looks_ahead(backbone: PreTrainedModel) -> bool:
    """Return whether a model is an encoder; some decoders have a config of an encoder, and layers that are causal."""
    if getattr(backbone.config, "is_decoder", True) or backbone.config.model_type in _CAUSAL:
        return False
    return not any(getattr(module, "is_causal", False) for module in backbone.get_decoder().modules())


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
