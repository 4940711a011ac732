"""What a directory for transformers' `custom_generate` runs; `model_cards.publish_generate` writes such directories."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ...configuration.transformers_names import warn_of_newer_version
from ...generation.attach import AttachableDrafter
from .loading import read_drafter

LOOK_UPS: dict[str, type[AttachableDrafter]] = {}
"""Classes of drafters without weights by name; the `generate.py` of a directory adds those that lie in it."""
_PREPARED = "logits_processor", "stopping_criteria", "generation_config", "use_cache"  # where this is no directory

warn_of_newer_version()


def generate(*args: Any, drafter: str | None = None, **kwargs: Any) -> object:
    """Decode with drafts: `generate` of transformers, with the same text in fewer calls of the model.

    Args:
        *args: The model, unless it is `model=`, and positional arguments of its `generate`.
        drafter: A look-up in this directory (`"ngram"`), or a trained drafter: its directory, or its name on the Hub.
            It is made or read once, and stays attached. None: the first look-up, unless there is an `assistant_model`.
        **kwargs: Of `generate` with a drafter: `num_assistant_tokens`, `draft_tree`, `verification`, ...
    """
    model, *inputs = [kwargs.pop("model"), *args] if "model" in kwargs else args
    if all(kwargs.get(name) is not None for name in _PREPARED):  # processors would be applied twice
        raise ValueError("custom_generate= takes the directory; call the function of it itself: generate(model, ...)")
    # where the directory holds the model, too, `from_pretrained` has put this function in the place of `generate`
    known, own = vars(model).setdefault("named_drafters", {}), vars(model).get("generate")
    if is_replaced := isinstance(own, partial):
        del model.generate
    try:
        if kwargs.get("assistant_model") is None:
            name = next(iter(LOOK_UPS), None) if drafter is None else str(drafter)
            if name not in known:
                known[name] = _made(name, model)
            kwargs["assistant_model"] = known[name].attach(model)
        return model.generate(*inputs, **kwargs)
    finally:
        if is_replaced:
            for each in known.values():
                each.detach()
            model.generate = own


def _made(name: str | None, model: Any) -> AttachableDrafter:
    if name in LOOK_UPS:
        return LOOK_UPS[name]()
    if name is None or ("/" not in name and not Path(name).is_dir()):
        raise ValueError(f"drafter={name!r}: choose of {[*LOOK_UPS]}, or name a directory, or owner/name on the Hub")
    return read_drafter(name, model.dtype, model)
