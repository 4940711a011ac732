"""New modules for a model that has none: each starts as a copy of its last layer."""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...configuration.mtp_families import COUNT, MTPFamily, count_modules, family_of
from ..copies import sharing_copy
from .checkpoint import main_class
from .modules import MTPModule, MTPModules

_SHARES = {"embedding": (1.0, 0.0), "hidden": (0.0, 1.0), "both": (0.5, 0.5)}


def retrofit(
    model_or_path: PreTrainedModel | str | PathLike, num_modules: int, eh_init: str, **options: Any
) -> tuple[PreTrainedConfig, tuple[PreTrainedModel, MTPModules]]:
    """A main model and new modules for it: see `DeepSeekMTP.from_backbone`.

    Args:
        model_or_path: A causal language model of transformers, or where to load one from.
        num_modules: D.
        eh_init: `"embedding"`, `"hidden"` or `"both"`.
        options: As for `from_pretrained`, with a path.

    Returns:
        The configuration, and main model and modules.

    Raises:
        TypeError: Options of `from_pretrained` together with a model that is loaded already.
        ValueError: A model that is not supported, that has modules or adapters of its own, or an option out of range.
    """
    if options and isinstance(model_or_path, PreTrainedModel):
        raise TypeError(
            f"DeepSeekMTP.from_backbone takes num_modules and eh_init, and with a path options of from_pretrained; "
            f"with a model it has no option {', '.join(map(repr, options))}"
        )
    if num_modules < 1:
        raise ValueError(f"num_modules={num_modules} must be at least 1")
    if eh_init not in _SHARES:
        raise ValueError(f"eh_init={eh_init!r} is unknown; choose 'embedding', 'hidden' or 'both'")
    loads = isinstance(model_or_path, (str, PathLike))
    main = AutoModelForCausalLM.from_pretrained(model_or_path, **options) if loads else sharing_copy(model_or_path)
    family = family_of(main.config)
    if type(main) is not main_class(main.config):
        raise ValueError(f"from_backbone needs a {main_class(main.config).__name__}, not a {type(main).__name__}")
    if not (family.retrofit or family.copies):
        raise ValueError(
            f"from_backbone does not support {main.config.model_type}: its modules are unlike its last layer"
        )
    if not family.retrofit and count_modules(main.config):
        raise ValueError(
            f"{main.config.model_type} has modules of its own ({COUNT}={count_modules(main.config)}): load them with "
            f"DeepSeekMTP.from_pretrained, or set config.{COUNT}=0 first"
        )
    setattr(main.config, COUNT, num_modules)
    decoder = main.get_decoder()
    modules = [_new_module(main, family, _SHARES[eh_init]) for _ in range(num_modules)]
    return main.config, (main, MTPModules(modules, main.config, decoder.rotary_emb))


def _new_module(main: PreTrainedModel, family: MTPFamily, shares: tuple[float, float]) -> MTPModule:
    decoder = main.get_decoder()
    weight, size = decoder.norm.weight, main.config.hidden_size
    enorm, hnorm = _unit_norm(main, decoder.norm), _unit_norm(main, decoder.norm)
    eh_proj = nn.Linear(2 * size, size, bias=False, device=weight.device, dtype=main.dtype)
    halves = [share * torch.eye(size) for share in (shares if family.embedding_first else shares[::-1])]
    with torch.no_grad():
        eh_proj.weight.copy_(torch.cat(halves, dim=1))
    norm = copy.deepcopy(decoder.norm) if family.norm_before_head else nn.Identity()
    return MTPModule(enorm, hnorm, eh_proj, copy.deepcopy(decoder.layers[-1]), norm, family.embedding_first)


@torch.no_grad()
def _unit_norm(main: PreTrainedModel, norm: nn.Module) -> nn.Module:
    """A norm of the same class with gain 1, however that class writes it (Gemma's gain is 1 + weight)."""
    norm = copy.deepcopy(norm)
    for owner in (norm, *norm.parameters()):
        owner._is_hf_initialized = False
    main._init_weights(norm)
    return norm
