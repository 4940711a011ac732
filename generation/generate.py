"""The entry of speculative decoding: transformers' own `generate`, with our loop as its decoding method.

    backbone.generate(..., assistant_model=head)        `attach.GeneratePatch`, or a model's own `generate`
      prepared_call(...)                                options parsed and validated once; plain calls pass unchanged
      type(backbone).generate(..., custom_generate=f)   transformers prepares prompt, masks, cache, processors, criteria
        f = partial(speculative_decoding, call)         carries what transformers drops for a callable
          SpeculativeLoop.run()                         or the model's own `_sample`, where drafts are not possible

For a callable, transformers drops the streamer, the tokenizer and `synced_gpus`. The first and the last travel in
`Call`; stop strings and token healing, which need the tokenizer, are resolved before the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import logging

from ..configuration.cache_names import CACHE, renamed
from ..configuration.fields import field
from .backbone.backbones import (
    can_roll_back,
    check_prompt,
    check_trees,
    check_user_cache,
    is_repackable,
    last_position_of_trials,
    obstacle,
    obstacle_to_blocks,
    takes_fixed_size,
    warn_of_unread,
)
from .backbone.static import planned_cache
from .call.keywords import USUAL, Keywords
from .call.options import GENERATE_KWARGS, CallOptions, DraftOptions
from .call.processing import counts_calls
from .call.resolved import NOT_CONFIG, PARAMETERS, add_cache, resolve_tokenizer, with_resolved
from .contract import SpeculativeCache
from .drafter import BaseDrafter
from .loop import SpeculativeLoop
from .plan import prepared_options
from .tensors.wrapped_models import checkpointing_paused, drop_peft_arguments, is_base, peft_arguments, readable
from .trees.choice import choose_tree

logger = logging.get_logger(__name__)
_DEPTH = 32
"""Deeper than any tree: drafts of the longest sequences go beyond the end, and slots follow drafts."""
TRIAL_OVERRIDES = {CACHE, "use_cache", "input_ids"}
"""Keyword arguments of the model that trials on the same prompt make for themselves."""
_SINGLE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass(frozen=True)
class Call:
    """One call of `generate`, as `speculative_decoding` receives it.

    Attributes:
        generate: The bound `generate` of the backbone's class, which trials of trees call, too.
        backbone: The target model.
        drafter: Makes the drafts.
        options: Parsed and validated.
        streamer: As passed to `generate`.
        synced_gpus: Whether every peer calls the backbone until all of them are done.
        has_user_cache: Whether the user passed the cache.
        new_cache: Makes a cache of the backbone's own class, if it has one.
    """

    generate: Callable[..., Any]
    backbone: PreTrainedModel
    drafter: BaseDrafter
    options: CallOptions
    streamer: BaseStreamer | None
    synced_gpus: bool
    has_user_cache: bool
    new_cache: Callable[[], SpeculativeCache] | None


def prepared_call(
    generate: Callable[..., Any],
    backbone: PreTrainedModel,
    drafter: BaseDrafter | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    new_cache: Callable[[], SpeculativeCache] | None = None,
) -> dict[str, Any]:
    """Parse the options of a call of `generate`, and return its keyword arguments for transformers' own.

    Args:
        generate: The bound `generate` that is called next.
        backbone: The target model.
        drafter: Makes the drafts; None: an assistant of transformers does, or nobody.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        new_cache: Makes a cache of the backbone's own class; None: it has caches of transformers.

    Raises:
        ValueError: An option, a prompt or a combination that is not supported; the message names it.
    """
    call = renamed(dict(zip(_names(generate, len(args)), args)) | kwargs)
    own = {name: call.pop(name) for name in GENERATE_KWARGS if name in call}
    sources = (call, call.get("generation_config"), backbone.generation_config)
    call |= {} if drafter is None else drafter.sampling_defaults(sources)
    fields = {name: value for name, value in call.items() if name not in NOT_CONFIG}
    config, model_kwargs = backbone._prepare_generation_config(call.get("generation_config"), **fields)
    if config.assistant_early_exit is not None:
        raise ValueError(
            f"assistant_early_exit={config.assistant_early_exit} is not offered here: it would cut the layers of "
            f"{type(backbone).__name__} in place; leave it out"
        )
    check_prompt(backbone, call, config, has_own_cache=new_cache is not None)
    resolved = {"use_mtp"} if config.use_mtp else set()
    config.use_mtp = False
    has_user_cache = call.get(CACHE) is not None
    check_user_cache(call, config)
    options = None
    if drafter is None or config.prompt_lookup_num_tokens:
        CallOptions.read(own, sources)
        _refuse_unread(own, config)
    elif call.get("custom_generate") is None:
        options = prepared_options(drafter, backbone, own, sources, config)
        options = _decided(options, drafter, backbone, config, model_kwargs, new_cache is not None)
    if new_cache is not None:
        resolved |= add_cache(call, config, backbone, new_cache)
    is_single = config.get_generation_mode() in _SINGLE
    # a cache of the backbone's own class drops padding in our callable, also where nothing is drafted
    if options is not None and is_single and (options.is_ours or new_cache is not None):
        if call.get("tokenizer") is not None:  # else transformers raises
            resolved |= resolve_tokenizer(call, config, backbone)
        if (synced := call.get("synced_gpus")) is None:  # as transformers decides for its own loops
            synced = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(backbone)
            synced = synced and torch.distributed.get_world_size() > 1
        state = Call(generate, backbone, drafter, options, call.get("streamer"), synced, has_user_cache, new_cache)
        call["custom_generate"] = partial(speculative_decoding, state)
    return with_resolved(call, resolved) if resolved else call


@contextmanager
def decoding(*models: nn.Module) -> Iterator[None]:
    """Let a backbone, and what drafts for it, use caches in train mode, though they checkpoint activations.

    An error leaves none of peft's hooks.
    """
    try:
        with torch.no_grad(), ExitStack() as stack:
            for model in models:
                stack.enter_context(checkpointing_paused(model))
            yield
    except BaseException:
        drop_peft_arguments(models[0])
        raise


def speculative_decoding(
    call: Call,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Any:
    """Decode with drafts: `generate` of transformers calls this as its decoding method, with prepared arguments.

    Raises:
        ValueError: `use_mtp=True`, a seed or uniforms were passed, and are not possible here.
    """
    options, cache, input_ids = call.options, model_kwargs.get(CACHE), input_ids.long()
    mask = model_kwargs.get("attention_mask")
    if mask is not None and isinstance(cache, SpeculativeCache):
        cache.drop_padding(mask)
    reason = keywords = None
    if options.is_ours:
        reason = _obstacle_in_call(options, model, input_ids, logits_processor, generation_config, model_kwargs)
        if _has_keywords(model, model_kwargs):
            keywords = Keywords(model, model_kwargs, input_ids, options.draft_tree is not None)
            reason = reason or keywords.reason or _obstacle_of_runner(call.drafter.runner, model, keywords)
            if keywords.is_prepared and _plans_static_cache(call, model, generation_config):
                reason = reason or "cache_implementation='static' beside prepare_inputs_for_generation"
    if reason is not None:
        _refuse_source(reason, options)
        _warn_or_refuse(reason, options)
    if reason is not None or not options.is_ours:
        common = input_ids, logits_processor, stopping_criteria, generation_config, call.synced_gpus, call.streamer
        return model._sample(*common, **model_kwargs)
    if options.draft_tree == "auto":
        options = _with_chosen_tree(call, generation_config, stopping_criteria, input_ids, model_kwargs)
    if _plans_static_cache(call, model, generation_config):
        has_singles = options.schedule == "adaptive" or not options.speculates
        model_kwargs[CACHE] = planned_cache(model, model_kwargs, generation_config, has_singles)
    made = DraftOptions.of_call(options, model, generation_config, logits_processor, input_ids)
    session = call.drafter.session(made)
    made.warn_of_threshold(session, type(call.drafter).__name__)
    schedule = call.drafter.schedule_of(session, made) if made.schedule == "adaptive" else None
    loop = SpeculativeLoop(
        model, call.drafter.runner(model), session, call.drafter.make_verifier(made, session), made, schedule,
        generation_config, stopping_criteria, model_kwargs, keywords,
        partial(_warn_or_refuse, options=options), call.streamer, call.has_user_cache,
    )  # fmt: skip
    with readable(model), call.drafter.running(model):
        output = loop.run(call.synced_gpus)
    if schedule is not None:
        call.drafter.remember(schedule, session, made)
    return output


def _names(generate: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Return the names of the first positional arguments of a `generate`."""
    if not count:
        return ()
    known = inspect.signature(generate).parameters.values()
    names = tuple(p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return (names if len(names) >= count else PARAMETERS)[:count]


def _decided(
    options: CallOptions,
    drafter: BaseDrafter,
    backbone: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    has_own_cache: bool,
) -> CallOptions:
    """Return the options with the decisions whether to draft, and how many tokens at most."""
    speculates = options.use_mtp is not False
    if speculates and drafter.longest_draft() == 0:
        speculates = False
        if options.use_mtp:
            logger.warning("use_mtp=True: the head has window 1 and drafts nothing; decoding one token at a time.")
    if speculates:
        reason = _reason_to_decode_plainly(drafter, backbone, config, model_kwargs, has_own_cache)
        if reason is None:
            warn_of_unread(config)
        else:
            _warn_or_refuse(reason, options)
            speculates = False
    if speculates and options.draft_tree is not None:
        check_trees(backbone)
    _refuse_source(obstacle(config, of_drafts=False), options)
    number = _draft_length(options.num_assistant_tokens, drafter)
    return replace(options, speculates=speculates, num_assistant_tokens=number)


def _reason_to_decode_plainly(
    drafter: BaseDrafter,
    backbone: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    has_own_cache: bool,
) -> str | None:
    cache = model_kwargs.get(CACHE)
    if isinstance(cache, StaticCache | EncoderDecoderCache):
        return f"{CACHE} of class {type(cache).__name__}"
    if not has_own_cache:
        if not is_repackable(cache, backbone.config) and not isinstance(cache, SpeculativeCache):
            return f"{CACHE} with layers that cannot be rolled back ({type(cache).__name__})"
        if not can_roll_back(backbone) or not backbone._supports_default_dynamic_cache():
            return f"the recurrent states of {type(backbone).__name__}, which cannot be rolled back after a rejection"
    crosses = field(backbone.config.get_text_config(), "cross_attention_layers")
    if crosses and model_kwargs.get("pixel_values") is not None:
        return "pixel_values, whose states cross attention puts in the cache"
    if drafter.reads_prompt and model_kwargs.get("inputs_embeds") is not None and model_kwargs.get("input_ids") is None:
        return "inputs_embeds without the input_ids of the prompt"
    if config.cache_implementation == "static" and (has_own_cache or not takes_fixed_size(backbone)):
        return "cache_implementation='static'"
    return obstacle(config) or drafter.obstacle(config, model_kwargs)


def _plans_static_cache(call: Call, model: PreTrainedModel, config: GenerationConfig) -> bool:
    """Return whether the call asks for a static cache on which drafts can be verified."""
    is_static = config.cache_implementation == "static" and not call.has_user_cache
    return is_static and takes_fixed_size(model)


def _obstacle_in_call(
    options: CallOptions,
    model: PreTrainedModel,
    input_ids: Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Return a reason against our loop that only transformers' preparation shows; None: there is none."""
    counting = next((processor for processor in processors if counts_calls(processor)), None)
    if counting is not None:
        return f"{type(counting).__name__}, which counts its calls"
    if "alora_offsets" in peft_arguments(model):
        return "activated adapters of peft, whose alora_offsets count from the end of every forward"
    embeds = model_kwargs.get("inputs_embeds")
    unwritten = 0 if embeds is None else embeds.shape[1] - input_ids.shape[1]
    if unwritten and options.draft_tree == "auto":
        return "draft_tree='auto' beside inputs_embeds"
    end = config.max_length + unwritten + 2 * max(options.num_assistant_tokens or 0, _DEPTH)
    return obstacle_to_blocks(model, model_kwargs, input_ids, end)


def _has_keywords(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> bool:
    """Return whether forwards after the prompt may need other keyword arguments than those of every model."""
    methods = model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation
    is_usual = all(is_base(cast(Callable[..., object], method)) for method in methods)
    return not is_usual or any(value is not None and name not in USUAL for name, value in model_kwargs.items())


def _obstacle_of_runner(runner: Callable[[Any], Any], model: PreTrainedModel, keywords: Keywords) -> str | None:
    """Return a keyword argument of the model's own forward, where another one runs its layers."""
    is_empty = not (keywords.constant or keywords.is_prepared)
    if is_empty or runner(model) is model:
        return None
    return f"{next(iter(keywords.constant), 'prepare_inputs_for_generation')}="


def _with_chosen_tree(
    call: Call,
    config: GenerationConfig,
    criteria: StoppingCriteriaList,
    input_ids: Tensor,
    model_kwargs: dict[str, Any],
) -> CallOptions:
    """Return the options with the tree that `draft_tree="auto"` finds by trials on this prompt."""

    def trial(drafter: BaseDrafter, prompt: Tensor, kwargs: dict[str, Any]) -> Any:
        return call.generate(**prepared_call(call.generate, call.backbone, drafter, (prompt,), kwargs, call.new_cache))

    common = {name: model_kwargs[name] for name in model_kwargs.keys() - TRIAL_OVERRIDES}
    common |= {"synced_gpus": call.synced_gpus}
    last = last_position_of_trials(call.backbone.config.get_text_config(), input_ids.shape[1], 2 * _DEPTH)
    has_stop_strings = any(isinstance(one, StopStringCriteria) for one in criteria)
    return choose_tree(trial, call.drafter, call.options, config, input_ids, last, common, not has_stop_strings)


def _warn_or_refuse(reason: str, options: CallOptions) -> None:
    """Warn why a call decodes without drafts, or raise a ValueError where `use_mtp=True` demands them."""
    if options.use_mtp:
        raise ValueError(f"use_mtp=True cannot be combined with {reason}; drop one of them")
    logger.warning_once(f"Decoding one token at a time, without speculation, because of {reason}.")


def _refuse_source(reason: str | None, options: CallOptions) -> None:
    """Raise a ValueError where uniforms or a seed ask for our loop, and there is a reason against it."""
    if reason and options.needs_our_loop:
        name = "seed" if "seed" in options.extra else "uniforms"
        raise ValueError(f"{name}= cannot be combined with {reason}; drop one of them")


def _refuse_unread(own: dict[str, Any], config: GenerationConfig) -> None:
    """Raise a ValueError where options of our drafters are passed, and another one drafts."""
    name = next((name for name, value in own.items() if value is not None), None)
    if name is not None:
        other = "prompt_lookup_num_tokens" if config.prompt_lookup_num_tokens else "assistant_model"
        raise ValueError(f"{name}= is not read by {other}, which drafts here; drop one of them")


def _draft_length(number: int | None, drafter: BaseDrafter) -> int:
    longest = drafter.longest_draft()
    if number is None:
        return drafter.default_draft()
    if longest is not None and number > longest > 0:
        logger.warning_once(f"num_assistant_tokens={number} exceeds window - 1 = {longest}; drafting {longest} tokens.")
    return number if longest is None else min(number, longest)
