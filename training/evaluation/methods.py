"""Methods by name: drafters of this library and transformers' own, for one model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...generation.assistant.drafter import AssistantDrafter
from ...generation.attach import AttachableDrafter, MTPGenerationMixin
from ...generation.lookups.cascade import DrafterCascade
from ...generation.lookups.lookahead import LookaheadDrafter
from ...generation.lookups.ngram import NgramDrafter
from ...generation.lookups.recycling import RecyclingDrafter
from ...generation.lookups.suffix import SuffixDrafter
from ...generation.tensors.tensor_files import check_index
from ...generation.tensors.wrapped_models import Kwargs, carries_adapters
from ..loading import load_drafter
from ..results import source_mark
from ..utils import one_line
from .bench import PLAIN
from .decoding import Method

_IGNORE = "ignore_fields"
_SPEC = re.compile(r"(?:(?P<name>[^=:?]+)=)?(?P<kind>(?:transformers:)?\w+)(?::(?P<source>[^?]+))?(?:\?(?P<query>.*))?")


def plain_method(model: Any) -> Method:
    """Return decoding without drafts."""
    return Method(PLAIN, model, {"use_mtp": False} if isinstance(model, MTPGenerationMixin) else {})


def drafting_method(name: str, model: Any, drafter: Any = None, **options: Any) -> Method:
    """Return decoding with the drafts of an attached drafter, or with those of the model itself."""
    if drafter is None:
        return Method(name, model, options, model)
    return Method(name, model, {"assistant_model": drafter} | options, drafter)


def methods_of(specs: Sequence[str], model: PreTrainedModel) -> tuple[list[Method], dict[str, str]]:
    """Return plain decoding and the requested methods, and why others do not fit.

    Args:
        specs: `[NAME=]KIND[:SOURCE][?OPTION=VALUE&...]`, with options of `generate`. Kinds: `plain`, `own` (a model
            that drafts for itself), `ngram`, `suffix[:SOURCE]`, `recycling`, `lookahead`, `assistant:SOURCE`,
            `heads:SOURCE`, `eagle:SOURCE`, `block:SOURCE`, `student:SOURCE`, `auto:SOURCE` (any of these, in any
            layout), `cascade:SOURCE` (suffixes, and such heads where these are not sure), `transformers:prompt_lookup`,
            `transformers:assistant:SOURCE`, `transformers:use_mtp`.
        model: The backbone; drafters are attached to it.

    Raises:
        ValueError: No kind of method, or two of one name.
    """
    methods, refused = [plain_method(model)], {}
    marks: dict[str, str] = {}
    for spec in specs:
        if spec == PLAIN:
            continue
        name, kind, source, options = _parsed(spec)
        if name in refused or any(name == method.name for method in methods):
            raise ValueError(f"--methods {spec}: there are two of the name {name!r}; write NAME={spec}")
        try:
            method = _method(name, kind, model, source, options)
            whole = model.name_or_path if kind == "own" and not carries_adapters(model) else ""
            if measured := source if kind in _ALONE else whole:
                marks[measured] = marks.get(measured) or source_mark(measured)
            methods.append(replace(method, source=marks.get(measured or "")))
        except _UNFIT as error:
            refused[name] = one_line(error)
    return methods, refused


def named_method(spec: str, model: PreTrainedModel) -> Method:
    """Return one requested method, of those that draft with this library; see `methods_of`.

    Args:
        spec: `[NAME=]KIND[:SOURCE][?OPTION=VALUE&...]`.
        model: The backbone; the drafter is attached to it.

    Raises:
        ValueError: No kind of drafter, or one that does not fit.
        OSError: What neither a directory nor the Hub gives.
    """
    of_any = spec.startswith("auto:")  # `--heads SOURCE` is short for it
    option, named = ("--heads", spec.removeprefix("auto:")) if of_any else ("--drafter", spec)
    source = ""
    try:
        name, kind, source, options = (PLAIN, PLAIN, "", {}) if spec == PLAIN else _parsed(spec)
        if kind in _ALONE:  # nobody else uses the backbone
            options["shared"] = False
        method = plain_method(model) if kind == PLAIN else _method(name, kind, model, source, options)
    except _UNFIT as error:
        words = one_line(error).replace(f"--methods {spec}", f"{option} {named}").replace("--methods", option)
        words = re.sub(rf"^{re.escape(source)}(?=:? )", lambda _: f"{option} {named}", words)  # the path once
        words = words if words.startswith("--") else f"{option} {named}: {words}"
        raise (OSError if isinstance(error, OSError) else ValueError)(words) from error
    if method.drafter is None:
        raise ValueError(f"{option} {named}: its drafts cannot be watched")
    return method


def _parsed(spec: str) -> tuple[str, str, str, Kwargs]:
    match = _SPEC.fullmatch(spec)
    kind = "" if match is None else match["kind"]
    if match is not None and kind in _KINDS and (kind == "suffix" or bool(match["source"]) == (kind in _WITH_SOURCE)):
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


def _method(name: str, kind: str, model: Any, source: str, options: Kwargs) -> Method:
    drafts_itself = isinstance(model, MTPGenerationMixin)
    if kind == "own":
        if not drafts_itself:
            raise ValueError(f"a {type(model).__name__} does not draft for itself")
        return drafting_method(name, model, **{"use_mtp": True} | options)
    if kind in _DRAFTERS:
        return drafting_method(name, model, _DRAFTERS[kind](model, source, options), **options)
    if kind == "transformers:use_mtp" and drafts_itself:
        raise ValueError(f"{type(model).__name__} has no use_mtp of transformers'; measure its own drafts as 'own'")
    if kind == "transformers:assistant":
        check_index(source)
        assistant = AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype).to(model.device).eval()
        assistant.generation_config.update(**options)
        options = {"assistant_model": assistant}
    else:
        options = _FOREIGN[kind] | options
    return Method(name, model, options, is_foreign=True)


def _trained(kind: str | None, *own: str) -> Callable[..., AttachableDrafter]:
    """Return a maker of drafters of a kind; None: any. `own` are options of its loading, and not of `generate`."""

    def load(model: PreTrainedModel, source: str, options: Kwargs) -> AttachableDrafter:
        taken = {name: options.pop(name) for name in (*own, _IGNORE) if name in options}
        return load_drafter(source, model, "--methods", kind, options.pop("shared", True), **taken)

    return load


def _suffix(model: PreTrainedModel, source: str, options: Kwargs) -> SuffixDrafter:
    return (SuffixDrafter.from_pretrained(source) if source else SuffixDrafter()).attach(model)


def _lookahead(model: PreTrainedModel, source: str, options: Kwargs) -> LookaheadDrafter:
    own = {name: options.pop(name) for name in ("window", "ngram_size", "candidates") if name in options}
    return LookaheadDrafter(**own).attach(model)


def _cascade(model: PreTrainedModel, source: str, options: Kwargs) -> DrafterCascade:
    own = {name: options.pop(name) for name in ("least", "joins") if name in options}
    taken = {_IGNORE: options.pop(_IGNORE)} if _IGNORE in options else {}
    last = load_drafter(source, model, "--methods", shared=True, **taken)
    return DrafterCascade([SuffixDrafter(), last], **own).attach(model)


def _assistant(model: PreTrainedModel, source: str, options: Kwargs) -> AssistantDrafter:
    return AssistantDrafter.from_pretrained(source, dtype=model.dtype, device_map=model.device).attach(model)


_UNFIT = (ValueError, TypeError, OSError, RuntimeError, NotImplementedError, StrictDataclassError)
"""What says that a drafter does not fit, or is damaged."""
_DRAFTERS: dict[str, Callable[..., Any]] = {
    "ngram": lambda model, source, options: NgramDrafter(branches=options.pop("branches", 1)).attach(model),
    "suffix": _suffix,
    "recycling": lambda model, source, options: RecyclingDrafter().attach(model),
    "lookahead": _lookahead,
    "assistant": _assistant,
    "auto": _trained(None),
    "heads": _trained("heads"),
    "eagle": _trained("eagle", "aux_layers"),
    "block": _trained("block", "feature_layers", "sample_from_anchor", "block_size"),
    "student": _trained("student"),
    "cascade": _cascade,
}
"""By kind: from the backbone, a source and options of `generate` to an attached drafter of this library."""
_FOREIGN = {
    "transformers:prompt_lookup": {"prompt_lookup_num_tokens": 10},
    "transformers:assistant": {},
    "transformers:use_mtp": {"use_mtp": True},
}
"""Options with which transformers itself drafts."""
_KINDS = ("own", *_DRAFTERS, *_FOREIGN)
_ALONE = ("auto", "heads", "eagle", "block", "student")
"""Kinds whose figures are those of the drafter in their source."""
_WITH_SOURCE = ("assistant", "auto", "heads", "eagle", "block", "student", "cascade", "transformers:assistant")
