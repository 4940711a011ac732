"""Methods by name: drafters of this library and transformers' own, for one model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from transformers import AutoModelForCausalLM, PreTrainedModel

from ...generation.attach import MTPGenerationMixin
from ...generation.drafters.assistant import AssistantDrafter
from ...generation.drafters.ngram import NgramDrafter
from ...generation.drafters.suffix import SuffixDrafter
from ...modeling import EagleHead, MTPHeads, PTPStudent
from ..loading import load_drafter
from .bench import PLAIN
from .decoding import Method

_SPEC = re.compile(r"(?:(?P<name>[^=:?]+)=)?(?P<kind>(?:transformers:)?\w+)(?::(?P<source>[^?]+))?(?:\?(?P<query>.*))?")
_LOOKED_UP = 10  # tokens of a draft of transformers' prompt lookup


def plain_method(model: Any) -> Method:
    """Return decoding without drafts."""
    return Method(PLAIN, model, {"use_mtp": False} if isinstance(model, MTPGenerationMixin) else {})


def drafting_method(name: str, model: Any, drafter: Any = None, **options: Any) -> Method:
    """Return decoding with the drafts of an attached drafter, or with those of the model itself."""
    if drafter is None:
        return Method(name, model, options, model)
    return Method(name, model, {"assistant_model": drafter} | options, drafter)


def methods_of(specs: Sequence[str], model: PreTrainedModel) -> tuple[list[Method], dict[str, str]]:
    """Return plain decoding and the methods that are asked for, and why others do not fit.

    Args:
        specs: `KIND[:SOURCE][?OPTION=VALUE&...]`, before which `NAME=` names the row. Options are those of `generate`.
            Kinds: `plain`, `own` (a model that drafts for itself), `ngram`, `suffix[:SOURCE]`, `assistant:SOURCE`,
            `heads:SOURCE`, `eagle:SOURCE`, `student:SOURCE`, `transformers:prompt_lookup`,
            `transformers:assistant:SOURCE`, `transformers:use_mtp`.
        model: The backbone; drafters are attached to it.

    Raises:
        ValueError: No kind of method, or two of one name.
    """
    methods, refused = [plain_method(model)], {}
    for spec in specs:
        if spec == PLAIN:
            continue
        name, kind, source, options = _parsed(spec)
        if name in refused or any(name == method.name for method in methods):
            raise ValueError(f"--methods {spec}: there are two of the name {name!r}; write NAME={spec}")
        try:
            methods.append(_KINDS[kind](name, model, source, options))
        except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
            refused[name] = " ".join(str(error).split()) or type(error).__name__
    return methods, refused


def _parsed(spec: str) -> tuple[str, str, str, dict[str, Any]]:
    match = _SPEC.fullmatch(spec)
    kind = "" if match is None else match["kind"]
    if match is not None and kind in _KINDS and bool(match["source"]) == (kind in _WITH_SOURCE):
        options = {
            key: _value(text) for key, text in parse_qsl(match["query"] or "", strict_parsing=bool(match["query"]))
        }
        source = match["source"] or ""
        usual = ":".join(word for word in (kind, Path(source).name) if word)
        return match["name"] or (f"{usual}?{match['query']}" if options else usual), kind, source, options
    kinds = ", ".join(f"{each}:SOURCE" if each in _WITH_SOURCE else each for each in ("plain", *_KINDS))
    raise ValueError(f"--methods {spec}: choose of {kinds}")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _own(name: str, model: Any, source: str, options: dict[str, Any]) -> Method:
    if not isinstance(model, MTPGenerationMixin):
        raise ValueError(f"a {type(model).__name__} does not draft for itself")
    return drafting_method(name, model, **{"use_mtp": True} | options)


def _ngram(name: str, model: Any, source: str, options: dict[str, Any]) -> Method:
    return drafting_method(name, model, NgramDrafter(branches=options.pop("branches", 1)).attach(model), **options)


def _suffix(name: str, model: Any, source: str, options: dict[str, Any]) -> Method:
    drafter = SuffixDrafter.from_pretrained(source) if source else SuffixDrafter()
    return drafting_method(name, model, drafter.attach(model), **options)


def _assistant(name: str, model: Any, source: str, options: dict[str, Any]) -> Method:
    drafter = AssistantDrafter.from_pretrained(source, dtype=model.dtype, device_map=model.device)
    return drafting_method(name, model, drafter.attach(model), **options)


def _trained(kind: Any) -> Callable[..., Method]:
    def load(name: str, model: Any, source: str, options: dict[str, Any]) -> Method:
        drafter = load_drafter(source, model, "--methods", kind.config_class, shared=True)
        return drafting_method(name, model, drafter, **options)

    return load


def _prompt_lookup(name: str, model: Any, source: str, options: dict[str, Any]) -> Method:
    return Method(name, model, {"prompt_lookup_num_tokens": _LOOKED_UP} | options, is_foreign=True)


def _theirs(name: str, model: Any, source: str, options: dict[str, Any]) -> Method:
    assistant = AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype).to(model.device).eval()
    assistant.generation_config.update(**options)
    return Method(name, model, {"assistant_model": assistant}, is_foreign=True)


def _use_mtp(name: str, model: Any, source: str, options: dict[str, Any]) -> Method:
    if isinstance(model, MTPGenerationMixin):
        raise ValueError(f"{type(model).__name__} has no use_mtp of transformers'; measure its own drafts as 'own'")
    return Method(name, model, {"use_mtp": True} | options, is_foreign=True)


_KINDS: dict[str, Callable[..., Method]] = {
    "own": _own,
    "ngram": _ngram,
    "suffix": _suffix,
    "assistant": _assistant,
    "heads": _trained(MTPHeads),
    "eagle": _trained(EagleHead),
    "student": _trained(PTPStudent),
    "transformers:prompt_lookup": _prompt_lookup,
    "transformers:assistant": _theirs,
    "transformers:use_mtp": _use_mtp,
}
_WITH_SOURCE = ("assistant", "heads", "eagle", "student", "transformers:assistant")
