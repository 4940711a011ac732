"""What a directory for transformers' `custom_generate` runs; `model_cards.publish_generate` writes such directories.

transformers hands it the arguments of `generate` as they are. It attaches the drafter of a name and calls the model's
own `generate` with it: options and results are those of every call with an attached drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ...configuration.transformers_names import warn_of_newer_version
from ...generation.attach import AttachableDrafter
from .loading import read_drafter

LOOK_UPS: dict[str, Callable[[], AttachableDrafter]] = {}
"""Classes of drafters without weights by name; the `generate.py` of a directory adds those that lie in it."""
_PREPARED = ("logits_processor", "stopping_criteria", "generation_config", "use_cache")
"""Arguments that transformers passes to a function in place of a directory."""

warn_of_newer_version()


def generate(*args: Any, model: Any = None, drafter: str | None = None, **kwargs: Any) -> Any:
    """Decode with drafts: `generate` of transformers, with the same text in fewer calls of the model.

    Args:
        *args: The model, where it is no keyword argument, and positional arguments of its `generate`.
        model: Any causal language model of transformers.
        drafter: A look-up in this directory (`"ngram"`), or a trained drafter: its directory, or its name on the Hub.
            It is made or read once, and stays attached. None: the first look-up, unless there is an `assistant_model`.
        **kwargs: Of `generate` with a drafter: `num_assistant_tokens`, `draft_tree`, `verification`, ...
    """
    model, args = (args[0], args[1:]) if model is None else (model, args)
    if all(kwargs.get(name) is not None for name in _PREPARED):  # processors would be applied twice
        raise ValueError("custom_generate= takes the directory; call the function of it itself: generate(model, ...)")
    # where the directory holds the model, too, `from_pretrained` has put this function in the place of `generate`
    replaces, own = isinstance(vars(model).get("generate"), partial), vars(model).get("generate")
    if replaces:
        del model.generate
    try:
        if kwargs.get("assistant_model") is None:
            kwargs["assistant_model"] = _drafter_of(model, drafter).attach(model)
        return model.generate(*args, **kwargs)
    finally:
        if replaces:
            for each in vars(model).get("named_drafters", {}).values():
                each.detach()
            model.generate = own


def _drafter_of(model: PreTrainedModel, name: str | None) -> AttachableDrafter:
    """Return the drafter of a name for a model, always the same one."""
    known = vars(model).setdefault("named_drafters", {})
    name = str(next(iter(LOOK_UPS), "") if name is None else name)
    if name not in known:
        if name not in LOOK_UPS and "/" not in name and not Path(name).is_dir():
            choices = ", ".join([*LOOK_UPS, "a directory, or owner/name on the Hub"])
            raise ValueError(f"drafter={name!r}: choose of {choices}")
        known[name] = LOOK_UPS[name]() if name in LOOK_UPS else read_drafter(name, model.dtype, model)
    return known[name]
