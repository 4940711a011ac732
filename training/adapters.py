"""Adapters of peft that a strategy puts on a backbone, and those that a backbone carries before."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..modeling.wrapped_models import carries_adapters
from .strategy import TrainingStrategy

_QUERIES = ("q_proj", "k_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn")
_RANK, _DROPOUT = 8, 0.0


def learn_by_adapters(backbone: PreTrainedModel, strategy: TrainingStrategy) -> None:
    """Has a backbone learn by adapters: new ones, or those that it carries.

    Raises:
        ValueError: Adapters that are there and cannot go on, or are others than the strategy says.
    """
    if not carries_adapters(backbone):
        backbone.add_adapter(lora_config(backbone, strategy))
        return
    if not getattr(backbone, "_hf_peft_config_loaded", False):
        raise ValueError(
            "train='lora': the backbone carries adapters in a wrapper of peft, and a second pair would be drawn over "
            "them; merge_and_unload() them, or put them on the plain backbone with backbone.load_adapter(directory)"
        )
    names = backbone.active_adapters()
    for name in names:
        _check_same(backbone, backbone.peft_config[name], strategy)
    backbone.set_adapter(names)  # which lets those learn that were loaded to be used


def check_no_adapters(model: nn.Module, what: str, strategy: TrainingStrategy) -> None:
    """Refuses to train a model all of whose weights learn, or that gets adapters, where it carries some.

    Args:
        model: The model.
        what: What it is called in messages.
        strategy: What was asked for.

    Raises:
        ValueError: It carries adapters.
    """
    if carries_adapters(model):
        why = "saved would be these alone" if strategy.train == "all" else "further ones would be drawn over them"
        raise ValueError(
            f"train={strategy.train!r}: the {what} carries adapters of peft, and {why}; merge_and_unload() them first"
        )


def lora_config(model: nn.Module, strategy: TrainingStrategy, drafter: str | None = None) -> Any:
    """The config of the backbone's adapters; the drafter has none, and learns as a whole.

    Args:
        model: The backbone, or the model that holds it.
        strategy: Its `lora_` fields are read.
        drafter: The drafter's name in the model, if it lies there.

    Raises:
        ValueError: `lora_targets` that the model does not have.
    """
    from peft import LoraConfig

    names = _linear(model)
    targets = strategy.lora_targets or [name for name in _QUERIES if name in names] or "all-linear"
    missing = [name for name in targets if isinstance(targets, list) and _last(name) not in names]
    if missing:
        raise ValueError(f"lora_targets holds {missing[0]!r}, but the linear modules are {', '.join(sorted(names))}")
    rank = strategy.lora_rank or _RANK
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank if strategy.lora_alpha is None else strategy.lora_alpha,
        lora_dropout=_DROPOUT if strategy.lora_dropout is None else strategy.lora_dropout,
        target_modules=targets,
        exclude_modules=None if drafter is None else rf"(.*\.)?{drafter}(\..*)?",
        modules_to_save=None if drafter is None else [drafter],
    )


def _check_same(backbone: PreTrainedModel, there: Any, strategy: TrainingStrategy) -> None:
    """Refuses fields of a strategy that differ from the adapters that are there, and would be ignored."""
    adapted = {_last(name) for name, module in backbone.named_modules() if hasattr(module, "base_layer")}
    asked = {
        "lora_rank": (strategy.lora_rank, getattr(there, "r", None)),
        "lora_alpha": (strategy.lora_alpha, getattr(there, "lora_alpha", None)),
        "lora_dropout": (strategy.lora_dropout, getattr(there, "lora_dropout", None)),
        "lora_targets": (_asked_for(backbone, strategy.lora_targets), adapted),
    }
    for name, (wanted, found) in asked.items():
        if wanted is not None and wanted != found:
            shown = ", ".join(sorted(found)) if isinstance(found, set) else found
            raise ValueError(
                f"{name}={getattr(strategy, name)!r}: the adapters that the backbone carries have {shown}, and go on; "
                f"leave {name} out"
            )


def _asked_for(backbone: PreTrainedModel, targets: list[str] | str | None) -> set[str] | None:
    """Last names of what targets of peft mean: a list of names, `"all-linear"`, or a pattern."""
    if targets == "all-linear":
        return _linear(backbone) - _unembedding(backbone)
    if isinstance(targets, str):
        names = [name for name, _ in backbone.named_modules() if ".lora_" not in name and ".base_layer" not in name]
        return {_last(name) for name in names if re.fullmatch(targets, name)}
    return targets and {*map(_last, targets)}


def _linear(model: nn.Module) -> set[str]:
    """Last names of the linear maps of a model, with adapters on them or not."""
    layers = dict(model.named_modules())
    adapted = {name for name, module in layers.items() if hasattr(module, "base_layer")}
    found = {name for name, module in layers.items() if isinstance(module, nn.Linear)}
    plain = {name for name in found if not any(name.startswith(f"{each}.") for each in adapted)}
    return {*map(_last, adapted | plain)}


def _unembedding(backbone: PreTrainedModel) -> set[str]:
    """What peft leaves out of `"all-linear"`."""
    head = backbone.get_output_embeddings()
    return {_last(name) for name, module in backbone.named_modules() if module is head}


def _last(name: str) -> str:
    return name.rpartition(".")[2]
