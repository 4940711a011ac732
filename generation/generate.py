"""The entry of speculative decoding: transformers' own `generate`, with our loop as its decoding method.

    backbone.generate(..., assistant_model=head)        `attach.GeneratePatch`, or a model's own `generate`
      prepared_call(...)                                options parsed once (`read_call`); plain calls pass
      type(backbone).generate(..., custom_generate=f)   transformers prepares prompt, masks, cache, processors, criteria
        f = partial(speculative_decoding, call)         carries what transformers drops for a callable
          plan_of(call, ...)                            or the model's own `_sample`, where drafts are not possible
          the loop of the call

For a callable, transformers drops the streamer, the tokenizer and `synced_gpus`. The first and the last travel in the
`Call`; stop strings and token healing, which need the tokenizer, are resolved before the call, and so is a cache of the
backbone's own class, which is passed as a user's cache is. transformers would misread these fields beside a callable:
in a `ResolvedConfig` they read as unset.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from transformers import (
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerationMode
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import logging

from ..configuration.cache_names import CACHE, NAMES, renamed
from .backbone.backbones import target_of
from .backbone.static import HeldBuffers, OwnStaticBackbone
from .backbone.target import OwnCacheBackbone, Target, traits_of
from .backbone.wrapped_models import (
    Kwargs,
    checkpointing_paused,
    drop_peft_arguments,
    readable,
    share_draws,
    tensor_parallel_size,
)
from .call.options import GENERATE_KWARGS, LONGEST_PATH, CallOptions
from .contract import PrefillOutput, SpeculativeCache
from .drafter import BaseDrafter
from .graphs import running
from .guarded import GuardedLoop, StatefulLoop
from .plan import Call, Plan, decode_plainly, plan_of, read_call
from .recorded import static_loop_of
from .trees.choice import choose_tree

logger = logging.get_logger(__name__)
_SINGLE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
PARAMETERS = tuple(inspect.signature(GenerationMixin.generate).parameters)[1:-1]
NOT_CONFIG = {*PARAMETERS, "tokenizer", "assistant_tokenizer", "trust_remote_code"}
"""Keyword arguments of `generate` that neither a GenerationConfig nor the model takes."""


def prepared_call(
    generate: Callable[..., Any],
    backbone: PreTrainedModel,
    drafter: BaseDrafter | None,
    args: tuple[Any, ...],
    kwargs: Kwargs,
    new_cache: Callable[[], SpeculativeCache] | None = None,
) -> Kwargs:
    """Parse the options of a call of `generate`, and return its keyword arguments for transformers' own.

    The bound `generate` is called next. Without a `drafter`, an assistant of transformers drafts, or nobody; without
    `new_cache`, the backbone has caches of transformers.
    """
    call = (dict(zip(_names(type(backbone)), args)) if args else {}) | kwargs
    call = call if call.keys().isdisjoint(NAMES) else renamed(call)
    own = {name: call.pop(name) for name in GENERATE_KWARGS if name in call}
    named = None if drafter is None else call.pop("assistant_model", None)
    sources = (call, call.get("generation_config"), backbone.generation_config)
    call |= {} if drafter is None else drafter.sampling_defaults(sources)
    fields = {name: value for name, value in call.items() if name not in NOT_CONFIG}
    config, model_kwargs = cast(Any, backbone)._prepare_generation_config(call.get("generation_config"), **fields)
    if config.assistant_early_exit is not None:
        name = f"assistant_early_exit={config.assistant_early_exit}"
        raise ValueError(f"{name} would cut the layers of {type(backbone).__name__} in place; leave it out")
    resolved = {"use_mtp"} if config.use_mtp else set()
    config.use_mtp = False
    read = None
    if drafter is None or config.prompt_lookup_num_tokens:
        CallOptions.read(own, sources)
        if unread := next((name for name, value in own.items() if value is not None), None):
            other = "prompt_lookup_num_tokens" if config.prompt_lookup_num_tokens else "assistant_model"
            raise ValueError(f"{unread}= is not read by {other}, which drafts here; drop one of them")
        if named is not None:
            lookup = f"prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}"
            raise ValueError(
                f"{lookup} would leave out the {type(named).__name__} of assistant_model=; drop one of them"
            )
    elif call.get("custom_generate") is None:
        read = read_call(generate, backbone, drafter, own, sources, config, model_kwargs, new_cache)
        _refuse_clocks(read)
    if new_cache is not None:
        resolved |= add_cache(call, config, backbone, new_cache)
    is_single = config.get_generation_mode() in _SINGLE
    # a cache of the backbone's own class drops padding in our callable, also where nothing is drafted
    if read is not None and is_single and (read.options.is_ours or new_cache is not None):
        if call.get("tokenizer") is not None:  # else transformers raises
            resolved |= resolve_tokenizer(call, config, backbone)
        if (synced := call.get("synced_gpus")) is None:  # as transformers decides for its own loops
            synced = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(backbone)
            synced = synced and torch.distributed.get_world_size() > 1
        read = replace(read, streamer=call.get("streamer"), synced_gpus=synced)
        call["custom_generate"] = decode = partial(speculative_decoding, read)
        vars(decode).update(__signature__=_SIGNATURE)
    return with_resolved(call, resolved) if resolved else call


def _refuse_clocks(call: Call) -> None:
    """Refuse drafts that depend on measured times, which differ among processes that hold parts of one backbone."""
    timed = {
        "num_assistant_tokens_schedule='adaptive'": call.options.schedule == "adaptive",
        "draft_tree='auto'": call.options.draft_tree == "auto",
        "learn_while_decoding": call.drafter.recorder is not None,
    }
    named = next((name for name, is_set in timed.items() if is_set), None)
    if named is not None and tensor_parallel_size(call.backbone) > 1:
        raise ValueError(f"{named} goes by the clock, and a backbone in tensor parallelism needs equal drafts: drop it")


def _has_peers() -> bool:  # one process of several, which may hold parts of one backbone
    return distributed.is_available() and distributed.is_initialized()


@contextmanager
def decoding(*models: nn.Module) -> Iterator[None]:
    """Let a backbone, and what drafts for it, use caches in train mode, though they checkpoint activations.

    An error leaves none of peft's hooks. Processes that share the backbone's layers draw the same numbers.
    """
    if _has_peers():
        share_draws(models[0])
    try:
        with torch.no_grad(), ExitStack() as stack:
            for model in models:
                if model.training and any(vars(part).get("gradient_checkpointing") for part in model.modules()):
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
    """Decode with drafts: `generate` of transformers calls this as its decoding method, with prepared arguments."""
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE)
    if mask is not None and isinstance(cache, SpeculativeCache):
        cache.drop_padding(mask)
    prepared = input_ids.long(), logits_processor, stopping_criteria, generation_config
    trials = partial(_with_tree, call, prepared[0], stopping_criteria, generation_config, model_kwargs)
    plan = plan_of(call, *prepared, model_kwargs, trials)
    if isinstance(plan, str):
        if plan:
            decode_plainly(plan, call.options)
        return cast(Any, model)._sample(*prepared, call.synced_gpus, call.streamer, **model_kwargs)
    with ExitStack() as stack:
        if _has_peers():
            stack.enter_context(readable(model))
        stack.enter_context(call.drafter.running(model))
        if call.is_static:
            stack.enter_context(running())
        outputs, target = _prefill(plan)
        kind = GuardedLoop if plan.watch is None else StatefulLoop
        loop = static_loop_of(plan, target) if call.is_static else kind(plan, target)
        output = loop.run(outputs)
        graphs = loop.results.statistics.graphs
        if graphs is not None and isinstance(target, HeldBuffers):
            graphs.buffer_bytes, graphs.buffers_made = target.buffer_use()
    if call.drafter.totals is not None:
        call.drafter.totals.update(loop.results.statistics.counts)
    if plan.schedule is not None:
        call.drafter.remember(plan.schedule, plan.session, plan.draft_options)
    return output


_, *_PREPARED = inspect.signature(speculative_decoding).parameters.values()
_SIGNATURE = inspect.Signature(_PREPARED)  # without the `Call`; transformers would work it out anew in every call


def _prefill(plan: Plan) -> tuple[PrefillOutput, Target]:
    """Run transformers' own prefill, and return its outputs, and the backbone with the prompt in its cache."""
    kwargs, prompt, keywords = plan.model_kwargs, plan.prompt, plan.keywords
    states = {"output_hidden_states": plan.hidden_layers}
    outputs = cast(Any, plan.call.backbone)._prefill(prompt, plan.config, kwargs | states)
    cache, mask, target = getattr(outputs, CACHE), kwargs.get("attention_mask"), None
    if keywords is not None:
        kwargs = kwargs | keywords.continued
    if isinstance(cache, EncoderDecoderCache):  # the other half is the encoder's, which every forward reads anew
        cache = cache.self_attention_cache
    if isinstance(cache, SpeculativeCache):
        if plan.call.is_static and plan.unfixed is None:
            target = OwnStaticBackbone(plan.verifier_model, cache, plan.config.max_length, plan.span)
        else:
            target = OwnCacheBackbone(plan.verifier_model, cache, mask)
    else:
        if mask is not None and kwargs.get("position_ids") is None:  # the model counts columns, padding included
            kwargs = kwargs | {"position_ids": mask.new_full((1, 1), cache.get_seq_length() - 1)}
        like, limit = prompt.new_empty(len(prompt)), plan.config.max_length
        target = target_of(plan.verifier_model, cache, like, mask, kwargs, limit, plan.span)
    if keywords is not None:
        target.keywords = keywords.constant
    return outputs, target


@cache
def _names(kind: type[PreTrainedModel]) -> tuple[str, ...]:
    """Return the names of positional arguments of a class's `generate`; of one that hides them, transformers' own."""
    _, *known = inspect.signature(kind.generate).parameters.values()
    names = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return (*names, *PARAMETERS[len(names) :])


def _with_tree(
    call: Call,
    prompt: Tensor,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: Kwargs,
    options: CallOptions,
) -> CallOptions:
    """Return options with the tree that `draft_tree="auto"` finds by trials on this prompt."""

    def trial(drafter: BaseDrafter, prompt: Tensor, kwargs: Kwargs) -> Any:
        if isinstance(config := kwargs["generation_config"], ResolvedConfig):  # the trial resolves it again
            config.resolved -= {"use_mtp"}
        return call.generate(**prepared_call(call.generate, call.backbone, drafter, (prompt,), kwargs, call.new_cache))

    own = CACHE, "use_cache", "input_ids"  # what trials on the same prompt make for themselves
    common = {name: value for name, value in model_kwargs.items() if name not in own}
    common |= {"synced_gpus": call.synced_gpus}
    border = traits_of(call.backbone).rotary_border
    last = getattr(call.backbone.config.get_text_config(), "max_position_embeddings", None)
    if border is not None and prompt.shape[1] <= border[1]:  # trials end below it
        last = min(last or border[1], border[1] - 2 * LONGEST_PATH)
    has_stop_strings = any(isinstance(one, StopStringCriteria) for one in criteria)
    return choose_tree(trial, call.drafter, options, config, prompt, last, common, not has_stop_strings)


class ResolvedConfig(GenerationConfig):
    """The generation config of a call, in which the `resolved` fields read as unset, whatever is written to them.

    A plain copy would not do: transformers fills unset fields from the model's own config.
    """

    resolved: frozenset[str] = frozenset()

    def __getattribute__(self, name: str) -> Any:
        read = super().__getattribute__
        return None if name in read("resolved") else read(name)


def add_cache(
    call: Kwargs, config: GenerationConfig, backbone: PreTrainedModel, new_cache: Callable[[], SpeculativeCache]
) -> set[str]:
    """Pass a cache of the backbone's own class, where the call starts with an empty one; return the resolved fields."""
    if config.use_cache is False or call.get(CACHE) is not None:
        return set()
    call[CACHE] = cache = new_cache()
    if config.is_assistant:
        cache.activate_past_recording()
    if config.cache_implementation is None:
        return set()
    if config.cache_implementation not in ("dynamic", "static"):
        name = f"cache_implementation={config.cache_implementation!r}"
        logger.warning_once(f"{name} is ignored: {type(backbone).__name__} has a cache of its own.")
    return {"cache_implementation"}


def resolve_tokenizer(call: Kwargs, config: GenerationConfig, backbone: PreTrainedModel) -> set[str]:
    """Apply the fields that need the tokenizer, which transformers drops for a callable; return the resolved fields."""
    tokenizer, resolved = call["tokenizer"], set()
    if config.stop_strings is not None:
        stop = StopStringCriteria(tokenizer, config.stop_strings)
        call["stopping_criteria"] = StoppingCriteriaList([stop, *(call.get("stopping_criteria") or ())])
        resolved.add("stop_strings")
    name = "inputs" if call.get("inputs") is not None else "input_ids"
    if config.token_healing and isinstance(ids := call.get(name), Tensor):
        if call.get("attention_mask") is None:  # as transformers infers it; healing replaces bos by padding
            pad, eos = config.pad_token_id, config.eos_token_id
            is_eos = pad in (eos if isinstance(eos, (list, tuple)) else [eos])
            call["attention_mask"] = torch.ones_like(ids) if pad is None or is_eos else ids.ne(pad).long()
        call[name] = cast(Any, backbone).heal_tokens(ids, tokenizer)
        resolved.add("token_healing")
    return resolved


def with_resolved(call: Kwargs, resolved: set[str]) -> Kwargs:
    """Return a call whose config shows these fields as unset."""
    passed = call.get("generation_config")
    config = ResolvedConfig()
    vars(config).update(copy.deepcopy(vars(passed or GenerationConfig())))
    config.resolved = frozenset(resolved)
    fields = {name: value for name, value in call.items() if name not in NOT_CONFIG}
    if passed is None:  # beside a config, transformers warns of fields in keyword arguments
        unset = {name for name, value in fields.items() if value is None}  # only a keyword argument keeps a field so
        fields = unset | config.update(**{name: fields[name] for name in fields.keys() - unset}).keys()
    others = {name: value for name, value in call.items() if name in NOT_CONFIG or name in fields}
    return others | {"generation_config": config}
