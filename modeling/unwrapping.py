"""The model of transformers within what wraps it: adapters of peft, `torch.compile`."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel


def uncompiled(model: Any) -> Any:
    """The model that `torch.compile` has wrapped, or the model itself."""
    return getattr(model, "_orig_mod", model)


def unwrap(model: Any) -> PreTrainedModel:
    """The model within a PeftModel, within a compiled one, or the model itself.

    Raises:
        TypeError: There is none: no module with a configuration.
    """
    within = uncompiled(model)
    if hasattr(within, "peft_config") and callable(getattr(within, "get_base_model", None)):
        within = uncompiled(within.get_base_model())
    if not isinstance(within, nn.Module) or not hasattr(within, "config"):
        raise TypeError(
            f"a {type(within).__name__} is no model of transformers that could be drafted for; give a PreTrainedModel, "
            "or a PeftModel around one"
        )
    return within
