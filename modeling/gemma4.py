"""Loading the assistants of Gemma 4 (`gemma4_assistant`), whose attention layers have no keys and values.

All their layers read the backbone's. transformers 5.23.0 looks up which of the layers compute what the others reuse,
finds none, and refuses to build any; the configurations below define `kv_sharing_modes` for that case.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, cast

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .loading import HUB_OPTIONS


class _Reusing:
    """A configuration of transformers, of which all layers may read keys and values of another model."""

    num_hidden_layers: int
    num_kv_shared_layers: int

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        """How each layer shares keys and values, as in transformers."""
        if self.num_kv_shared_layers == self.num_hidden_layers:
            return ["reuse"] * self.num_hidden_layers
        return cast(Any, super()).kv_sharing_modes


class Gemma4TextConfig(_Reusing, transformers.Gemma4TextConfig):
    """The same for assistants of plain models."""


class Gemma4UnifiedTextConfig(_Reusing, transformers.Gemma4UnifiedTextConfig):
    """The same for assistants of unified models."""


_ASSISTANTS = {"gemma4_assistant": Gemma4TextConfig, "gemma4_unified_assistant": Gemma4UnifiedTextConfig}


def borrows_states(config: PreTrainedConfig) -> bool:
    """Return whether a model reads the keys and values of its backbone and has none of its own."""
    return config.model_type in _ASSISTANTS


def buildable(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration from which transformers can build an assistant; others are unchanged."""
    if borrows_states(config):
        config.text_config.__class__ = _ASSISTANTS[config.model_type]
    return config


def load_assistant(folder: str | PathLike, **kwargs: Any) -> PreTrainedModel:
    """Load a causal language model that drafts: one with its own cache, or an assistant of Gemma 4."""
    if "config" not in kwargs:
        hub = {name: kwargs[name] for name in (*HUB_OPTIONS, "trust_remote_code") if name in kwargs}
        kwargs["config"] = AutoConfig.from_pretrained(folder, **hub)
    kwargs["config"] = buildable(kwargs["config"])
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)
