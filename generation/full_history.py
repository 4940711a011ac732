"""Speculation on transformers' own caches: they start with layers that forget nothing. Knows no drafter."""

from __future__ import annotations

from typing import Any

from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .mixin import MTPGenerationMixin
from .targets import is_repackable


class FullHistoryMixin(MTPGenerationMixin):
    """`generate` for models whose cache is transformers' own."""

    def _obstacle(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
        cache = model_kwargs.get("past_key_values")
        if cache is not None and not is_repackable(cache):
            return f"past_key_values with layers that forget ({type(cache).__name__})"
        if model_kwargs.get("inputs_embeds") is not None:
            return "inputs_embeds"
        return super()._obstacle(config, model_kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Starts speculation with a cache that forgets nothing: a sliding window is then a matter of the mask."""
        fresh = generation_config.cache_implementation in (None, "dynamic")
        if generation_config.use_mtp and fresh and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = full_history(self.config)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)


def full_history(config: PreTrainedConfig) -> Cache:
    """An empty cache of the kinds of layers that a model wants, but none that forgets columns."""
    cache = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache
