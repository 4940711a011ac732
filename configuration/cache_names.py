"""The name of a cache in transformers, which 5.24 changed from `past_key_values` to `cache`; users may pass either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, TypeVar

from transformers.generation import utils

CACHE: str = utils.ALL_CACHE_NAMES[0]
"""The installed name."""
NAMES = ("cache", "past_key_values")
"""Both names, the new one first."""
LAYER_NAMES = ("layer_past", "cache_params", *NAMES)
"""Names by which layers and mixers take a cache; some families have one of their own."""
Given = TypeVar("Given")


def cache_of(outputs: object) -> Any:
    """Return the cache of a model's outputs; None where there is none."""
    return getattr(outputs, CACHE)


def given_cache(cache: Given | None, past_key_values: Given | None) -> Given | None:
    """Return the cache that a forward with both names got; refuse two different ones."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values are two names of one argument; pass one of them")
    return past_key_values if cache is None else cache


def renamed(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the cache under the installed name, whichever the user wrote."""
    others = {name: value for name, value in kwargs.items() if name not in NAMES}
    given = {CACHE: given_cache(*map(kwargs.get, NAMES))}
    return others if len(others) == len(kwargs) else others | given


def name_of_cache(forward: Callable[..., Any]) -> str | None:
    """Return what a forward of a layer or a mixer calls the cache; None where it takes none."""
    return next((name for name in LAYER_NAMES if name in signature(forward).parameters), None)
