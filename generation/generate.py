"""`generate` that speculates: on by default for models that draft themselves, by `assistant_model` for any backbone.

`generate` is transformers' own, run on a *view* of the backbone: an object of a subclass that shares everything with
the backbone, and beside it holds the state of this one call. The backbone and its class stay as they are, nothing of a
call is left behind, and two calls at a time do not meet.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.generation import CandidateGenerator, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..configuration.fields import learned_positions
from ..modeling.checkpointing import caches_kept
from .call.options import OWN, CallOptions, DraftOptions, obstacle, prepared_options, warn_of_unread
from .call.processing import counts_calls
from .candidates import candidate_generator
from .loop import SpeculativeLoop
from .protocols import Drafter, DrafterMixin, schedule_of, warn_of_threshold
from .target.backbones import check_trees
from .target.cache import can_roll_back, is_repackable
from .target.inputs import crosses_border, last_place, not_continued
from .trees.choice import choose_tree

logger = logging.get_logger(__name__)


_DEPTH = 32
"""Deeper than any tree: rows that are ahead are drafted for beyond the text's end, and slots lie behind drafts."""


_OF_THE_CALL = {"past_key_values", "use_cache", "input_ids"}
"""Keyword arguments of the model that trials on the same prompt make for themselves."""


class _Call:
    """The state of one call of `generate`.

    Attributes:
        backbone: The model whose tokens count.
        runner: What runs the forwards; on tokens it is the backbone.
        speculator: What makes the drafter; None: nobody.
        own: Keyword arguments that only this library knows.
        options: All options, once they were read.
        speculates: Whether drafts are made.
        is_ours: Whether our loop decodes; it may do so without drafts.
        cache_is_given: Whether the cache is the caller's own.
    """

    def __init__(self, backbone: PreTrainedModel, drafter: Any, own: dict[str, Any]) -> None:
        self.backbone, self.drafter, self.own = backbone, drafter, own
        self.runner = backbone if drafter is None else drafter.runner(backbone)
        self.options: CallOptions | None = None
        self.speculates = self.is_ours = self.cache_is_given = False


class _View:
    """A backbone during one call: shares the backbone's attributes, and holds the call in a slot of its own."""

    __slots__ = ("speculation_call",)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.speculation_call.runner(*args, **kwargs)


@cache
def _view_class(kind: type) -> type:
    bases = (_View, kind) if issubclass(kind, MTPGenerationMixin) else (_View, MTPGenerationMixin, kind)
    # transformers would refuse every model with states; `_reason_to_decode_plainly` asks whether they can go back
    return type(kind.__name__, bases, {"__module__": kind.__module__, "_is_stateful": False})


def speculate(backbone: PreTrainedModel, drafter: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`backbone.generate(*args, **kwargs)` with the drafts of `speculator` (None: plainly)."""
    own = {name: kwargs.pop(name) for name in OWN if name in kwargs}
    view = object.__new__(_view_class(type(backbone)))
    object.__setattr__(view, "__dict__", backbone.__dict__)
    view.speculation_call = _Call(backbone, drafter, own)
    with torch.no_grad(), caches_kept(backbone):
        return type(view).generate(view, *args, **kwargs)


class MTPGenerationMixin(DrafterMixin, GenerationMixin):
    """Adds lossless speculation to `generate`.

    A model that drafts for itself offers `window` and `start`, a forward that takes `output_hidden_states=-1`,
    and `_new_cache()` where it has a cache of its own. `generate` gains:

    - `use_mtp`: None (on where possible), True (on, or an error that says why not), False (one token at a time);
    - `num_assistant_tokens`: tokens to draft, at most window - 1, which is the default;
    - `num_assistant_tokens_schedule="adaptive"`: drafts as many as pay, up to that bound, none where none pays;
    - `verification`: `"block"` (default) or `"token"`, for sampled drafts.

    A logits processor that must be called once for every token says so by an attribute `counts_calls = True`: the call
    then decodes plainly.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, with the options above."""
        if isinstance(self, _View):
            return super().generate(*args, **kwargs)
        assistant = kwargs.get("assistant_model")
        return speculate(self, None if assistant is not None else self, args, kwargs)

    def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: continuous batching has a loop of its own, which would not speculate.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__} does not offer generate_batch (continuous batching); use generate, which takes "
            "batches of any size"
        )

    @property
    def _current(self) -> _Call | None:
        return getattr(self, "speculation_call", None) if isinstance(self, _View) else None

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Decides whether to speculate and how far."""
        call = self._current
        if call is None:
            return super()._prepare_generation_config(generation_config, **kwargs)
        sources = (kwargs, generation_config, self.generation_config)
        kwargs |= {} if call.drafter is None else call.drafter.sampling_defaults(sources)
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        if config.assistant_early_exit is not None:
            raise ValueError(
                f"assistant_early_exit={config.assistant_early_exit} is not offered here: it would cut the layers of "
                f"{type(self).__name__} in place; leave it out"
            )
        if call.drafter is None or config.prompt_lookup_num_tokens:
            call.options = CallOptions.read(call.own, sources)
            _refuse_unread(call.own, config)
            config.use_mtp = False
            return config, model_kwargs
        call.options = options = prepared_options(call.drafter, call.backbone, call.own, sources, config)
        call.speculates = self._decides_to_speculate(config, model_kwargs)
        if call.speculates:
            warn_of_unread(config)
        if call.speculates and options.draft_tree is not None:
            check_trees(call.backbone)
        options.num_assistant_tokens = _draft_length(options.num_assistant_tokens, call.drafter)
        if options.needs_our_loop and (reason := obstacle(config, model_kwargs, of_drafts=False)):
            _refuse_source(reason, options)
        call.is_ours = config.use_mtp = call.speculates or options.needs_our_loop
        return config, model_kwargs

    def _decides_to_speculate(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
        call = self._current
        if call.options.use_mtp is False:
            return False
        if call.drafter.longest_draft() == 0:
            if call.options.use_mtp:
                logger.warning("use_mtp=True: the head has window 1 and drafts nothing; decoding one token at a time.")
            return False
        reason = self._reason_to_decode_plainly(config, model_kwargs)
        if reason:
            _tell(reason, call.options)
        return not reason

    def _reason_to_decode_plainly(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, StaticCache):
            return "a StaticCache"
        if not hasattr(self, "_new_cache"):
            if cache is not None and not is_repackable(cache) and not hasattr(cache, "keep_last"):
                return f"past_key_values with layers that cannot go back ({type(cache).__name__})"
            if not can_roll_back(self._current.backbone) or not self._supports_default_dynamic_cache():
                return f"the recurrent states of {type(self).__name__}, which cannot go back behind a rejected draft"
        own = self._current.drafter.obstacle(config, model_kwargs)
        return obstacle(config, model_kwargs) or own

    def _validate_generation_mode(
        self,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        """Lets `num_return_sequences` above 1 pass: our loop decodes batches, transformers' assisted loop does not."""
        call, count = self._current, generation_config.num_return_sequences
        if call is not None and call.is_ours:
            generation_config.num_return_sequences = 1
        try:
            super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        finally:
            generation_config.num_return_sequences = count

    def _prepare_model_inputs(
        self, inputs: torch.Tensor | None, bos_token_id: torch.Tensor | None, model_kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, str | None, dict[str, Any]]:
        """Checks the prompt at the door.

        Raises:
            ValueError: An empty prompt, ids outside the vocabulary, or more tokens than the model has positions.
        """
        tensor, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        text = self.config.get_text_config()
        if name == "input_ids":
            _check_prompt(tensor, text.vocab_size)
        limit = text.max_position_embeddings if hasattr(self, "_new_cache") else learned_positions(text)
        if limit is not None and tensor.shape[1] > limit:
            raise ValueError(
                f"the prompt has {tensor.shape[1]} tokens, more than max_position_embeddings={limit}; shorten it"
            )
        return tensor, name, model_kwargs

    def heal_tokens(self, input_ids: torch.Tensor, tokenizer: Any = None) -> torch.Tensor:
        """transformers' own, which calls `generate`: on the backbone, for a view holds one call and not two."""
        call = self._current
        return (super() if call is None else call.backbone).heal_tokens(input_ids, tokenizer)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Starts with the model's own kind of cache, or else with the one that transformers would take."""
        new_cache, call = getattr(self, "_new_cache", None), self._current
        is_given = model_kwargs.get("past_key_values") is not None
        fresh = generation_config.use_cache is not False and not is_given
        if call is not None:
            call.cache_is_given = is_given
        if new_cache and fresh:
            if generation_config.cache_implementation is not None:
                logger.warning_once(
                    f"cache_implementation={generation_config.cache_implementation!r} is ignored: "
                    f"{type(self).__name__} has a cache of its own."
                )
                generation_config.cache_implementation = None
            model_kwargs["past_key_values"] = new_cache()
        elif fresh and call is not None and call.is_ours and generation_config.cache_implementation != "offloaded":
            generation_config.cache_implementation = None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def _prefill(
        self, input_ids: torch.Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """transformers' first pass; a cache of its own kind forgets what it was fed of rows that had ended."""
        cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
        if mask is not None and hasattr(cache, "drop_padding"):
            cache.drop_padding(mask)
        return super()._prefill(input_ids, generation_config, model_kwargs, **kwargs)

    def _get_candidate_generator(
        self,
        generation_config: GenerationConfig,
        input_ids: torch.Tensor,
        inputs_tensor: torch.Tensor | None,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        assistant_model: Any = None,
        **kwargs: Any,
    ) -> CandidateGenerator:
        """This call's own drafter for transformers' assisted loop, unless another assistant was asked for."""
        call = self._current
        drafter = self if call is None and generation_config.use_mtp else call and call.drafter
        if drafter is not None and assistant_model is None and generation_config.use_mtp:
            return candidate_generator(drafter, self, generation_config, logits_processor, model_kwargs, input_ids)
        return super()._get_candidate_generator(
            generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, assistant_model, **kwargs
        )

    def _assisted_decoding(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        inputs_tensor: torch.Tensor | None = None,
        assistant_model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Our loop for our drafts; transformers' loop for anybody else's assistant."""
        call = self._current
        common = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        if call is None or not call.is_ours:
            generation_config.use_mtp = False
            return super()._assisted_decoding(
                *common, inputs_tensor=inputs_tensor, assistant_model=assistant_model, **kwargs
            )
        model_kwargs = {key: value for key, value in kwargs.items() if key not in ("tokenizer", "assistant_tokenizer")}
        counting = next((p for p in logits_processor if counts_calls(p)), None)
        reason = None if counting is None else f"{type(counting).__name__}, which counts its calls"
        end = generation_config.max_length + 2 * max(call.options.num_assistant_tokens, _DEPTH)
        reason = reason or crosses_border(call.backbone, model_kwargs, input_ids, end)
        if reason := reason or not_continued(model_kwargs, input_ids):
            if call.options.needs_our_loop:
                _refuse_source(reason, call.options)
            _tell(reason, call.options)
            return self._sample(*common, **model_kwargs)
        if call.options.draft_tree == "auto":
            choose_tree(
                partial(speculate, call.backbone), call.drafter, call.options, generation_config, input_ids,
                last_place(self.config.get_text_config(), input_ids.shape[1], 2 * _DEPTH),
                {name: model_kwargs[name] for name in model_kwargs.keys() - _OF_THE_CALL}
                | {"synced_gpus": synced_gpus},
            )  # fmt: skip
        options = DraftOptions.of_call(
            call.options, call.backbone, call.speculates, generation_config, logits_processor, input_ids
        )
        session = call.drafter.start(options)
        warn_of_threshold(options, session, type(call.drafter).__name__)
        rule = call.drafter.make_verifier(options, session)
        with schedule_of(call.drafter, session, options) as schedule:
            loop = SpeculativeLoop(
                self, session, rule, options, schedule, input_ids, generation_config, stopping_criteria, model_kwargs,
                call.cache_is_given,
            )  # fmt: skip
            return loop.run(streamer, synced_gpus)


def _tell(reason: str, options: CallOptions) -> None:
    """Says why a call decodes plainly.

    Raises:
        ValueError: Speculation was asked for by name.
    """
    if options.use_mtp:
        raise ValueError(f"use_mtp=True cannot be combined with {reason}; drop one of them")
    logger.warning_once(f"Decoding one token at a time, without speculation, because of {reason}.")


def _refuse_source(reason: str, options: CallOptions) -> None:
    """Says what cannot be combined with uniforms or with a seed of the caller's.

    Raises:
        ValueError: Always.
    """
    name = next(name for name in ("seed", "uniforms") if name in options.extra)
    raise ValueError(f"{name}= cannot be combined with {reason}; drop one of them")


def _refuse_unread(own: dict[str, Any], config: GenerationConfig) -> None:
    """Refuses options of our drafters that a call gives where another one was asked for.

    Raises:
        ValueError: There is one.
    """
    given = next((name for name, value in own.items() if value is not None), None)
    if given is not None:
        other = "prompt_lookup_num_tokens" if config.prompt_lookup_num_tokens else "assistant_model"
        raise ValueError(f"{given}= is not read by {other}, which drafts here; drop one of them")


def _draft_length(asked: int | None, drafter: Drafter) -> int:
    longest = drafter.longest_draft()
    if asked is None:
        return drafter.default_draft()
    if longest is not None and asked > longest > 0:
        logger.warning_once(f"num_assistant_tokens={asked} exceeds window - 1 = {longest}; drafting {longest} tokens.")
    return asked if longest is None else min(asked, longest)


def _check_prompt(input_ids: torch.Tensor, vocab_size: int) -> None:
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids is empty; pass at least one token, for example the bos token")
    low, high = (int(bound) for bound in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"input_ids holds id {wrong}; ids of this model lie in 0 .. {vocab_size - 1}")
