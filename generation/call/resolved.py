"""Fields of a call that are resolved before transformers' `generate`, which would misread them beside a callable.

A call whose decoding method is a callable loses its tokenizer: stop strings become a criterion here, and the prompt is
healed here. The backbone's own class of cache is passed as a user's cache is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList, StopStringCriteria
from transformers.utils import logging

from ...configuration.cache_names import CACHE
from ..contract import SpeculativeCache

logger = logging.get_logger(__name__)
PARAMETERS = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:-1]
NOT_CONFIG = {*PARAMETERS, "tokenizer", "assistant_tokenizer", "trust_remote_code"}
"""Keyword arguments of `generate` that neither a GenerationConfig nor the model takes."""


class _Field:
    """A field of a `ResolvedConfig`: unset where it was resolved, whatever is written to it."""

    def __set_name__(self, kind: type, name: str) -> None:
        self.name = name

    def __get__(self, config: ResolvedConfig | None, kind: type | None = None) -> object:
        return None if config is None or self.name in config.resolved else vars(config).get(self.name)

    def __set__(self, config: ResolvedConfig, value: object) -> None:
        vars(config)[self.name] = value


class ResolvedConfig(GenerationConfig):
    """The generation config of a call, in which the `resolved` fields read as unset.

    A plain copy would not do: transformers fills unset fields from the model's own config.
    """

    resolved: frozenset[str] = frozenset()
    use_mtp = _Field()
    token_healing = _Field()
    stop_strings = _Field()
    cache_implementation = _Field()

    @classmethod
    def of(cls, config: GenerationConfig | None, resolved: Iterable[str]) -> ResolvedConfig:
        """Return a copy of a config (of None: of an empty one)."""
        made = cls()
        vars(made).update(copy.deepcopy(vars(config or GenerationConfig())))
        made.resolved = frozenset(resolved)
        return made


def add_cache(
    call: dict[str, Any], config: GenerationConfig, backbone: PreTrainedModel, new_cache: Callable[[], SpeculativeCache]
) -> set[str]:
    """Pass a cache of the backbone's own class, where the call starts with an empty one; return the resolved fields."""
    if config.use_cache is False or call.get(CACHE) is not None:
        return set()
    call[CACHE] = cache = new_cache()
    if config.is_assistant:
        cache.activate_past_recording()
    if config.cache_implementation is None:
        return set()
    if config.cache_implementation != "dynamic":
        logger.warning_once(
            f"cache_implementation={config.cache_implementation!r} is ignored: {type(backbone).__name__} has a cache "
            "of its own."
        )
    return {"cache_implementation"}


def resolve_tokenizer(call: dict[str, Any], config: GenerationConfig, backbone: PreTrainedModel) -> set[str]:
    """Apply the fields that need the tokenizer, which transformers drops for a callable; return the resolved fields."""
    tokenizer, resolved = call["tokenizer"], set()
    if config.stop_strings is not None:
        stop = StopStringCriteria(tokenizer, config.stop_strings)
        call["stopping_criteria"] = StoppingCriteriaList([stop, *(call.get("stopping_criteria") or ())])
        resolved.add("stop_strings")
    name = "inputs" if call.get("inputs") is not None else "input_ids"
    if config.token_healing and isinstance(ids := call.get(name), Tensor):
        if call.get("attention_mask") is None:
            call["attention_mask"] = _mask_of(ids, config)
        call[name] = backbone.heal_tokens(ids, tokenizer)
        resolved.add("token_healing")
    return resolved


def _mask_of(ids: Tensor, config: GenerationConfig) -> Tensor:
    """Return the mask that transformers infers from padding ids; healing replaces bos by padding."""
    pad, eos = config.pad_token_id, config.eos_token_id
    is_eos = pad in (eos if isinstance(eos, (list, tuple)) else [eos])
    return torch.ones_like(ids) if pad is None or is_eos else ids.ne(pad).long()


def with_resolved(call: dict[str, Any], resolved: set[str]) -> dict[str, Any]:
    """Return a call whose config shows these fields as unset."""
    passed = call.get("generation_config")
    config = ResolvedConfig.of(passed, resolved)
    fields = {name: value for name, value in call.items() if name not in NOT_CONFIG}
    if passed is None:  # beside a config, transformers warns of fields in keyword arguments
        unset = {name for name, value in fields.items() if value is None}  # only a keyword argument keeps a field so
        fields = unset | config.update(**{name: fields[name] for name in fields.keys() - unset}).keys()
    others = {name: value for name, value in call.items() if name in NOT_CONFIG or name in fields}
    return others | {"generation_config": config}
