"""New modules for a model that has none: each starts as a copy of its last layer (of the modules' kind)."""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...configuration.mtp_families import MTPFamily, count_modules, family_of, num_layers, set_modules
from ..wrapped_models import sharing_copy, uncompiled, unwrap
from .checkpoint import PER_LAYER, extended_class, extended_config, final_norm, main_class, module_kinds
from .modules import MTPModule, MTPModules, layer_kind
from .probe import check_backbone

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
        TypeError: Options of `from_pretrained` together with a model that is loaded already, or no model.
        ValueError: A model that is not supported, that has modules or adapters of its own, or an option out of range.
    """
    loads = isinstance(model_or_path, (str, PathLike))
    if options and not loads:
        raise TypeError(
            f"DeepSeekMTP.from_backbone takes num_modules and eh_init, and with a path options of from_pretrained; "
            f"with a model it has no option {', '.join(map(repr, options))}"
        )
    if num_modules < 1:
        raise ValueError(f"num_modules={num_modules} must be at least 1")
    if eh_init not in _SHARES:
        raise ValueError(f"eh_init={eh_init!r} is unknown; choose 'embedding', 'hidden' or 'both'")
    main = AutoModelForCausalLM.from_pretrained(model_or_path, **options) if loads else _copy(model_or_path)
    family = family_of(main.config)
    if type(main) is not main_class(main.config):
        raise ValueError(f"from_backbone needs a {main_class(main.config).__name__}, not a {type(main).__name__}")
    if not family.retrofit and count_modules(main.config):
        raise ValueError(
            f"{main.config.model_type} has modules of its own ({family.count}={count_modules(main.config)}): load them "
            f"with DeepSeekMTP.from_pretrained, or set config.{family.count}=0 first"
        )
    twin = _twin(main.config)
    set_modules(main.config, num_modules)
    decoder = main.get_decoder()
    modules = [_new_module(main, decoder.layers[twin], family, _SHARES[eh_init]) for _ in range(num_modules)]
    kinds = [layer_kind(main.config, twin)] * num_modules
    chain = MTPModules(modules, main.config, getattr(decoder, "rotary_emb", None), kinds)
    _check_shapes(main, chain)
    check_backbone(main, chain, decoder.layers[twin])
    return main.config, (main, chain)


def _copy(model: Any) -> PreTrainedModel:
    unwrap(model)
    return sharing_copy(uncompiled(model))  # which refuses a PeftModel by name


def _twin(config: PreTrainedConfig) -> int:
    """The last layer of the main model that is of a module's kind.

    Raises:
        ValueError: There is none.
    """
    fields = [name for name in PER_LAYER if getattr(config, name, None)]
    wanted = [module_kinds(config, name, 1)[0] for name in fields]
    for index in reversed(range(num_layers(config)) if family_of(config).has_twin else ()):
        if [getattr(config, name)[index] for name in fields] == wanted:
            return index
    raise ValueError(
        f"from_backbone does not support this {config.model_type}: its modules are unlike its last layer, and no other "
        "layer is like them"
    )


def _check_shapes(main: PreTrainedModel, modules: MTPModules) -> None:
    """Raises where a directory of these modules could not be read back, the next layer being unlike the copied one."""
    config = main.config
    with torch.device("meta"):
        extended = extended_class(config, 1, [])(extended_config(config, 1))
    fresh = extended.get_decoder().layers[-1].state_dict()
    ours = {name: tensor.shape for name, tensor in modules[0].block.state_dict().items()}
    theirs = {name: tensor.shape for name, tensor in fresh.items()}
    wrong = sorted(name for name in ours if theirs.get(name) != ours[name])
    if wrong:
        raise ValueError(
            f"from_backbone does not support this {config.model_type}: a further layer would have no {wrong[0]} "
            f"{tuple(ours[wrong[0]])}"
        )


def _new_module(main: PreTrainedModel, layer: nn.Module, family: MTPFamily, shares: tuple[float, float]) -> MTPModule:
    last = final_norm(main.get_decoder())
    weight, size = last.weight, main.config.hidden_size
    enorm, hnorm = _unit_norm(main, last), _unit_norm(main, last)
    eh_proj = nn.Linear(2 * size, size, bias=False, device=weight.device, dtype=main.dtype)
    halves = [share * torch.eye(size) for share in (shares if family.embedding_first else shares[::-1])]
    with torch.no_grad():
        eh_proj.weight.copy_(torch.cat(halves, dim=1))
    norm = copy.deepcopy(last) if family.norm_before_head else nn.Identity()
    return MTPModule(enorm, hnorm, eh_proj, copy.deepcopy(layer), norm, family.embedding_first)


@torch.no_grad()
def _unit_norm(main: PreTrainedModel, norm: nn.Module) -> nn.Module:
    """A norm of the same class with gain 1, however that class writes it (Gemma's gain is 1 + weight)."""
    norm = copy.deepcopy(norm)
    for owner in (norm, *norm.parameters()):
        owner._is_hf_initialized = False
    main._init_weights(norm)
    return norm
