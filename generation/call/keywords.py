"""Keyword arguments of the backbone in every forward of a call, besides ids, cache, mask and positions.

transformers' own `prepare_inputs_for_generation` and `_update_model_kwargs_for_generation` return the same values after
every prompt: they are called once. Those of a user's class may compute values from the tokens, which no block can get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import ismethod
from typing import cast

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.generation import utils
from transformers.utils.generic import ModelOutput

from ...configuration.cache_names import CACHE, NAMES
from ..backbone.wrapped_models import Kwargs, is_base

_TYPES = {"token_type_ids", "mm_token_type_ids"}  # kinds of tokens, which `backbone.target.Continuation` continues
_OURS = {
    "input_ids", "attention_mask", "position_ids", *NAMES, *_TYPES, "cache_position", "use_cache", "logits_to_keep",
    "labels", "return_dict", "output_attentions", "output_hidden_states", "inputs_embeds", "next_sequence_length",
    "is_first_iteration",
}  # fmt: skip
"""Keyword arguments that the loop and its target pass themselves."""
USUAL = _OURS | set(getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()))
"""Those that forwards after the prompt do not need from here; images and sound are read with the prompt alone."""
_OF_AN_ENCODER = {"encoder_hidden_states", "encoder_attention_mask"}
"""Those with columns of another sequence, which may be as long as the prompt."""
_UPDATES = "PaliGemmaForConditionalGeneration.", "MllamaForConditionalGeneration."
"""Classes of transformers whose own updates read no outputs of the last forward."""
_PACKAGES = "transformers.", __name__.rpartition("generation")[0]
"""Modules of methods that are known: transformers' and ours, which are others where the code travels with a model."""


class _AtLength(Cache):
    """A cache that knows only how many tokens are in it."""

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


@dataclass
class Keywords:
    """The keyword arguments of one call, after its prompt."""

    constant: Kwargs  # those of every forward
    continued: Kwargs  # positions of the prompt, counted as the model counts after it, and types of tokens

    @property
    def are_plain(self) -> bool:
        """Whether every forward gets the same numbers and texts, and no tensor."""
        return all(isinstance(value, (bool, int, float, str, type(None))) for value in self.constant.values())


def keywords_of(model: PreTrainedModel, model_kwargs: Kwargs, prompt: Tensor) -> Keywords | str:
    """Return the keyword arguments of forwards after a prompt [B, L], by those of its own, or an obstacle to blocks."""
    prepare = cast(Callable[..., Kwargs], model.prepare_inputs_for_generation)
    update = cast(Callable[..., Kwargs], model._update_model_kwargs_for_generation)
    kind, owner = type(model).__name__, prepare.__self__ if ismethod(prepare) else model
    if owner is not model:  # peft's virtual tokens, which are in the cache and have no ids
        return f"inputs that {type(owner).__name__} prepares"
    if not prepare.__module__.startswith(_PACKAGES):
        return f"prepare_inputs_for_generation of {kind}"
    if not (is_base(update) or update.__qualname__.startswith(_UPDATES)):
        return f"_update_model_kwargs_for_generation of {kind}"
    ids = torch.cat([prompt, torch.zeros_like(prompt[:, :1])], dim=1)  # [B, L + 1]
    with_columns = [model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"), prompt]
    cache = _AtLength(next(each.shape[-1] for each in with_columns if each is not None))
    try:
        kwargs = update(ModelOutput(), dict(model_kwargs), is_encoder_decoder=False)
        inputs = prepare(ids, next_sequence_length=1, **kwargs | {CACHE: cache, "use_cache": True})
    except (AttributeError, LookupError, TypeError):  # it reads more of the cache than its length
        return f"what {kind}.prepare_inputs_for_generation reads"
    if inputs.get("inputs_embeds") is not None:
        return "inputs_embeds="
    if (positions := model_kwargs.get("position_ids")) is not None:
        if (counted := inputs.get("position_ids")) is None:
            return "position_ids="
        # some models count from 1
        positions = positions + (counted[..., -1:].to(positions.device) - kwargs["position_ids"][..., -1:])
    types = {name: kwargs[name] for name in _TYPES if kwargs.get(name) is not None}
    constant = {name: value for name, value in inputs.items() if value is not None and name not in _OURS}
    for name, value in constant.items():
        if name not in _OF_AN_ENCODER and _has_columns(model_kwargs.get(name, value), prompt):
            return f"{name}="
    return Keywords(constant, types | {"position_ids": positions})


def _has_columns(value: object, prompt: Tensor) -> bool:
    """Return whether a value has a column for every token of a prompt [B, L], which nobody slices."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[0] not in (1, len(prompt)):
        return False
    columns, length = value.shape[1], prompt.shape[1]
    return columns > 1 and (columns == length or (value.dim() > 2 and len(prompt) > 1 and columns > length))
