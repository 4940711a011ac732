"""Small models that draft: the first layers of a larger one, and assistants of Gemma 4 (`gemma4_assistant`).

Attention layers of the last have no keys and values: all read the backbone's. transformers before 5.24 looks up which
of the layers compute what the others reuse, finds none, and refuses to build any; the configurations below define
`kv_sharing_modes` for that case.
"""

from __future__ import annotations

import json
from copy import deepcopy
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file

from ...configuration.fields import field
from ..tensors.shared_models import check_whole
from ..tensors.tensor_files import check_index, hub_options
from ..tensors.wrapped_models import carries_adapters, has_own_cache, untyped, unwrap


def first_layers(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a model of the same class whose decoder has the first layers of another one.

    All are copies, for the model may learn on. Embeddings and head are frozen.

    Args:
        model: A causal language model of transformers.
        layers: How many.

    Raises:
        ValueError: Not fewer layers than the model has, or a model that cannot be cut.
    """
    model = unwrap(model)
    config, kind = deepcopy(model.config), type(model).__name__
    whole = config.get_text_config().num_hidden_layers
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < whole:
        raise ValueError(f"layers={layers!r} must be a whole number from 1 to {whole - 1}: {kind} has {whole} layers")
    linear = isinstance(model.get_output_embeddings(), nn.Linear)
    if config.get_text_config() is not config or has_own_cache(model) or carries_adapters(model) or not linear:
        raise ValueError(f"{kind} cannot be cut to layers={layers}: pass a plain language model, without adapters")
    check_whole(model, f"layers={layers} of {kind}")
    for name, value in config.to_dict().items():  # layer_types, and other fields with an entry per layer
        if isinstance(value, list) and len(value) == whole:
            setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    with torch.device(model.device):
        small = type(model)(config)
    untyped(small).to(model.dtype)
    known = small.state_dict()
    copied = {name: tensor for name, tensor in model.state_dict().items() if name in known}
    if missing := [name for name in known if name not in copied]:
        raise ValueError(f"{kind} cannot be cut to {layers} layers: it has no {missing[0]}")
    small.load_state_dict(copied)
    for table in (small.get_input_embeddings(), small.get_output_embeddings()):
        cast(nn.Module, table).requires_grad_(False)
    small.generation_config = deepcopy(model.generation_config)
    return small.eval()


class _Reusing:
    """A configuration of transformers all of whose layers may read keys and values of another model."""

    num_hidden_layers: int
    num_kv_shared_layers: int

    @property
    def kv_sharing_modes(self) -> list[str | None]:
        """How each layer shares keys and values, as in transformers."""
        if self.num_kv_shared_layers == self.num_hidden_layers:
            return ["reuse"] * self.num_hidden_layers
        return untyped(super()).kv_sharing_modes


class Gemma4TextConfig(_Reusing, transformers.Gemma4TextConfig):
    """The same for assistants of plain models."""


class Gemma4UnifiedTextConfig(_Reusing, transformers.Gemma4UnifiedTextConfig):
    """The same for assistants of unified models."""


_ASSISTANTS = {"gemma4_assistant": Gemma4TextConfig, "gemma4_unified_assistant": Gemma4UnifiedTextConfig}


def borrows_states(config: PreTrainedConfig) -> bool:
    """Return whether a model reads the keys and values of its backbone and makes none itself."""
    return config.model_type in _ASSISTANTS


def buildable(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration from which transformers can build an assistant; others are unchanged."""
    if borrows_states(config):
        config.text_config.__class__ = _ASSISTANTS[config.model_type]
    return config


def refuse_blocks(config: PreTrainedConfig, what: str) -> None:
    """Refuse a model that fills in blocks, as DFlash assistants do; `what` it is begins the message."""
    if all(field(config, name) is not None for name in ("block_size", "mask_token_id", "target_layer_ids")):
        raise ValueError(f"{what}, which fills in blocks: BlockDrafter.from_pretrained reads its directory")


def load_assistant(name: str | PathLike, **kwargs: Any) -> PreTrainedModel:
    """Load a model that drafts: a causal one with its own cache, an assistant of Gemma 4, or adapters of one."""
    hub = hub_options(kwargs)
    check_index(name, kwargs.get("variant"), **hub)
    if "config" not in kwargs:
        adapters = find_adapter_config_file(str(name), **hub)
        is_bare = adapters is not None and not (Path(adapters).parent / "config.json").is_file()
        source = json.loads(Path(adapters).read_text())["base_model_name_or_path"] if adapters and is_bare else name
        hub |= {key: kwargs[key] for key in ("trust_remote_code",) if key in kwargs}
        kwargs["config"] = AutoConfig.from_pretrained(source, **hub)
    kwargs["config"] = buildable(kwargs["config"])
    refuse_blocks(kwargs["config"], f"{name}: a model of model_type={kwargs['config'].model_type!r}")
    return AutoModelForCausalLM.from_pretrained(name, **kwargs)
