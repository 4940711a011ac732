"""Ways of decoding, methods by name (drafters of this library, and transformers' own), and what one call took."""

# no `from __future__ import annotations`: @strict checks field types only where annotations are real types
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...configuration.cache_names import cache_of
from ...configuration.ptp import SAMPLING
from ...generation.assistant.drafter import AssistantDrafter
from ...generation.attach import MTPGenerationMixin
from ...generation.backbone.wrapped_models import Kwargs, carries_adapters
from ...generation.call.options import first_set
from ...generation.lookups.cascade import DrafterCascade
from ...generation.lookups.lookahead import LookaheadDrafter
from ...generation.lookups.ngram import NgramDrafter
from ...generation.lookups.recycling import RecyclingDrafter
from ...generation.lookups.suffix import SuffixDrafter
from ...generation.tensors.tensor_files import check_index
from ..loading import load_drafter
from ..results import Number, source_mark
from ..utils import eos_ids, one_line, until_end
from .drafts import GREEDY_RULE, SAMPLED, Batch, has_probs, usual_drafts

PLAIN, CONTROL = "plain", "plain, again"
"""Names of decoding without drafts, and of the same a second time."""
_FREE = ("verification", "num_assistant_tokens", "assistant_model", "use_mtp")
"""Options that do not change the output."""
_CHANGES = {"repetition_penalty", "no_repeat_ngram_size", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
            "bad_words_ids", "suppress_tokens", "sequence_bias", "min_length", "min_new_tokens",
            "num_assistant_tokens_schedule", "assistant_confidence_threshold"}  # fmt: skip
_ALONE = ("auto", "heads", "eagle", "block", "student")
"""Kinds whose figures are those of the drafter in their source."""
_WITH_SOURCE = (*_ALONE, "assistant", "cascade", "transformers:assistant")
_IGNORE = "ignore_fields"
UNTRAINED: dict[str, Any] = {
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


@dataclass(frozen=True)
class DecodingMode:
    """A way of decoding: its name in tables, and keyword arguments of `generate`."""

    name: str
    options: Kwargs

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are sampled; two runs then have the same distribution, not the same tokens."""
        return bool(self.options.get("do_sample"))

    @property
    def temperature(self) -> float:
        """Temperature of the samples; 0 for greedy decoding."""
        return float(self.options.get("temperature", 1.0)) if self.is_sampled else 0.0


def sampled(temperature: float) -> DecodingMode:
    """Return sampling from the whole distribution, whatever a model's own defaults are (transformers': `top_k=50`)."""
    options = {"do_sample": True} | SAMPLING | {"temperature": float(temperature)}
    return DecodingMode(f"sampled, T={temperature:g}", options)


GREEDY = DecodingMode("greedy", {"do_sample": False})
"""The most probable token at every position."""
MODES = (GREEDY, sampled(0.7), sampled(1.0))
"""The ways of decoding in every report."""


def named_mode(words: str) -> DecodingMode:
    """Return the mode of `"greedy"`, or of `"T=0.7"`."""
    match = re.fullmatch(r"T=(\d+(?:\.\d+)?)", words)
    if words != "greedy" and (match is None or float(match[1]) == 0):
        raise ValueError(f"decoding={words!r} must be 'greedy', or a temperature above 0 such as 'T=0.7'")
    return sampled(float(match[1])) if match else GREEDY


@dataclass(frozen=True)
class Method:
    """A model whose `generate` is called with `options`, and the drafter, where this library drafts.

    `is_foreign`: transformers' own `generate` is called, past attached drafters. `source`: what drafts, as
    `source_mark` says it.
    """

    name: str
    model: Any
    options: Kwargs = field(default_factory=dict)
    drafter: Any = None
    is_foreign: bool = False
    source: str | None = None

    def generate(self, **kwargs: Any) -> Any:
        """Call `generate` with the method's options."""
        call = type(self.model).generate.__get__(self.model) if self.is_foreign else self.model.generate
        return call(**self.options | kwargs, return_dict_in_generate=True)

    def expectation(self, mode: DecodingMode) -> tuple[str, int] | None:
        """Return the rule and the draft length of expected calls along an output; None where they are unknown."""
        config, options = self.model.generation_config, self.options | mode.options
        plain, (rule, *others) = (sampled(mode.temperature), SAMPLED) if mode.is_sampled else (GREEDY, GREEDY_RULE)
        rule = options.get("verification", rule) if others else rule
        is_changed = {name: value for name, value in options.items() if name not in _FREE} != plain.options
        is_changed |= bool(config.to_diff_dict().keys() & _CHANGES)
        if is_changed or rule not in (*SAMPLED, *GREEDY_RULE) or not has_probs(self.drafter):
            return None
        length = first_set("num_assistant_tokens", (self.options, config))
        bound = self.drafter.longest_draft()
        return rule, usual_drafts(self.drafter) if length is None else min(length, bound or length)


@strict
@dataclass(kw_only=True)
class Row:
    """What a method took, and wrote after the prompts of one call of `generate`; the first six are a bench's."""

    method: str = ""
    prompts: list[str] = field(default_factory=list)  # names of the group
    category: str = ""  # of its prompts
    mode: str = ""
    batch_size: int = 1
    turn: int = 0  # of the prompts, from 0
    ids: list[list[int]] = field(default_factory=list)  # new ids of each sequence
    calls: list[int] = field(default_factory=list)  # of the backbone that served each, that of the prompt included
    forwards: int = 0  # of the backbone
    seconds: Number = 0.0  # wall-clock time
    prompt_seconds: Number = 0.0  # of the prompt's own call
    draft_seconds: Number | None = None  # of drafting; None where it was not measured
    processor_seconds: Number = 0.0  # of all threads
    cache_bytes: int = 0  # at the end
    accepted: list[list[int]] = field(default_factory=list)  # drafts by sequence and verification; empty: not counted
    drafted: list[list[int]] = field(default_factory=list)  # tokens of the same
    differences: list[dict[str, Any] | None] = field(default_factory=list)  # from greedy plain outputs; None: equal
    expected: dict[str, list[Any]] | None = None  # `ExpectedCalls` along the outputs, as lists
    error: str | None = None  # why there is no output

    @property
    def place(self) -> tuple[object, ...]:
        """Where methods are compared: prompts, mode, batch size, and the turn."""
        return *self.prompts, self.mode, self.batch_size, self.turn

    @property
    def new_tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(map(len, self.ids))

    @property
    def later(self) -> tuple[int, float]:
        """New tokens after the prompt's own call, which adds one to each sequence, and their seconds."""
        return self.new_tokens - len(self.ids), self.seconds - self.prompt_seconds

    @property
    def speed(self) -> float | None:
        """Tokens per second after the prompt's own call; None if there are none."""
        tokens, seconds = self.later
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    @cached_property
    def repeated_share(self) -> float:
        """Mean share of the outputs that repeats itself."""
        return sum(map(repeated_share, self.ids)) / max(1, len(self.ids))


def decode(method: Method, batch: Batch, mode: DecodingMode, new_tokens: int, seed: int | None = None) -> Row:
    """Return the output of a method after a batch of prompts, and its cost; `seed=None` keeps the generator's state."""
    if seed is not None:
        torch.manual_seed(seed)
    model, starts, ends = method.model, list[float](), list[float]()  # of forwards; of the first one alone
    wait = torch.accelerator.synchronize if model.device.type != "cpu" else lambda: None

    def end(*_: object) -> None:
        if not ends:
            wait()
            ends.append(time.perf_counter())

    begin = model.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter()), prepend=True)
    with begin, model.register_forward_hook(end):
        wait()
        began, processor = time.perf_counter(), time.process_time()
        output = method.generate(**batch, **mode.options, max_new_tokens=new_tokens)
        wait()
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
    eos, count = eos_ids(model), len(starts)
    ids = [until_end(new, eos) for new in output.sequences[:, batch["input_ids"].shape[1] :].tolist()]
    row = Row(
        ids=ids,
        forwards=count,
        calls=[count if count < max(map(len, ids)) else len(each) for each in ids],
        seconds=seconds,
        prompt_seconds=ends[0] - starts[0] if ends else 0.0,
        processor_seconds=processor,
        cache_bytes=cache_bytes(cache_of(output)),
    )
    if (counted := getattr(output, "speculation", None)) is not None:
        row.forwards, row.calls = counted.backbone_calls, counted.rows_calls
        row.accepted, row.draft_seconds = counted.rows_accepted, counted.draft_seconds
        row.drafted = [list(map(len, drafts)) for drafts in counted.rows_drafts]
    return row


def cache_bytes(cache: object) -> int:
    """Return the bytes of the tensors in the layers of a cache."""
    tensors = [each for layer in getattr(cache, "layers", ()) for each in vars(layer).values()]
    storages = [each.untyped_storage() for each in tensors if isinstance(each, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def drafted_flags(accepted: list[int], count: int) -> list[bool]:
    """Return which of `count` new tokens were drafted and accepted.

    The prefill adds one token; each verification then gives its accepted drafts and one token of the verifier's own.
    The last verification may have been cut short: `drafted_flags([2, 0], 4)` is `[False, True, True, False]`.
    """
    flags = [False]
    for drafts in accepted:
        flags += [True] * drafts + [False]
    return flags[:count]


def repeated_share(ids: Sequence[int], gram: int = 16) -> float:
    """Return the share of a sequence that repeated passages of `gram` ids and short loops cover.

    A loop is a passage of less than `gram` ids that is followed by itself, so often that it fills a passage, or all of
    a sequence that is shorter.
    """
    starts_of: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - gram + 1):
        starts_of.setdefault(tuple(ids[start : start + gram]), []).append(start)
    covered = {start + i for starts in starts_of.values() if len(starts) > 1 for start in starts for i in range(gram)}
    for period in range(1, gram):
        least = max(min(gram, len(ids)), 2 * period)
        for is_same, group in groupby(range(len(ids) - period), lambda i: ids[i] == ids[i + period]):  # noqa: B023
            run = list(group)
            if is_same and len(run) + period >= least:
                covered.update(range(run[0], run[-1] + period + 1))
    return len(covered) / max(1, len(ids))


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
    own = {key: options.pop(key) for key in _KINDS[kind] if key in options}
    if kind in ("own", "transformers:use_mtp") and (kind == "own") != isinstance(model, MTPGenerationMixin):
        words = "does not draft for itself" if kind == "own" else "has no use_mtp of transformers'; measure it as 'own'"
        raise ValueError(f"a {type(model).__name__} {words}")
    match kind:
        case "own":
            return drafting_method(name, model, **{"use_mtp": True} | options)
        case "transformers:use_mtp":
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
            drafter = UNTRAINED[kind](**own)
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
