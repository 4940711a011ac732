"""Whether a call drafts, and with which options."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from .call.options import GENERATE_KWARGS, CallOptions, Sources
from .drafter import BaseDrafter

logger = logging.get_logger(__name__)


def prepared_options(
    drafter: BaseDrafter, backbone: PreTrainedModel, own: dict[str, Any], sources: Sources, config: GenerationConfig
) -> CallOptions:
    """Return the options of a call, completed by the drafter (`BaseDrafter.prepare_call`).

    The backbone's own config may set trees, slots and the like for another of its drafters: one that cannot follow it
    warns, and ignores them. A drafter that is the backbone itself raises an error, as for arguments of the call.

    Args:
        drafter: Makes the drafts.
        backbone: The target model.
        own: See `CallOptions.read`.
        sources: See `CallOptions.read`.
        config: Of the call.

    Raises:
        ValueError: An option that is invalid, or that this kind of drafter does not have.
    """
    # as an assistant in transformers' own loop, the backbone is passed the config of its target
    left_out = GENERATE_KWARGS[1:] if getattr(sources[1], "is_assistant", None) else ()
    options = CallOptions.read(own, sources, left_out, drafter.assistant_config())
    if options.verification not in (None, *drafter.rules):
        rules = " or ".join(map(repr, drafter.rules))
        raise ValueError(f"verification={options.verification!r} is unknown; choose {rules}")
    try:
        return drafter.prepare_call(options, config)
    except ValueError as error:
        saved = _saved(own, sources)
        if drafter is backbone or not saved:
            raise
        options = drafter.prepare_call(CallOptions.read(own, sources, saved, drafter.assistant_config()), config)
        logger.warning_once(f"The generation_config of {type(backbone).__name__} is not followed in all: {error}")
        return options


def _saved(own: dict[str, Any], sources: Sources) -> tuple[str, ...]:
    """Return the options of drafts that the model's own config alone sets; a pipeline passes a copy of that config."""
    _, passed, of_model = sources
    names = [
        name for name in GENERATE_KWARGS[1:] if own.get(name) is None and getattr(of_model, name, None) is not None
    ]
    return tuple(name for name in names if getattr(passed, name, None) in (None, getattr(of_model, name)))
