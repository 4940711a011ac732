"""Whether a call of `generate` drafts, and with what: the one place that decides it.

`read_call` reads the call's options before transformers prepares the call, and looks for reasons against drafts there,
for other decoding methods are transformers' own. `plan_of` then makes the plan of what transformers prepared, or
returns the reason against it, in the user's words: "because of num_beams=4".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn
from transformers import (
    Cache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..configuration.cache_names import CACHE
from .backbone.backbones import can_roll_back, check_trees, is_repackable, takes_fixed_size
from .backbone.static import planned_cache
from .backbone.target import traits_of
from .backbone.wrapped_models import Kwargs, has_foreign_hooks, peft_arguments
from .call.keywords import USUAL, Keywords, keywords_of
from .call.options import GENERATE_KWARGS, LONGEST_PATH, CallOptions, DraftOptions, Sources
from .call.processing import counts_calls
from .call.schedule import AdaptiveSchedule, ExpectedSchedule
from .call.state import StateWatch
from .contract import DraftSession, HiddenLayers, SpeculativeCache, requested_states
from .drafter import BaseDrafter
from .forced import with_forced
from .graphs import obstacle_to_fixed, obstacle_to_graphs
from .trees.growth import most_nodes
from .verification.verifiers import Verifier

logger = logging.get_logger(__name__)
_PLAIN: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 0, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic", "offloaded", "static"),
    "guidance_scale": (None, 1),
    "output_attentions": (None, False),
    "dola_layers": (None,),
}
"""Fields of a GenerationConfig, and the values that allow speculation."""
# fields of a GenerationConfig that transformers' own loops read, and ours ignores
_UNREAD = "compile_config", "assistant_ensemble_weight", "speculation_type"
# methods of every model that make the keyword arguments of its forwards
_PREPARES = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `generate` with a drafter, before transformers prepares it."""

    generate: Callable[..., Any]  # bound, of the backbone's class; trials of trees call it, too
    backbone: PreTrainedModel
    drafter: BaseDrafter
    options: CallOptions  # completed by the drafter; `speculates` is the decision
    new_cache: Callable[[], SpeculativeCache] | None  # makes a cache of the backbone's own class, if it has one
    has_user_cache: bool  # the user passed the cache, and may look into it after the call
    streamer: BaseStreamer | None = None  # receives every column of tokens once all open sequences have it
    synced_gpus: bool = False  # every peer calls the backbone until all of them are done
    is_static: bool = False  # with `cache_implementation="static"`, and no cache of the user


@dataclass(frozen=True, eq=False)
class Plan:
    """What the loop does in one call."""

    call: Call  # before transformers prepared it
    prompt: Tensor  # [B, L] int64
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: Kwargs  # of the prompt, the cache among them
    keywords: Keywords | None  # further ones of forwards after the prompt; None: there are none
    draft_options: DraftOptions  # for session and verifier, the logits processors among them
    verifier_model: PreTrainedModel  # runs the forwards after the prompt; on tokens it computes what the backbone does
    session: DraftSession
    verifier: Verifier
    watch: StateWatch | None  # notices processors whose state moves; None: none has any
    schedule: AdaptiveSchedule | ExpectedSchedule | None  # chooses lengths; None: as long as the session can
    unfixed: str | None  # why cycles on a static cache have no fixed shapes; None: they have, or the cache is another
    unrecorded: str | None  # why they are not recorded (`graphs`)
    models: tuple[nn.Module, ...]  # all that runs in a cycle of a static cache
    hidden_layers: HiddenLayers  # the states of the backbone that the call or the session reads

    @property
    def returns_cache(self) -> bool:
        """Whether somebody may look into the cache after the call."""
        return bool(self.call.has_user_cache or self.config.return_dict_in_generate)

    @property
    def span(self) -> int:
        """The longest block, as far as it is known."""
        made = self.draft_options
        return max(most_nodes(made) if made.draft_tree else 1 + made.num_tokens, 1 + self.session.num_tokens)

    def may_drop_finished(self) -> bool:
        """Return whether sequences that have ended may be left out: nobody reads the cache, nor what hooks see."""
        is_read = self.returns_cache or self.session.reads_cache or self.session.lookahead
        may = len(self.prompt) > 1 and self.keywords is None and not is_read
        return may and not has_foreign_hooks(self.verifier_model)

    @property
    def marks(self) -> tuple[object, ...]:
        """What shapes the cycles of a call (`graphs.fingerprint`)."""
        made, rule = self.draft_options, getattr(self.verifier, "rule", "")
        of_session = type(self.session).__name__, self.session.num_tokens
        of_verifier = type(self.verifier).__name__, rule, self.verifier.shape(self.prompt)
        chosen = made.do_sample, made.draft_tree, made.pad, made.ends, list(made.processors), made.extra
        keywords = {} if self.keywords is None else self.keywords.constant
        return *self.models, self.call.drafter, *of_session, *of_verifier, *chosen, keywords


def read_call(
    generate: Callable[..., Any],
    backbone: PreTrainedModel,
    drafter: BaseDrafter,
    own: Kwargs,
    sources: Sources,
    config: GenerationConfig,
    model_kwargs: Kwargs,
    new_cache: Callable[[], SpeculativeCache] | None,
) -> Call:
    """Return a call that transformers has not prepared yet.

    Of its keyword arguments, `own` are those of `GENERATE_KWARGS`; `sources` are the other ones, the config that was
    passed, and the model's own, of which transformers makes `config` and `model_kwargs`. The others are as in `Call`.
    """
    options = _prepared_options(backbone, drafter, own, sources, config)
    speculates, longest, usual = options.use_mtp is not False, drafter.longest_draft(), drafter.default_draft()
    if speculates and longest == 0:
        speculates = False
        if options.use_mtp:
            logger.warning("use_mtp=True: the head has window 1 and drafts nothing; decoding one token at a time.")
    if speculates:
        reason = _obstacle_before(backbone, drafter, config, model_kwargs, new_cache is not None)
        if reason is None:
            for name in _UNREAD:
                is_read = name == "compile_config" and config.cache_implementation == "static"
                if (value := getattr(config, name, None)) is not None and not is_read:
                    logger.warning_once(f"{name}={value!r} is not read where drafts are verified by this library.")
        else:
            decode_plainly(reason, options)
            speculates = False
    if speculates and options.draft_tree is not None:
        check_trees(backbone)
    if options.needs_our_loop:  # caches without rollback hinder drafts alone
        _refuse_source(_obstacle_of_config(config, without="cache_implementation"), options)
    number = options.num_assistant_tokens or usual
    if longest is not None and number > longest > 0:
        logger.warning_once(f"num_assistant_tokens={number} exceeds window - 1 = {longest}; drafting {longest} tokens.")
    number = number if longest is None else min(number, longest)
    options = replace(options, speculates=speculates, num_assistant_tokens=number)
    has_user_cache = model_kwargs.get(CACHE) is not None
    is_static = config.cache_implementation == "static" and not has_user_cache
    return Call(generate, backbone, drafter, options, new_cache, has_user_cache, is_static=is_static)


def plan_of(
    call: Call,
    prompt: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: Kwargs,
    choose_tree: Callable[[CallOptions], CallOptions],
) -> Plan | str:
    """Return what the loop does with what transformers prepared, or the reason for plain decoding; "": none was asked.

    In `model_kwargs`, a static cache is replaced by one that drafts can be verified on; `choose_tree` settles
    `draft_tree="auto"`. The others are as in `Plan`.
    """
    backbone, drafter = call.backbone, call.drafter
    options = call.options.cut(backbone, prompt, config.max_length)
    if not options.is_ours:
        return ""
    keywords = _obstacle_after(call, options, prompt, processors, config, model_kwargs)
    if isinstance(keywords, str):
        _refuse_source(keywords, options)
        return keywords
    if options.draft_tree == "auto":
        options = choose_tree(options)
    made = DraftOptions.of_call(options, backbone, config, processors, prompt)
    verifier_model, session = drafter.verifier_model(backbone), drafter.session(made)
    verifier = drafter.make_verifier(made, session)
    if made.processors and drafter.recorder is None:
        session = with_forced(session, made, drafter.longest_draft())
    unfixed = unrecorded = None
    models = verifier_model, *([drafter] if isinstance(drafter, nn.Module) else [])
    has_own = call.new_cache is not None
    if call.is_static and (has_own or takes_fixed_size(backbone)):
        unfixed = obstacle_to_fixed(made, session, verifier, keywords is not None and not keywords.are_plain)
        if has_own and (made.draft_tree is not None or not hasattr(verifier_model, "fixed_cache")):
            unfixed = unfixed or f"{'trees' if made.draft_tree else 'drafts'} on a cache of the model's own"
        unrecorded = unfixed or obstacle_to_graphs(*models)
        if not has_own:
            has_singles = made.schedule == "adaptive" or not made.speculates
            kwargs = model_kwargs, config, has_singles, unfixed is None, unrecorded is None
            model_kwargs[CACHE] = planned_cache(backbone, *kwargs)
    return Plan(
        call=call,
        prompt=prompt,
        criteria=criteria,
        config=config,
        model_kwargs=model_kwargs,
        keywords=keywords,
        draft_options=made,
        verifier_model=verifier_model,
        session=session,
        verifier=verifier,
        watch=made.processing.watch() if made.speculates and made.processors else None,
        schedule=drafter.schedule_of(session, made),
        unfixed=unfixed,
        unrecorded=unrecorded,
        models=models,
        hidden_layers=requested_states(bool(config.output_hidden_states) or session.hidden_layers),
    )


def decode_plainly(reason: str, options: CallOptions) -> None:
    """Warn why a call decodes without drafts, or raise a ValueError where `use_mtp=True` demands them."""
    if options.use_mtp:
        raise ValueError(f"use_mtp=True cannot be combined with {reason}; drop one of them")
    logger.warning_once(f"Decoding one token at a time, without speculation, because of {reason}.")


def _prepared_options(
    backbone: PreTrainedModel, drafter: BaseDrafter, own: Kwargs, sources: Sources, config: GenerationConfig
) -> CallOptions:
    """Return the options of a call, completed by the drafter (`BaseDrafter.prepare_call`).

    The backbone's own config may set trees, slots and the like for another of its drafters: one that cannot follow it
    warns, and ignores them. A drafter that is the backbone itself raises an error, as for arguments of the call.
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
        _, passed, of_model = sources
        names = [name for name in GENERATE_KWARGS[1:] if own.get(name) is None]
        values = {name: value for name in names if (value := getattr(of_model, name, None)) is not None}
        # what the model's own config alone sets; a pipeline passes a copy of that config
        saved = tuple(name for name, value in values.items() if getattr(passed, name, None) in (None, value))
        if drafter is backbone or not saved:
            raise
        options = drafter.prepare_call(CallOptions.read(own, sources, saved, drafter.assistant_config()), config)
        logger.warning_once(f"The generation_config of {type(backbone).__name__} is not followed in all: {error}")
        return options


def _obstacle_before(
    backbone: PreTrainedModel, drafter: BaseDrafter, config: GenerationConfig, model_kwargs: Kwargs, has_own_cache: bool
) -> str | None:
    """Return a reason against drafts that the call's arguments show; None: there is none."""
    cache = model_kwargs.get(CACHE)
    if isinstance(cache, StaticCache | EncoderDecoderCache):
        return f"{CACHE} of class {type(cache).__name__}"
    if not has_own_cache:
        if not (cache is None or is_repackable(cache, traits_of(backbone)) or isinstance(cache, SpeculativeCache)):
            return f"{CACHE} with layers that cannot be rolled back ({type(cache).__name__})"
        if not can_roll_back(backbone) or not cast(Any, backbone)._supports_default_dynamic_cache():
            return f"the recurrent states of {type(backbone).__name__}, which cannot be rolled back after a rejection"
    crosses = getattr(backbone.config.get_text_config(), "cross_attention_layers", None)
    if crosses and model_kwargs.get("pixel_values") is not None:
        return "pixel_values, whose states cross attention puts in the cache"
    has_ids = model_kwargs.get("inputs_embeds") is None or model_kwargs.get("input_ids") is not None
    if drafter.reads_prompt and not has_ids:
        return "inputs_embeds without the input_ids of the prompt"
    if config.cache_implementation == "static" and not (has_own_cache or takes_fixed_size(backbone)):
        return "cache_implementation='static'"
    return _obstacle_of_config(config) or drafter.obstacle(config, model_kwargs)


def _obstacle_of_config(config: GenerationConfig, without: str = "") -> str | None:
    """Return an obstacle to our loop in a call on any backbone, in the user's words; the field `without` is none."""
    for name, plain in _PLAIN.items():
        if name != without and (value := getattr(config, name, None)) not in plain:
            return f"{name}={value!r}"
    if config.penalty_alpha and (config.top_k or 0) > 1 and not config.do_sample:
        return "contrastive search (penalty_alpha)"
    if config.constraints is not None or config.force_words_ids is not None:
        return "constrained beams"
    if type(config.watermarking_config).__name__ == "SynthIDTextWatermarkingConfig":
        return "a SynthID watermark, which counts its calls"
    return None


def _obstacle_after(
    call: Call,
    options: CallOptions,
    prompt: Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: Kwargs,
) -> Keywords | str | None:
    """Return a reason against our loop that only transformers' preparation shows, or else `Plan.keywords`."""
    model = call.backbone
    for processor in processors:
        if counts_calls(processor):
            return f"{type(processor).__name__}, which counts its calls"
    if "peft" in sys.modules and "alora_offsets" in peft_arguments(model):
        return "activated adapters of peft, whose alora_offsets count from the end of every forward"
    embeds = model_kwargs.get("inputs_embeds")
    unwritten = 0 if embeds is None else embeds.shape[1] - prompt.shape[1]
    if unwritten and options.draft_tree == "auto":
        return "draft_tree='auto' with inputs_embeds"
    # a block may reach beyond the length limit, for drafts are cut after verification alone
    end = config.max_length + unwritten + 2 * max(options.num_assistant_tokens or 0, LONGEST_PATH)
    reason = _obstacle_to_blocks(model, model_kwargs, prompt, end)
    if reason is not None:
        return reason
    kind = type(model)
    is_usual = all(
        name not in vars(model) and getattr(kind, name) is getattr(GenerationMixin, name) for name in _PREPARES
    )
    if is_usual and not any(value is not None and name not in USUAL for name, value in model_kwargs.items()):
        return None
    found = keywords_of(model, model_kwargs, prompt)
    if isinstance(found, Keywords) and found.constant and call.drafter.verifier_model(model) is not model:
        return f"{next(iter(found.constant))}="
    return found


def _obstacle_to_blocks(model: PreTrainedModel, model_kwargs: Kwargs, prompt: Tensor, end: int) -> str | None:
    """Return an obstacle to blocks of tokens in a call up to position `end`, of a backbone's positions or columns.

    Frequencies may depend on the longest position: a token of a block would be rotated as the later ones are, and
    not as it is alone. That happens at a border alone, and not after one that is crossed once. Where attention
    chooses blocks of columns, tokens after padding may see nothing, and get the mean of all columns.
    """
    mask, cache, name = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE), type(model).__name__
    traits = traits_of(model)
    if traits.chooses_blocks and mask is not None and not bool(mask.all()):
        return f"padding in attention_mask of {name}, whose attention chooses blocks of columns"
    is_special = traits.layer_type is not None or traits.compresses_windows or traits.convolves
    if isinstance(cache, Cache) and cache.offloading and is_special:
        return f"an offloaded cache of {name}, whose attention reads columns its own way"
    border = traits.rotary_border
    if border is None or end <= border[1]:
        return None
    begins = prompt.shape[1] if mask is None else int(mask.sum(1).max())
    if border[0] == "longrope" and begins > border[1]:
        return None
    return f"rope_type={border[0]!r} of {name}, whose frequencies change at position {border[1]}"


def _refuse_source(reason: str | None, options: CallOptions) -> None:
    """Raise a ValueError where uniforms or a seed ask for our loop, and there is a reason against it."""
    if reason and options.needs_our_loop:
        name = "seed" if "seed" in options.extra else "uniforms"
        raise ValueError(f"{name}= cannot be combined with {reason}; drop one of them")
