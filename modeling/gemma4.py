"""Loading the assistants of Gemma 4 (`gemma4_assistant`), which have attention layers but no keys and values.

All their layers read the backbone's. transformers 5.23.0 asks in their configuration which of the layers make what the
others read, finds that none does, and refuses to build any: the configurations below answer for that case.
"""

from __future__ import annotations

from os import PathLike
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .loading import HUB_OPTIONS


class _Borrowing:
    """A text configuration of which all layers may read keys and values of another model."""

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        """What each layer does about keys and values; see transformers' class."""
        if self.num_kv_shared_layers == self.num_hidden_layers:
            return ["reuse"] * self.num_hidden_layers
        return super().kv_sharing_modes


class Gemma4TextConfig(_Borrowing, transformers.Gemma4TextConfig):
    """transformers' configuration, under the name by which its Auto classes know it."""


class Gemma4UnifiedTextConfig(_Borrowing, transformers.Gemma4UnifiedTextConfig):
    """The same of the assistants of unified models."""


_ASSISTANTS = {"gemma4_assistant": Gemma4TextConfig, "gemma4_unified_assistant": Gemma4UnifiedTextConfig}


def borrows_states(config: PreTrainedConfig) -> bool:
    """Whether a model of that configuration reads the keys and values of its backbone, and has none of its own."""
    return config.model_type in _ASSISTANTS


def buildable(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of an assistant as transformers can build it; any other one as it is."""
    if borrows_states(config):
        config.text_config.__class__ = _ASSISTANTS[config.model_type]
    return config


def load_assistant(folder: str | PathLike, **kwargs: Any) -> PreTrainedModel:
    """A causal language model that is to draft: one with a cache of its own, or an assistant of Gemma 4.

    Args:
        folder: A directory or a repository of the Hub.
        **kwargs: Of `from_pretrained`.
    """
    if "config" not in kwargs:
        hub = {name: kwargs[name] for name in (*HUB_OPTIONS, "trust_remote_code") if name in kwargs}
        kwargs["config"] = AutoConfig.from_pretrained(folder, **hub)
    kwargs["config"] = buildable(kwargs["config"])
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)
