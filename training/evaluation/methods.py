"""Methods by name: drafters of this library and transformers' own, for one model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...generation.assistant.drafter import AssistantDrafter
from ...generation.attach import MTPGenerationMixin
from ...generation.backbone.wrapped_models import Kwargs, carries_adapters
from ...generation.lookups.cascade import DrafterCascade
from ...generation.lookups.lookahead import LookaheadDrafter
from ...generation.lookups.ngram import NgramDrafter
from ...generation.lookups.recycling import RecyclingDrafter
from ...generation.lookups.suffix import SuffixDrafter
from ...generation.tensors.tensor_files import check_index
from ..loading import load_drafter
from ..results import source_mark
from ..utils import one_line
from .bench import PLAIN
from .decoding import Method

_ALONE = ("auto", "heads", "eagle", "block", "student")
"""Kinds whose figures are those of the drafter in their source."""
_WITH_SOURCE = (*_ALONE, "assistant", "cascade", "transformers:assistant")
_IGNORE = "ignore_fields"
_UNTRAINED: dict[str, Any] = {
    "ngram": NgramDrafter, "suffix": SuffixDrafter, "recycling": RecyclingDrafter, "lookahead": LookaheadDrafter
}  # fmt: skip
_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("own", "ngram", "suffix", "recycling"), ()),
    "lookahead": ("window", "ngram_size", "candidates"),
    "assistant": (),
    **dict.fromkeys(("auto", "heads", "student"), (_IGNORE,)),
    "eagle": (_IGNORE, "aux_layers"),
    "block": (_IGNORE, "feature_layers", "sample_from_anchor", "block_size"),
    "cascade": (_IGNORE, "least", "joins"),
    **dict.fromkeys(("transformers:prompt_lookup", "transformers:assistant", "transformers:use_mtp"), ()),
}
"""By kind, options of the drafter, and not of `generate`."""
_SPEC = re.compile(r"(?:(?P<name>[^=:?]+)=)?(?P<kind>(?:transformers:)?\w+)(?::(?P<source>[^?]+))?(?:\?(?P<query>.*))?")
_UNFIT = (ValueError, TypeError, OSError, RuntimeError, NotImplementedError, StrictDataclassError)
"""What says that a drafter does not fit, or is damaged."""


def plain_method(model: PreTrainedModel) -> Method:
    """Return decoding without drafts."""
    return Method(PLAIN, model, {"use_mtp": False} if isinstance(model, MTPGenerationMixin) else {})


def drafting_method(name: str, model: Any, drafter: Any = None, **options: Any) -> Method:
    """Return decoding with the drafts of an attached drafter, or with those of the model itself."""
    if drafter is None:
        return Method(name, model, options, model)
    return Method(name, model, {"assistant_model": drafter} | options, drafter)


def methods_of(specs: Sequence[str], model: PreTrainedModel) -> tuple[list[Method], dict[str, str]]:
    """Return plain decoding and the requested methods of a backbone, and why others do not fit.

    `specs` are `[NAME=]KIND[:SOURCE][?OPTION=VALUE&...]`, with options of `generate`. Kinds: `plain`, `own` (a model
    that drafts for itself), `auto:SOURCE` (any trained drafter, in any layout), `cascade:SOURCE` (suffixes, and such a
    drafter where these are not sure), and the others of `_KINDS`.
    """
    methods, refused = [plain_method(model)], dict[str, str]()
    for spec in specs:
        if spec == PLAIN:
            continue
        name, kind, source, options = _parsed(spec, "--methods")
        if name in refused or any(name == method.name for method in methods):
            raise ValueError(f"--methods {spec}: there are two of the name {name!r}; write NAME={spec}")
        try:
            method = _method(name, kind, source, options, model, "--methods")
            whole = model.name_or_path if kind == "own" and not carries_adapters(model) else ""
            measured = source if kind in _ALONE else whole
            methods.append(replace(method, source=source_mark(measured) if measured else None))
        except _UNFIT as error:
            refused[name] = one_line(error)
    return methods, refused


def named_method(spec: str, model: PreTrainedModel) -> Method:
    """Return one requested method, of those that draft with this library, for a backbone; see `methods_of`."""
    # `--heads SOURCE` is short for `auto:SOURCE`
    option, named = ("--heads", spec.removeprefix("auto:")) if spec.startswith("auto:") else ("--drafter", spec)
    source = ""
    try:
        name, kind, source, options = _parsed(spec, option)
        if ":" in kind:
            raise ValueError("its drafts cannot be watched")
        return _method(name, kind, source, options, model, option, shared=False)
    except _UNFIT as error:
        words = one_line(error).removeprefix(f"{source}: ")
        words = words if words.startswith(option) else f"{option} {named}: {words}"
        raise (OSError if isinstance(error, OSError) else ValueError)(words) from error


def _parsed(spec: str, option: str) -> tuple[str, str, str, Kwargs]:
    match = _SPEC.fullmatch(spec)
    kind = "" if match is None else match["kind"]
    if match is None or kind not in _KINDS or (kind != "suffix" and bool(match["source"]) != (kind in _WITH_SOURCE)):
        kinds = ", ".join(f"{each}:SOURCE" if each in _WITH_SOURCE else each for each in (PLAIN, *_KINDS))
        raise ValueError(f"{option} {spec}: choose of {kinds}")
    source, options = match["source"] or "", dict[str, Any]()
    for key, text in parse_qsl(match["query"] or "", strict_parsing=bool(match["query"])):
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    usual = ":".join(word for word in (kind, Path(source).name) if word)
    return match["name"] or usual + (f"?{match['query']}" if options else ""), kind, source, options


def _method(name: str, kind: str, source: str, options: Kwargs, model: Any, option: str, shared: bool = True) -> Method:
    """Return a method; `option` names it in messages, and of a `shared` backbone others are measured, too."""
    drafts_itself = isinstance(model, MTPGenerationMixin)
    own = {key: options.pop(key) for key in _KINDS[kind] if key in options}
    match kind:
        case "own":
            if not drafts_itself:
                raise ValueError(f"a {type(model).__name__} does not draft for itself")
            return drafting_method(name, model, **{"use_mtp": True} | options)
        case "transformers:use_mtp":
            if drafts_itself:
                raise ValueError(f"{type(model).__name__} has no use_mtp of transformers'; measure its drafts as 'own'")
            return Method(name, model, {"use_mtp": True} | options, is_foreign=True)
        case "transformers:prompt_lookup":
            return Method(name, model, {"prompt_lookup_num_tokens": 10} | options, is_foreign=True)
        case "transformers:assistant":
            check_index(source)
            assistant = AutoModelForCausalLM.from_pretrained(source, dtype=model.dtype).to(model.device).eval()
            assistant.generation_config.update(**options)
            return Method(name, model, {"assistant_model": assistant}, is_foreign=True)
        case "suffix" if source:
            drafter = SuffixDrafter.from_pretrained(source)
        case "ngram" | "suffix" | "recycling" | "lookahead":
            drafter = _UNTRAINED[kind](**own)
        case "assistant":
            drafter = AssistantDrafter.from_pretrained(source, dtype=model.dtype, device_map=model.device)
        case "cascade":
            taken = {_IGNORE: own.pop(_IGNORE)} if _IGNORE in own else {}
            last = load_drafter(source, model, option, shared=True, **taken)
            drafter = DrafterCascade([SuffixDrafter(), last], **own)
        case _:
            drafter = load_drafter(source, model, option, None if kind == "auto" else kind, shared, **own)
            return drafting_method(name, model, drafter, **options)
    return drafting_method(name, model, drafter.attach(model), **options)
