"""`generate` for models with a multi-token head: speculation is on by default, and decided in one place."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StaticCache, StoppingCriteriaList
from transformers.generation import CandidateGenerator, GenerationMode
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .drafters.heads import Drafter, HeadDrafter
from .loop import SpeculativeLoop
from .processing import STATEFUL

logger = logging.get_logger(__name__)


class MTPGenerationMixin(GenerationMixin):
    """Adds lossless self-speculation to `generate`.

    The model provides `window`, `window_law(hidden_states)`, `_new_cache()` where it has a cache of its own, and a
    forward that takes `output_hidden_states=-1`. `generate` gains:

    - `use_mtp`: None (on where possible), True (on, or an error that says why not), False (one token at a time);
    - `num_assistant_tokens`: tokens to draft, at most window - 1, which is the default;
    - `num_assistant_tokens_schedule="adaptive"`: drafts as many as pay, up to that bound, none where none pays;
    - `verification`: `"block"` (default) or `"token"`, for sampled drafts.
    """

    _drafts_any_length = False
    _rules = ("block", "token")

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Decides whether to speculate and how far; the decision lives in this call's copy of the config only."""
        rule = kwargs.pop("verification", None)
        if rule is not None and rule not in self._rules:
            raise ValueError(f"verification={rule!r} is unknown; choose {' or '.join(map(repr, self._rules))}")
        sources = (kwargs, generation_config, self.generation_config)
        asked, drafts, threshold = (
            first_set(name, sources) for name in ("use_mtp", "num_assistant_tokens", "assistant_confidence_threshold")
        )
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        config.verification = rule
        config.use_mtp = self._decides_to_speculate(config, model_kwargs, asked)
        config.num_assistant_tokens = self._draft_length(drafts)
        config.assistant_confidence_threshold = _confidence(threshold)
        return config, model_kwargs

    def _decides_to_speculate(self, config: GenerationConfig, model_kwargs: dict[str, Any], asked: bool | None) -> bool:
        if asked is False or config.prompt_lookup_num_tokens or config.assistant_early_exit:
            return False
        if self.window < 2:
            if asked:
                logger.warning("use_mtp=True: the head has window 1 and drafts nothing; decoding one token at a time.")
            return False
        obstacle = self._obstacle(config, model_kwargs)
        if obstacle and asked:
            raise ValueError(f"use_mtp=True cannot be combined with {obstacle}; drop one of them")
        if obstacle:
            logger.warning_once(f"Decoding one token at a time, without speculation, because of {obstacle}.")
        return not obstacle

    def _draft_length(self, asked: int | None) -> int:
        longest = max(self.window - 1, 1)
        if asked is None:
            return longest
        if self._drafts_any_length and asked > 0:
            return asked
        if asked < 1:
            raise ValueError(
                f"num_assistant_tokens={asked} must be at least 1; to decode without drafts use use_mtp=False"
            )
        if asked > longest:
            logger.warning_once(
                f"num_assistant_tokens={asked} exceeds window - 1 = {longest}; drafting {longest} tokens."
            )
        return min(asked, longest)

    def _validate_generation_mode(
        self,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
        generation_mode_kwargs: dict[str, Any],
    ) -> None:
        """Lets `num_return_sequences` above 1 pass: our loop decodes batches, transformers' assisted loop does not."""
        count = generation_config.num_return_sequences
        if generation_config.use_mtp and generation_mode_kwargs.get("assistant_model") is None:
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
        if name == "input_ids":
            _check_prompt(tensor, self.config.get_text_config().vocab_size)
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and tensor.shape[1] > limit:
            raise ValueError(
                f"the prompt has {tensor.shape[1]} tokens, more than max_position_embeddings={limit}; shorten it"
            )
        return tensor, name, model_kwargs

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Starts with the model's own kind of cache, where it has one."""
        new_cache = getattr(self, "_new_cache", None)
        if new_cache and generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            if generation_config.cache_implementation is not None:
                logger.warning_once(
                    f"cache_implementation={generation_config.cache_implementation!r} is ignored: "
                    f"{type(self).__name__} has a cache of its own."
                )
                generation_config.cache_implementation = None
            model_kwargs["past_key_values"] = new_cache()
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _obstacle(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
        """What in this call rules out speculation, in the user's words."""
        return _obstacle(config, model_kwargs)

    def _drafter(self, generation_config: GenerationConfig, logits_processor: LogitsProcessorList) -> Drafter:
        return HeadDrafter(self.window_law, self.window, generation_config, logits_processor)

    def _loop(self, *args: Any, **kwargs: Any) -> SpeculativeLoop:
        return SpeculativeLoop(*args, **kwargs)

    def _get_candidate_generator(
        self,
        generation_config: GenerationConfig,
        input_ids: torch.Tensor,
        inputs_tensor: torch.Tensor | None,
        logits_processor: LogitsProcessorList,
        model_kwargs: dict[str, Any],
        assistant_model: Any = None,
        **kwargs: Any,
    ) -> CandidateGenerator | Drafter:
        """This model's own drafter, unless another assistant was asked for."""
        if generation_config.use_mtp and assistant_model is None:
            return self._drafter(generation_config, logits_processor)
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
        common = (input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer)
        if assistant_model is not None or not generation_config.use_mtp:
            generation_config.use_mtp = False
            return super()._assisted_decoding(
                *common, inputs_tensor=inputs_tensor, assistant_model=assistant_model, **kwargs
            )
        model_kwargs = {key: value for key, value in kwargs.items() if key not in ("tokenizer", "assistant_tokenizer")}
        if any(isinstance(processor, STATEFUL) for processor in logits_processor):
            logger.warning_once("Decoding one token at a time: a logits processor counts its own calls.")
            return self._sample(*common, **model_kwargs)
        drafter = self._get_candidate_generator(
            generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs
        )
        return self._loop(
            self,
            drafter,
            input_ids,
            generation_config,
            logits_processor,
            stopping_criteria,
            model_kwargs,
            streamer=streamer,
            synced_gpus=synced_gpus,
        ).run()


def first_set(name: str, sources: tuple[Any, ...]) -> Any:
    """The first value that is set: keyword arguments before the config passed, before the model's own."""
    for source in sources:
        value = source.get(name) if isinstance(source, dict) else getattr(source, name, None)
        if value is not None:
            return value
    return None


def _confidence(threshold: float | None) -> float | None:
    """The threshold that was asked for; transformers' own default is meant for assistant models.

    Raises:
        ValueError: It is no probability.
    """
    if threshold is not None and not 0 <= threshold <= 1:
        raise ValueError(f"assistant_confidence_threshold={threshold} must lie between 0 and 1")
    return threshold


def _obstacle(config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
    """What in this call rules out speculation, in the user's words."""
    if (config.num_beams or 1) > 1:
        return f"num_beams={config.num_beams}"
    if config.use_cache is False:
        return "use_cache=False"
    if config.cache_implementation not in (None, "dynamic", "offloaded"):
        return f"cache_implementation={config.cache_implementation!r}"
    cache = model_kwargs.get("past_key_values")
    if isinstance(cache, StaticCache):
        return "a StaticCache"
    if config.penalty_alpha and (config.top_k or 0) > 1 and not config.do_sample:
        return "contrastive search (penalty_alpha)"
    if config.constraints is not None or config.force_words_ids is not None:
        return "constrained beams"
    return None


def _check_prompt(input_ids: torch.Tensor, vocab_size: int) -> None:
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids is empty; pass at least one token, for example the bos token")
    low, high = (int(bound) for bound in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"input_ids holds id {wrong}; ids of this model lie in 0 .. {vocab_size - 1}")
