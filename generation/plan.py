"""Whether a call of `generate` drafts, and with what: the one place that decides it.

`SpeculationPlan.of` reads the call's options and looks for reasons against drafts before transformers prepares the
call, for other decoding methods are transformers' own. `admits` looks for those that the preparation shows, and
`complete` makes what the loop needs. A reason is said in the user's words: "because of num_beams=4".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor, nn
from transformers import (
    Cache,
    EncoderDecoderCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..configuration.cache_names import CACHE
from ..configuration.fields import (
    chooses_blocks,
    compresses_windows,
    has_short_convolutions,
    requested_states,
    rotary_border,
)
from ..configuration.fields import (
    field as field_of,
)
from .backbone.backbones import can_roll_back, check_trees, is_repackable, takes_fixed_size
from .backbone.static import lacks_room, planned_cache
from .backbone.target import layer_class
from .call.keywords import USUAL, Keywords, keywords_of
from .call.options import GENERATE_KWARGS, LONGEST_PATH, CallOptions, DraftOptions, Sources
from .call.processing import counts_calls
from .call.schedule import AdaptiveSchedule
from .call.state import StateWatch
from .contract import DraftSession, HiddenLayers, SpeculativeCache
from .drafter import BaseDrafter
from .forced import with_forced
from .graphs import obstacle_to_fixed, obstacle_to_graphs
from .tensors.wrapped_models import Kwargs, has_foreign_hooks, is_base, peft_arguments, untyped
from .trees.growth import most_nodes
from .verification.verifiers import Verifier

logger = logging.get_logger(__name__)
_PLAIN = {
    "num_beams": lambda value: (value or 1) == 1,
    "use_cache": lambda value: value is not False,
    "cache_implementation": lambda value: value in (None, "dynamic", "offloaded", "static"),
    "guidance_scale": lambda value: value in (None, 1),
    "output_attentions": lambda value: not value,
    "dola_layers": lambda value: value is None,
}
"""Fields of a GenerationConfig, and the values that allow speculation."""
_UNREAD = {
    "compile_config": "pass cache_implementation='static' with it, or compile the backbone itself, by "
    "model.forward = torch.compile(model.forward)",
    "assistant_ensemble_weight": "it would change the distribution of the text, which verification keeps",
    "speculation_type": "the drafter that the call was given drafts",
}
"""Fields of a GenerationConfig that transformers' own loops read and ours ignores, and the alternative."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `generate` with a drafter, before transformers prepares it.

    Attributes:
        generate: The bound `generate` of the backbone's class, which trials of trees call, too.
        backbone: The target model.
        drafter: Makes the drafts.
        own: The keyword arguments of `GENERATE_KWARGS`.
        sources: The other ones, the config that was passed, and the model's own.
        config: What transformers makes of them.
        model_kwargs: Those that the model takes.
        new_cache: Makes a cache of the backbone's own class, if it has one.
    """

    generate: Callable[..., Any]
    backbone: PreTrainedModel
    drafter: BaseDrafter
    own: Kwargs
    sources: Sources
    config: GenerationConfig
    model_kwargs: Kwargs
    new_cache: Callable[[], SpeculativeCache] | None


@dataclass(eq=False)
class SpeculationPlan:
    """What the loop does in one call.

    Attributes:
        call: Before transformers prepared it.
        options: Of the call, completed by the drafter; `speculates` is the decision.
        has_user_cache: Whether the user passed the cache, and may look into it after the call.
        streamer: Receives every column of tokens once all open sequences have it.
        synced_gpus: Whether every peer calls the backbone until all of them are done.
        prompt: [B, L] int64.
        processors: Prepared by transformers, as the next three.
        criteria: Stopping criteria.
        config: Of the call.
        model_kwargs: Keyword arguments of the model, the cache among them.
        keywords: Further keyword arguments of forwards after the prompt; None: there are none.
        draft_options: The options for session and verifier.
        verifier_model: Runs the forwards after the prompt; on tokens it computes what the backbone does.
        session: Proposes tokens.
        verifier: Verifies them.
        watch: Notices processors whose state moves; None: none has any.
        schedule: Chooses the draft length; None: always as long as the session can.
        unfixed: Why the cycles on a static cache have no fixed shapes; None: they have, or the cache is another one.
        unrecorded: Why they are not recorded; see `graphs`.
        models: All that runs in a cycle.
    """

    call: Call
    options: CallOptions
    has_user_cache: bool
    streamer: BaseStreamer | None = None
    synced_gpus: bool = False
    prompt: Tensor = field(init=False)
    processors: LogitsProcessorList = field(init=False)
    criteria: StoppingCriteriaList = field(init=False)
    config: GenerationConfig = field(init=False)
    model_kwargs: Kwargs = field(init=False)
    keywords: Keywords | None = field(init=False, default=None)
    draft_options: DraftOptions = field(init=False)
    verifier_model: PreTrainedModel = field(init=False)
    session: DraftSession = field(init=False)
    verifier: Verifier = field(init=False)
    watch: StateWatch | None = field(init=False, default=None)
    schedule: AdaptiveSchedule | None = field(init=False, default=None)
    unfixed: str | None = field(init=False, default=None)
    unrecorded: str | None = field(init=False, default=None)
    models: tuple[nn.Module, ...] = field(init=False, default=())

    @classmethod
    def of(cls, call: Call) -> SpeculationPlan:
        """Return the plan of a call that transformers has not prepared yet.

        Raises:
            ValueError: An option or a combination that is not supported, or `use_mtp=True` where nothing is drafted.
        """
        options, drafter = _prepared_options(call), call.drafter
        speculates, longest = options.use_mtp is not False, drafter.longest_draft()
        if speculates and longest == 0:
            speculates = False
            if options.use_mtp:
                logger.warning("use_mtp=True: the head has window 1 and drafts nothing; decoding one token at a time.")
        if speculates:
            reason = _obstacle_before(call)
            if reason is None:
                _warn_of_unread(call.config)
            else:
                decode_plainly(reason, options)
                speculates = False
        if speculates and options.draft_tree is not None:
            check_trees(call.backbone)
        _refuse_source(_obstacle_of_config(call.config, of_drafts=False), options)
        number = options.num_assistant_tokens or drafter.default_draft()
        if longest is not None and number > longest > 0:
            logger.warning_once(
                f"num_assistant_tokens={number} exceeds window - 1 = {longest}; drafting {longest} tokens."
            )
        number = number if longest is None else min(number, longest)
        options = replace(options, speculates=speculates, num_assistant_tokens=number)
        return cls(call, options, call.model_kwargs.get(CACHE) is not None)

    def admits(
        self,
        prompt: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: Kwargs,
    ) -> bool:
        """Take what transformers has prepared, and return whether our loop decodes.

        Raises:
            ValueError: `use_mtp=True`, a seed or uniforms were passed, and are not possible here.
        """
        self.prompt, self.processors, self.criteria = prompt, processors, criteria
        self.config, self.model_kwargs = config, model_kwargs
        self.options = self.options.cut(self.call.backbone, prompt, config.max_length)
        if not self.options.is_ours:
            return False
        reason = self._obstacle_after()
        if reason is not None:
            _refuse_source(reason, self.options)
            decode_plainly(reason, self.options)
        return reason is None

    def complete(self) -> None:
        """Make what the loop needs, once the tree of drafts is chosen."""
        options, drafter, backbone = self.options, self.call.drafter, self.call.backbone
        made = DraftOptions.of_call(options, backbone, self.config, self.processors, self.prompt)
        self.draft_options, session = made, drafter.session(made)
        self.session = with_forced(session, made, drafter.longest_draft()) if drafter.recorder is None else session
        made.warn_of_threshold(session, type(drafter).__name__)
        self.verifier_model, self.verifier = drafter.verifier_model(backbone), drafter.make_verifier(made, session)
        self.schedule = drafter.schedule_of(session, made) if made.schedule == "adaptive" else None
        if made.drafts and made.processors:
            self.watch = made.processing.watch()
        if self._takes_static_cache():
            self._plan_cache()

    def _plan_cache(self) -> None:
        """Choose what a call with `cache_implementation="static"` decodes on, and what of it is recorded."""
        backbone, drafter, made = self.call.backbone, self.call.drafter, self.draft_options
        has_singles = made.schedule == "adaptive" or not made.drafts
        has_keywords = self.keywords is not None and not self.keywords.are_plain
        self.unfixed = obstacle_to_fixed(made, self.session, self.verifier, has_keywords)
        self.models = (self.verifier_model, *([drafter] if isinstance(drafter, nn.Module) else []))
        self.unrecorded = self.unfixed or obstacle_to_graphs(*self.models)
        kwargs = self.model_kwargs, self.config, has_singles, self.unfixed is None, self.unrecorded is None
        self.model_kwargs[CACHE] = cache = planned_cache(backbone, *kwargs)
        if (lack := lacks_room(backbone, len(self.prompt), cache)) is not None:
            logger.warning_once(f"cache_implementation='static' is left out: {lack}; drafts are verified without it.")
            self.unfixed, cache.room = lack, None

    @property
    def returns_cache(self) -> bool:
        """Whether somebody may look into the cache after the call."""
        return bool(self.has_user_cache or self.config.return_dict_in_generate)

    @property
    def hidden_layers(self) -> HiddenLayers:
        """The hidden states of the backbone that the call or the session reads."""
        return requested_states(bool(self.config.output_hidden_states) or self.session.hidden_layers)

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

    def _takes_static_cache(self) -> bool:
        """Return whether the call asks for a static cache on which drafts can be verified."""
        is_static = self.config.cache_implementation == "static" and not self.has_user_cache
        return is_static and takes_fixed_size(self.call.backbone)

    def _obstacle_after(self) -> str | None:
        """Return a reason against our loop that only transformers' preparation shows; None: there is none."""
        model, model_kwargs, options = self.call.backbone, self.model_kwargs, self.options
        counting = next((processor for processor in self.processors if counts_calls(processor)), None)
        if counting is not None:
            return f"{type(counting).__name__}, which counts its calls"
        if "alora_offsets" in peft_arguments(model):
            return "activated adapters of peft, whose alora_offsets count from the end of every forward"
        embeds = model_kwargs.get("inputs_embeds")
        unwritten = 0 if embeds is None else embeds.shape[1] - self.prompt.shape[1]
        if unwritten and options.draft_tree == "auto":
            return "draft_tree='auto' with inputs_embeds"
        # a block may reach beyond the length limit, for drafts are cut after verification alone
        end = self.config.max_length + unwritten + 2 * max(options.num_assistant_tokens or 0, LONGEST_PATH)
        reason = _obstacle_to_blocks(model, model_kwargs, self.prompt, end)
        if reason is not None or not _has_keywords(model, model_kwargs):
            return reason
        found = keywords_of(model, model_kwargs, self.prompt)
        if isinstance(found, str):
            return found
        self.keywords = found
        if found.constant and self.call.drafter.verifier_model(model) is not model:
            return f"{next(iter(found.constant))}="
        return None


def decode_plainly(reason: str, options: CallOptions) -> None:
    """Warn why a call decodes without drafts, or raise a ValueError where `use_mtp=True` demands them."""
    if options.use_mtp:
        raise ValueError(f"use_mtp=True cannot be combined with {reason}; drop one of them")
    logger.warning_once(f"Decoding one token at a time, without speculation, because of {reason}.")


def _prepared_options(call: Call) -> CallOptions:
    """Return the options of a call, completed by the drafter (`BaseDrafter.prepare_call`).

    The backbone's own config may set trees, slots and the like for another of its drafters: one that cannot follow it
    warns, and ignores them. A drafter that is the backbone itself raises an error, as for arguments of the call.

    Raises:
        ValueError: An option that is invalid, or that this kind of drafter does not have.
    """
    drafter, own, sources = call.drafter, call.own, call.sources
    # as an assistant in transformers' own loop, the backbone is passed the config of its target
    left_out = GENERATE_KWARGS[1:] if getattr(sources[1], "is_assistant", None) else ()
    options = CallOptions.read(own, sources, left_out, drafter.assistant_config())
    if options.verification not in (None, *drafter.rules):
        rules = " or ".join(map(repr, drafter.rules))
        raise ValueError(f"verification={options.verification!r} is unknown; choose {rules}")
    try:
        return drafter.prepare_call(options, call.config)
    except ValueError as error:
        saved = _saved(own, sources)
        if drafter is call.backbone or not saved:
            raise
        options = drafter.prepare_call(CallOptions.read(own, sources, saved, drafter.assistant_config()), call.config)
        logger.warning_once(f"The generation_config of {type(call.backbone).__name__} is not followed in all: {error}")
        return options


def _saved(own: Kwargs, sources: Sources) -> tuple[str, ...]:
    """Return the options of drafts that the model's own config alone sets; a pipeline passes a copy of that config."""
    _, passed, of_model = sources
    names = [
        name for name in GENERATE_KWARGS[1:] if own.get(name) is None and getattr(of_model, name, None) is not None
    ]
    return tuple(name for name in names if getattr(passed, name, None) in (None, getattr(of_model, name)))


def _obstacle_before(call: Call) -> str | None:
    """Return a reason against drafts that the call's arguments show; None: there is none."""
    backbone, config, model_kwargs = call.backbone, call.config, call.model_kwargs
    cache, has_own_cache = model_kwargs.get(CACHE), call.new_cache is not None
    if isinstance(cache, StaticCache | EncoderDecoderCache):
        return f"{CACHE} of class {type(cache).__name__}"
    if not has_own_cache:
        if not is_repackable(cache, backbone.config) and not isinstance(cache, SpeculativeCache):
            return f"{CACHE} with layers that cannot be rolled back ({type(cache).__name__})"
        if not can_roll_back(backbone) or not untyped(backbone)._supports_default_dynamic_cache():
            return f"the recurrent states of {type(backbone).__name__}, which cannot be rolled back after a rejection"
    crosses = field_of(backbone.config.get_text_config(), "cross_attention_layers")
    if crosses and model_kwargs.get("pixel_values") is not None:
        return "pixel_values, whose states cross attention puts in the cache"
    has_ids = model_kwargs.get("inputs_embeds") is None or model_kwargs.get("input_ids") is not None
    if call.drafter.reads_prompt and not has_ids:
        return "inputs_embeds without the input_ids of the prompt"
    if config.cache_implementation == "static" and (has_own_cache or not takes_fixed_size(backbone)):
        return "cache_implementation='static'"
    return _obstacle_of_config(config) or call.drafter.obstacle(config, model_kwargs)


def _obstacle_of_config(config: GenerationConfig, of_drafts: bool = True) -> str | None:
    """Return an obstacle to our loop in a call on any backbone, in the user's words.

    Caches without rollback hinder drafts alone: without `of_drafts` they are none.
    """
    for name, is_plain in _PLAIN.items():
        value = getattr(config, name, None)
        if not is_plain(value) and (of_drafts or name != "cache_implementation"):
            return f"{name}={value!r}"
    if config.penalty_alpha and (config.top_k or 0) > 1 and not config.do_sample:
        return "contrastive search (penalty_alpha)"
    if config.constraints is not None or config.force_words_ids is not None:
        return "constrained beams"
    if type(config.watermarking_config).__name__ == "SynthIDTextWatermarkingConfig":
        return "a SynthID watermark, which counts its calls"
    return None


def _obstacle_to_blocks(model: PreTrainedModel, model_kwargs: Kwargs, prompt: Tensor, end: int) -> str | None:
    """Return an obstacle to blocks of tokens in a call up to position `end`, of a backbone's positions or columns.

    Frequencies may depend on the longest position: a token of a block would be rotated as the later ones are, and
    not as it is alone. That happens at a border alone, and not after one that is crossed once. Where attention
    chooses blocks of columns, tokens after padding may see nothing, and get the mean of all columns.
    """
    mask, cache, name = model_kwargs.get("attention_mask"), model_kwargs.get(CACHE), type(model).__name__
    if chooses_blocks(model.config) and mask is not None and not bool(mask.all()):
        return f"padding in attention_mask of {name}, whose attention chooses blocks of columns"
    is_offloaded = isinstance(cache, Cache) and cache.offloading
    is_special = compresses_windows(model.config) or has_short_convolutions(model.config)
    if is_offloaded and (layer_class(model.config) is not None or is_special):
        return f"an offloaded cache of {name}, whose attention reads columns its own way"
    border = rotary_border(model.config.get_text_config())
    if border is None or end <= border[1]:
        return None
    begins = prompt.shape[1] if mask is None else int(mask.sum(1).max())
    if border[0] == "longrope" and begins > border[1]:
        return None
    return f"rope_type={border[0]!r} of {name}, whose frequencies change at position {border[1]}"


def _has_keywords(model: PreTrainedModel, model_kwargs: Kwargs) -> bool:
    """Return whether forwards after the prompt may need other keyword arguments than those of every model."""
    methods = model.prepare_inputs_for_generation, model._update_model_kwargs_for_generation
    is_usual = all(is_base(cast(Callable[..., object], method)) for method in methods)
    return not is_usual or any(value is not None and name not in USUAL for name, value in model_kwargs.items())


def _warn_of_unread(config: GenerationConfig) -> None:
    """Warn of fields that our loop ignores."""
    for name, instead in _UNREAD.items():
        value = getattr(config, name, None)
        is_read = name == "compile_config" and config.cache_implementation == "static"
        if value is not None and not is_read:
            logger.warning_once(f"{name}={value!r} is not read where drafts are verified by this library: {instead}.")


def _refuse_source(reason: str | None, options: CallOptions) -> None:
    """Raise a ValueError where uniforms or a seed ask for our loop, and there is a reason against it."""
    if reason and options.needs_our_loop:
        name = "seed" if "seed" in options.extra else "uniforms"
        raise ValueError(f"{name}= cannot be combined with {reason}; drop one of them")
