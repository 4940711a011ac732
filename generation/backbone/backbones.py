"""What backbones, prompts and caches can do, and the choice of the backbone that the loop calls."""

from __future__ import annotations

from inspect import Parameter, signature

from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    StaticCache,
    cache_utils,
)
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    StaticLayer,
)

from ...configuration.cache_names import CACHE, NAMES
from ..tensors.masks import check_attention
from ..tensors.wrapped_models import Kwargs, has_own_cache
from .compressed import CompressedBackbone
from .convolved import ConvolvedBackbone
from .repacking import LockstepBackbone, RealignedBackbone
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
    """Refuse a model that cannot decode in our loop; the message ends with what to do `instead`.

    Raises:
        ValueError: An encoder-decoder, an encoder, no head of a language model, no cache, or positions that follow from
            columns.
    """
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
    """Refuse a backbone that cannot verify trees of drafts; chains it can.

    Raises:
        ValueError: Attention without dense masks, or with distances between columns: in a tree, siblings have
            different columns at the same distance.
    """
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


def check_prompt(backbone: PreTrainedModel, call: Kwargs, config: GenerationConfig, has_own_cache: bool) -> None:
    """Refuse a prompt or a length that the backbone cannot process.

    Raises:
        ValueError: An empty prompt, ids outside the vocabulary, or more tokens than the model has positions.
    """
    text = backbone.config.get_text_config()
    ids, embeds = (call.get("input_ids") if call.get("inputs") is None else call["inputs"]), call.get("inputs_embeds")
    tensor = ids if embeds is None else embeds
    if not isinstance(tensor, Tensor) or tensor.dim() < 2:
        return
    if embeds is None and backbone.main_input_name == "input_ids":
        if tensor.shape[1] == 0:
            raise ValueError("input_ids is empty; pass at least one token, for example the bos token")
        low, high = (int(bound) for bound in tensor.aminmax())
        if low < 0 or high >= text.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"input_ids holds id {wrong}; ids of this model lie in 0 .. {text.vocab_size - 1}")
    limit = text.max_position_embeddings if has_own_cache else traits_of(backbone).table
    if limit is not None and tensor.shape[1] > limit:
        raise ValueError(f"the prompt has {tensor.shape[1]} tokens, more than max_position_embeddings={limit}")
    mask, new = call.get("attention_mask"), config.max_new_tokens or (config.max_length or 0) - tensor.shape[1]
    may_end = config.eos_token_id is not None or config.stop_strings or config.max_time or call.get("stopping_criteria")
    count = new - 1 + (int(mask.sum(1).max()) if isinstance(mask, Tensor) else tensor.shape[1])
    if not has_own_cache and limit is not None and count > limit and not may_end:
        most = f"choose at most {new - count + limit}"
        raise ValueError(f"max_new_tokens={new} takes {count} positions of max_position_embeddings={limit}: {most}")


def check_user_cache(call: Kwargs, config: GenerationConfig) -> None:
    """Refuse a cache of transformers that does not fit the prompt.

    Raises:
        ValueError: It holds another number of sequences, or too few columns for the call.
    """
    cache, ids = call.get(CACHE), call.get("input_ids") if call.get("inputs") is None else call["inputs"]
    if not isinstance(cache, (DynamicCache, StaticCache)) or not isinstance(ids, Tensor) or (config.num_beams or 1) > 1:
        return
    sequences = len(ids) * (config.num_return_sequences or 1)
    longest = config.max_length if config.max_new_tokens is None else ids.shape[1] + config.max_new_tokens
    tokens = (longest or 0) - 1  # the last token is never fed
    keys = [layer.keys for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    held = next((len(states) for states in keys if states is not None), sequences)
    if held != sequences:
        raise ValueError(f"{CACHE} holds {held} sequences, and the call has {sequences}: pass its own cache")
    fixed = (layer for layer in cache.layers if isinstance(layer, StaticLayer) and not layer.is_sliding)
    room = min((layer.get_max_length() for layer in fixed), default=tokens)
    if room < tokens:
        more = f"make max_cache_len longer by {tokens - room}"
        raise ValueError(f"{CACHE} has room for {room} tokens of {tokens}: {more}")


def is_repackable(cache: Cache, traits: Traits) -> bool:
    """Return whether sequences of a backbone's cache may accept different numbers of tokens: all layers roll back."""
    if traits.convolves:
        return all(type(layer) in _CONVOLVED for layer in cache.layers)
    return all(type(layer) in _KINDS or _has_blocks(layer) for layer in cache.layers)


def _has_blocks(layer: object) -> bool:
    """Return whether a layer has an index of blocks of columns, or windows of them that are compressed."""
    return isinstance(layer, DynamicLayer) and not {"idx_keys", "compressed_kv"}.isdisjoint(vars(layer))


def can_roll_back(model: PreTrainedModel) -> bool:
    """Return whether a model supports rollback after a rejected draft: columns are cropped, recurrent layers replayed.

    The length of a cache needs columns, and states in another form than in transformers' caches are not supported.
    """
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
    """Return the target of a model on a cache of transformers with the prompt in it; see `DynamicCacheBackbone` and
    `RaggedBackbone`."""
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
