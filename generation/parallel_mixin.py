"""`generate` for parallel token prediction: which rule, which uniforms, how many slots."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from ..configuration.ptp import SAMPLING
from .drafters.best_of import BestOfDrafter, CentralRule
from .drafters.parallel import ParallelDrafter
from .drafters.protocol import Drafter, DraftOptions
from .mixins import MTPGenerationMixin
from .options import CallOptions, first_set
from .rules import CoupledRule, GreedyRule, Rule, SampledRule
from .uniforms import Uniforms

logger = logging.get_logger(__name__)


class ParallelGenerationMixin(MTPGenerationMixin):
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

    rules = ("coupled", "block", "token")

    @property
    def window(self) -> int:
        """The longest draft and one: N slots draft N - 1 tokens (one-hot, slot 0 repeats the target's pick) or N."""
        return self.config.num_slots + (self.config.variant == "categorical")

    def sampling_defaults(self, sources: tuple[Any, ...]) -> dict[str, Any]:
        """Temperature, top-k and top-p that the drafts were learned for, where a call samples and sets none of them."""
        is_set = any(first_set(name, sources) is not None for name in self.config.sampling)
        return {} if is_set or not first_set("do_sample", sources) else dict(self.config.sampling)

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> None:
        """Checks what cannot be meant, and chooses the rule.

        Raises:
            ValueError: Uniforms outside [0, 1), with another rule than the coupled one or beside a seed; no slots; an
                option of another kind of drafter.
        """
        extra = options.extra
        if options.draft_tree is not None:
            raise ValueError(
                f"draft_tree={options.draft_tree!r}: parallel token prediction drafts chains; leave it out"
            )
        default = "coupled" if self.config.predicts_tokens or "uniforms" in extra else "block"
        options.verification = options.verification or default
        if extra.get("slot_budget", 1) < 1:
            raise ValueError(
                f"slot_budget={extra['slot_budget']} must be at least 1; to decode plainly use use_mtp=False"
            )
        _check_best_of(extra.get("best_of", 1), config, options)
        _check_uniforms(config, options)
        extra.setdefault("slot_budget", 3 * self.config.num_slots)
        given = "uniforms" in extra or "seed" in extra
        options.needs_our_loop = bool(config.do_sample and options.verification == "coupled" and given)

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

    def make_drafter(self, options: DraftOptions) -> Drafter:
        """Slots behind every possible number of accepted drafts."""
        if options.drafts:
            self._warn_of_mismatch(options)
        many = options.extra.get("best_of", 1)
        uniforms = _uniforms(options, stay=options.do_sample and options.verification == "coupled" and many == 1)
        if many > 1:
            return BestOfDrafter(self.config, options, uniforms, many=many)
        return ParallelDrafter(self.config, options, uniforms)

    def make_rule(self, options: DraftOptions, drafter: Drafter) -> Rule:
        """Greedy, coupled, or a speculative rule with uniforms of its own."""
        if not options.do_sample:
            return GreedyRule()
        if options.verification != "coupled":
            return SampledRule(options.verification, drafter.uniforms)
        return CoupledRule(drafter.uniforms) if drafter.many == 1 else CentralRule(drafter)

    def _warn_of_mismatch(self, options: DraftOptions) -> None:
        learned, asked = self.config.sampling, options.sampling
        if not options.do_sample or all((asked[name] or SAMPLING[name]) == learned[name] for name in SAMPLING):
            return
        shown = ", ".join(f"{name}={learned[name]}" for name in SAMPLING)
        logger.warning_once(
            f"The drafts were learned for {shown}, and the target is now sampled with "
            f"{', '.join(f'{name}={asked[name]}' for name in SAMPLING)}: the text stays exact, but fewer drafts are "
            "accepted, so that every token costs more calls. Leave these options out, or distil with "
            f"sampling={asked}."
        )


def _check_best_of(many: int, config: GenerationConfig, options: CallOptions) -> None:
    """Refuses what best-of-M cannot be combined with."""
    if not isinstance(many, int) or many < 1:
        raise ValueError(f"best_of={many!r} must be a whole number of at least 1")
    if many == 1:
        return
    if "uniforms" in options.extra:
        raise ValueError(f"best_of={many} draws its uniforms anew: drop uniforms=, or repeat a run with seed=")
    if options.verification != "coupled":
        raise ValueError(
            f"best_of={many} chooses among coupled drafts: it needs verification='coupled', not "
            f"{options.verification!r}"
        )
    if not config.do_sample:
        raise ValueError(f"best_of={many} is for sampling: pass do_sample=True, or drop it")


def _check_uniforms(config: GenerationConfig, options: CallOptions) -> None:
    uniforms = options.extra.get("uniforms")
    if uniforms is None:
        return
    if options.verification != "coupled":
        raise ValueError(f"uniforms= fixes the tokens only with verification='coupled', not {options.verification!r}")
    if "seed" in options.extra:
        raise ValueError("give uniforms= or seed=, not both")
    if not config.do_sample:
        raise ValueError("uniforms= is for sampling: pass do_sample=True, or drop it")
    if not isinstance(uniforms, torch.Tensor):
        raise ValueError(f"uniforms={type(uniforms).__name__} must be a tensor [B, max_new_tokens]")
    low, high = float(uniforms.min()), float(uniforms.max())
    if not (low >= 0 and high < 1):
        raise ValueError(f"uniforms must lie in [0, 1), but they lie between {low} and {high}")


def _uniforms(options: DraftOptions, stay: bool) -> Uniforms:
    """The uniforms of a call.

    Raises:
        ValueError: Uniforms of another shape than [B, max_new_tokens].
    """
    prompt, table = options.prompt, options.extra.get("uniforms")
    shape = len(prompt), options.max_length - prompt.shape[1]
    if table is not None and (table.dim() != 2 or table.shape[0] != shape[0] or table.shape[1] < shape[1]):
        raise ValueError(f"uniforms have shape {tuple(table.shape)}; give one per new token, {shape}")
    table = None if table is None else table.to(prompt.device)
    return Uniforms(shape, prompt.device, table, options.extra.get("seed"), stay)
