"""New modules for a model without any: each starts as a copy of its last layer (of the modules' kind).

Two calls with eight tokens then compare the backbone's own computation with ours: whatever a layer needs or does that a
module does not know would show as a difference.
"""

from __future__ import annotations

import copy
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...configuration.fields import field
from ...configuration.mtp_families import MTPFamily, count_modules, family_of, num_layers, set_modules
from ...generation.backbone.wrapped_models import Kwargs, sharing_copy, uncompiled, unwrap, whole_copy
from ...generation.tensors.tensor_files import check_index, hub_options
from ..common.backbone_parts import final_norm, layer_kind
from .conversion import (
    PER_LAYER,
    decoder_layers,
    extended_class,
    extended_config,
    fresh_norm,
    main_class,
    module_kinds,
    new_chain,
    rotate_all,
)
from .modules import LMHeadView, MTPModule, MTPModules, has_towers

_LENGTH, _PADDING = 8, 3
_SHARES = {"embedding": (1.0, 0.0), "hidden": (0.0, 1.0), "both": (0.5, 0.5)}


def retrofit(
    model_or_path: PreTrainedModel | str | PathLike, num_modules: int, eh_init: str, **options: Any
) -> tuple[PreTrainedConfig, tuple[PreTrainedModel, MTPModules]]:
    """Return a configuration, a main model and new modules for it: see `DeepSeekMTP.from_backbone`."""
    loads = isinstance(model_or_path, (str, PathLike))
    if options and not loads:
        raise TypeError(f"DeepSeekMTP.from_backbone with a model has no option {', '.join(map(repr, options))}")
    if num_modules < 1:
        raise ValueError(f"num_modules={num_modules} must be at least 1")
    if eh_init not in _SHARES:
        raise ValueError(f"eh_init={eh_init!r} is unknown; choose 'embedding', 'hidden' or 'both'")
    if loads:
        check_index(model_or_path, **hub_options(options))
        main = AutoModelForCausalLM.from_pretrained(model_or_path, **options)
    else:
        unwrap(model_or_path)  # refuses what is no model; `sharing_copy`, a PeftModel
        main = sharing_copy(uncompiled(model_or_path))
    family = family_of(main.config)
    if has_towers(main.config):
        raise ValueError(f"from_backbone does not support {type(main).__name__}: a model with a tower for images")
    if type(main) is not main_class(main.config):
        raise ValueError(f"from_backbone needs a {main_class(main.config).__name__}, not a {type(main).__name__}")
    if not family.retrofit and count_modules(main.config):
        own = f"{family.count}={count_modules(main.config)}"
        raise ValueError(f"{main.config.model_type} already has {own}: use from_pretrained, or set it to 0")
    twin = _twin(main.config)
    set_modules(main.config, num_modules)
    try:
        layer, kinds = decoder_layers(main)[twin], [layer_kind(main.config, twin)] * num_modules
        modules = [_new_module(main, layer, family, _SHARES[eh_init]) for _ in range(num_modules)]
        chain = new_chain(main, modules, kinds)
        check_backbone(main, chain, layer)
        _fit_to_files(main, chain)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise _refusal(main.config, f"its layers cannot be called apart ({error!r})") from error
    return main.config, (main, chain)


def _twin(config: PreTrainedConfig) -> int:
    """Return the index of the main model's last layer of the modules' kind."""
    wanted = {name: module_kinds(config, name, 1)[0] for name in PER_LAYER if field(config, name)}
    for index in reversed(range(num_layers(config)) if family_of(config).has_twin else ()):
        if all(field(config, name)[index] == kind for name, kind in wanted.items()):
            return index
    raise _refusal(config, "its modules are unlike its last layer, and no layer is like them")


def _refusal(config: PreTrainedConfig, reason: str) -> ValueError:
    return ValueError(f"from_backbone does not support this {config.model_type}: {reason}")


def _fit_to_files(main: PreTrainedModel, modules: MTPModules) -> None:
    """Give modules the constants of further layers; raise where what is saved would be another model when loaded."""
    config, layers = main.config, decoder_layers(main)
    with torch.device("meta"):
        extended = extended_class(config, modules.count, [])(extended_config(config, modules.count))
    if f"model.layers.{len(layers)}.eh_proj.weight" not in extended.state_dict():
        raise _refusal(config, "its layers are not model.layers.*, the names of modules in files")
    blocks = [*layers, *(module.block for module in modules)]
    for index, (own, further) in enumerate(zip(blocks, decoder_layers(extended))):
        theirs = {name: tensor.shape for name, tensor in further.state_dict().items()}
        wrong = sorted(name for name, tensor in own.state_dict().items() if theirs.get(name) != tensor.shape)
        for name, module in () if wrong else own.named_modules():
            mine, others = vars(module), vars(further.get_submodule(name)).items()
            constants = {key: value for key, value in others if type(value) is float}
            if index >= len(layers):
                mine.update(constants)  # some depend on the index of a layer
            wrong += [f"{name}.{key}" for key, value in constants.items() if mine.get(key) != value]
        if wrong:
            raise _refusal(config, f"with more layers, layer {index} would have another {wrong[0]}")


@torch.no_grad()
def _new_module(main: PreTrainedModel, layer: nn.Module, family: MTPFamily, shares: tuple[float, float]) -> MTPModule:
    last, size = final_norm(main.get_decoder()), main.config.hidden_size
    if not list(last.parameters()):
        raise _refusal(main.config, "its norms have no weights, and the norms of a module are copies of them")
    enorm, hnorm = fresh_norm(last), fresh_norm(last)
    for norm in (enorm, hnorm):
        main._init_weights(norm)  # gain 1, in that class's own form (Gemma's gain is 1 + weight)
    eh_proj = nn.Linear(2 * size, size, bias=False, device=next(last.parameters()).device, dtype=main.dtype)
    halves = [share * torch.eye(size) for share in (shares if family.embedding_first else shares[::-1])]
    eh_proj.weight.copy_(torch.cat(halves, dim=1))  # [H, 2 H]
    norm, block = copy.deepcopy(last) if family.norm_before_head else nn.Identity(), whole_copy(layer)
    if family.rotates:
        rotate_all(block)
    module = MTPModule(enorm, hnorm, eh_proj, block, norm)
    module.embedding_first, module.early = family.embedding_first, family.unnormed
    return module


@torch.no_grad()
def check_backbone(main: PreTrainedModel, modules: MTPModules, layer: nn.Module) -> None:
    """Compare the backbone's own calls with ours, without and with left padding; the first block copies `layer`."""
    if any(weight.device.type == "meta" for weight in main.parameters()):
        return  # offloaded weights cannot be compared
    ids = (torch.arange(2 * _LENGTH, device=main.device) * 7 % main.config.vocab_size).view(2, _LENGTH)
    embeds, was_training = main.get_input_embeddings()(ids), main.training
    seen: dict[str, Tensor] = {}
    main.eval()

    def remember(_: nn.Module, args: tuple[Tensor, ...], kwargs: Kwargs, output: Tensor | tuple[Tensor, ...]) -> None:
        seen["input"] = args[0] if args else kwargs["hidden_states"]
        seen["output"] = output[0] if isinstance(output, tuple) else output

    hook = layer.register_forward_hook(remember, with_kwargs=True)
    try:
        for padding in (0, _PADDING):
            mask = torch.ones_like(ids)
            mask[1, :padding] = 0
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)
            inputs = {"attention_mask": mask, "position_ids": position_ids, "use_cache": False}
            got = LMHeadView(main)(main.get_decoder()(inputs_embeds=embeds, **inputs).last_hidden_state)
            want = main(input_ids=ids, **inputs).logits
            _compare(main, "its logits are not what its head makes of its states", got, want, mask)
            copied = modules[0].run(seen["input"], **modules.options(0, seen["input"], position_ids, mask))
            _compare(main, "its layer, called apart, gives other states", copied, seen["output"], mask)
    finally:
        hook.remove()
        main.train(was_training)


def _compare(main: PreTrainedModel, what: str, got: Tensor, want: Tensor, mask: Tensor) -> None:
    real = mask.bool() & want.isfinite().all(-1)  # of padded rows, eager attention in float64 makes no numbers itself
    difference, largest = (each[real].abs().amax().item() if real.any() else 0.0 for each in (got - want, want))
    if not difference <= largest * (1e-5 if want.dtype == torch.float32 else 0.05):
        raise _refusal(main.config, f"{what} (off by {difference:.3g} of {largest:.3g})")
