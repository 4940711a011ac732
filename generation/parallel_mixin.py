"""`generate` for parallel token prediction: which rule, which uniforms, how many slots."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from ..configuration.ptp import SAMPLING
from .drafters.best_of import BestOfDrafter, BestOfLoop
from .drafters.parallel import ParallelDrafter, ParallelLoop
from .full_history import FullHistoryMixin
from .mixin import first_set

logger = logging.get_logger(__name__)


class ParallelGenerationMixin(FullHistoryMixin):
    """`generate` that drafts a block of tokens from uniforms, in the forward that verifies the last block.

    Beside the options of `MTPGenerationMixin`:

    - `verification`: `"coupled"` (the same uniforms for draft and target; the default where slots predict tokens,
      `variant="one_hot"`), `"block"` (the default where they predict laws) or `"token"`;
    - `uniforms`: [B, max_new_tokens] in [0, 1), `uniforms[:, 0]` for the first new token: the tokens are those of
      sequential inverse-CDF decoding, with or without `use_mtp`;
    - `seed`: draws the uniforms from a generator of its own, so that a run can be repeated;
    - `slot_budget`: auxiliary slots per forward, split over the possible acceptance counts (3 N by default);
    - `temperature`, `top_k`, `top_p`: where none is set, those that the drafts were learned for
      (`config.sampling`), not transformers' own;
    - `best_of`: M vectors of uniforms to draft from in every cycle, of which the most central is kept: more drafts are
      accepted, for M^2 times the slots. A run with `seed` can be repeated, but it is not that of `use_mtp=False`.
    """

    _rules = ("coupled", "block", "token")

    @property
    def window(self) -> int:
        """The longest draft and one: N slots draft N - 1 tokens (one-hot, slot 0 repeats the target's pick) or N."""
        return self.config.num_slots + (self.config.variant == "categorical")

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        own = {name: kwargs.pop(name, None) for name in ("uniforms", "seed", "slot_budget", "best_of")}
        rule = kwargs.get("verification") or ("coupled" if self.config.predicts_tokens else "block")
        rule = "coupled" if own["uniforms"] is not None and not kwargs.get("verification") else rule
        learned = self._learned_law((kwargs, generation_config, self.generation_config))
        kwargs |= learned | {"verification": rule}
        config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        self._check_options(config, rule, own)
        config.use_slots = bool(config.use_mtp)
        if config.do_sample and rule == "coupled" and (own["uniforms"] is not None or own["seed"] is not None):
            config.use_mtp = True  # our loop also decodes one token at a time from given uniforms
        config.uniforms, config.seed = own["uniforms"], own["seed"]
        config.slot_budget = own["slot_budget"] or 3 * self.config.num_slots
        config.best_of = own["best_of"] or 1
        return config, model_kwargs

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> GenerationConfig:
        """Checks the length of the whole text at the door.

        Raises:
            ValueError: The text would go beyond the backbone's table of learned positions.
        """
        config = super()._prepare_generated_length(*args, **kwargs)
        limit = self.config.learned_positions
        if limit is not None and config.max_length > limit + 1:  # the last token is never fed
            raise ValueError(
                f"max_length={config.max_length} (prompt and new tokens) is beyond the {limit} learned positions of "
                f"{self.config.backbone_config.model_type}; ask for {config.max_length - limit - 1} fewer new tokens"
            )
        return config

    def _learned_law(self, sources: tuple[Any, ...]) -> dict[str, Any]:
        """Temperature, top-k and top-p that the drafts were learned for, where a call samples and sets none of them."""
        is_set = any(first_set(name, sources) is not None for name in self.config.sampling)
        return {} if is_set or not first_set("do_sample", sources) else dict(self.config.sampling)

    def _check_options(self, config: GenerationConfig, rule: str, own: dict[str, Any]) -> None:
        """Refuses what cannot be meant.

        Raises:
            ValueError: Uniforms outside [0, 1), with another rule than the coupled one or beside a seed; no slots.
        """
        uniforms = own["uniforms"]
        if own["slot_budget"] is not None and own["slot_budget"] < 1:
            raise ValueError(
                f"slot_budget={own['slot_budget']} must be at least 1; to decode plainly use use_mtp=False"
            )
        if own["best_of"] is not None:
            _check_best_of(own["best_of"], config, rule, uniforms)
        if uniforms is None:
            return
        if rule != "coupled":
            raise ValueError(f"uniforms= fixes the tokens only with verification='coupled', not {rule!r}")
        if own["seed"] is not None:
            raise ValueError("give uniforms= or seed=, not both")
        if not config.do_sample:
            raise ValueError("uniforms= is for sampling: pass do_sample=True, or drop it")
        low, high = float(uniforms.min()), float(uniforms.max())
        if not (low >= 0 and high < 1):
            raise ValueError(f"uniforms must lie in [0, 1), but they lie between {low} and {high}")

    def _warn_of_mismatch(self, config: GenerationConfig) -> None:
        learned = self.config.sampling
        asked = {name: getattr(config, name) for name in SAMPLING}
        if not config.do_sample or all((asked[name] or SAMPLING[name]) == learned[name] for name in SAMPLING):
            return
        shown = ", ".join(f"{name}={learned[name]}" for name in SAMPLING)
        logger.warning_once(
            f"The drafts were learned for {shown}, and the target is now sampled with "
            f"{', '.join(f'{name}={asked[name]}' for name in SAMPLING)}: the text stays exact, but fewer drafts are "
            "accepted, so that every token costs more calls. Leave these options out, or distil with "
            f"sampling={asked}."
        )

    def _drafter(self, generation_config: GenerationConfig, logits_processor: LogitsProcessorList) -> ParallelDrafter:
        if generation_config.best_of > 1:
            return BestOfDrafter(self, generation_config, logits_processor, many=generation_config.best_of)
        return ParallelDrafter(self, generation_config, logits_processor)

    def _loop(self, model: Any, drafter: ParallelDrafter, *args: Any, **kwargs: Any) -> ParallelLoop:
        loop = BestOfLoop if isinstance(drafter, BestOfDrafter) else ParallelLoop
        return loop(model, drafter, *args, **kwargs)

    def _assisted_decoding(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **kwargs: Any,
    ) -> Any:
        if generation_config.use_slots:
            self._warn_of_mismatch(generation_config)
        _draw_uniforms(generation_config, input_ids)
        return super()._assisted_decoding(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **kwargs
        )


def _check_best_of(many: int, config: GenerationConfig, rule: str, uniforms: torch.Tensor | None) -> None:
    """Refuses what best-of-M cannot be combined with."""
    if not isinstance(many, int) or many < 1:
        raise ValueError(f"best_of={many!r} must be a whole number of at least 1")
    if many == 1:
        return
    if uniforms is not None:
        raise ValueError(f"best_of={many} draws its uniforms anew: drop uniforms=, or repeat a run with seed=")
    if rule != "coupled":
        raise ValueError(f"best_of={many} chooses among coupled drafts: it needs verification='coupled', not {rule!r}")
    if not config.do_sample:
        raise ValueError(f"best_of={many} is for sampling: pass do_sample=True, or drop it")


def _draw_uniforms(config: GenerationConfig, input_ids: torch.Tensor) -> None:
    """Fills in the uniforms of the output positions, and the generator of all further ones.

    Raises:
        ValueError: Uniforms of another shape than [B, max_new_tokens].
    """
    shape = len(input_ids), config.max_length - input_ids.shape[1]
    config.uniform_generator = None
    if config.seed is not None:
        config.uniform_generator = torch.Generator(input_ids.device).manual_seed(config.seed)
    if config.uniforms is None:
        config.uniforms = torch.rand(shape, generator=config.uniform_generator, device=input_ids.device)
    elif config.uniforms.dim() != 2 or config.uniforms.shape[0] != shape[0] or config.uniforms.shape[1] < shape[1]:
        raise ValueError(f"uniforms have shape {tuple(config.uniforms.shape)}; give one per new token, {shape}")
    config.uniforms = config.uniforms.to(input_ids.device)
