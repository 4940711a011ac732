"""`generate` with parallel token prediction: options, uniforms and verifiers of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ...configuration.ptp import PTPConfig
from ...generation.assistant.drafter import AssistantDrafter
from ...generation.attach import MTPGenerationMixin
from ...generation.backbone.wrapped_models import Kwargs
from ...generation.call.options import CallOptions, DraftOptions, Sources, first_set
from ...generation.contract import DraftSession
from ...generation.drafter import BaseDrafter, DrafterFacts
from ...generation.verification.verifiers import CoupledVerifier, GreedyVerifier, SampledVerifier, Uniforms, Verifier
from ..heads.window_distribution import WindowDistribution
from .session import ParallelSession, SeparateSession

_LAYOUTS = ("quadratic", "linear")
_SLOTS = {
    "one_hot": "parallel token prediction; a slot predicts the token that its own uniform picks",
    "categorical": "parallel token prediction; a slot predicts the distribution of the token after its own",
    "mask": "masked prediction; a slot, made of a mask token, predicts the distribution of the token after its own",
}


class ParallelDrafter(BaseDrafter):
    """Drafts from uniforms; see `ParallelGenerationMixin` for the options of a call."""

    config: PTPConfig
    slot_distribution: Callable[[Tensor, Tensor], WindowDistribution]
    rules = ("coupled", "block", "token")
    reads_prompt, drafts_at_once = False, True
    not_served = "it drafts inside the call that verifies, for which no engine has code"

    @property
    def window(self) -> int:
        """The longest draft and one: N slots draft N - 1 tokens (one-hot, slot 0 repeats the target's pick) or N."""
        return self.config.num_slots + (not self.config.is_one_hot)

    @classmethod
    def facts(cls, config: PTPConfig, drafter: object = None) -> DrafterFacts:
        window = config.num_slots + (not config.is_one_hot)
        reads = ("Uniforms as", f"`{config.features}`, {config.feature_dim} features")
        rows = [
            ("Drafts", f"`{config.variant}`: {_SLOTS[config.variant]}"),
            ("Slots", f"{config.num_slots}: {window - 1} drafted besides the next token"),
            reads if config.reads_uniforms else ("Sampler head", f"`{config.sampler}`"),
            ("Learned for", ", ".join(f"{name} {value}" for name, value in config.sampling.items())),
        ]
        paper = "samragh2025future" if config.variant == "mask" else "draxler2025ptp"
        return DrafterFacts("uniforms", window, rows, (paper,))

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Choose the rule; refuse slots that draft nothing, and uniforms and seeds where they would not fix tokens."""
        extra: Kwargs = {"slot_budget": 3 * self.config.num_slots} | options.extra
        default = "coupled" if self.config.is_one_hot or "uniforms" in extra else "block"
        rule, budget, least = options.verification or default, extra["slot_budget"], 1 + self.config.is_one_hot
        if options.draft_tree is not None:
            raise ValueError(f"draft_tree={options.draft_tree!r}: slots draft chains; leave it out")
        if budget not in _LAYOUTS and (type(budget) is not int or budget < least):
            raise ValueError(f"slot_budget={budget!r} must be at least {least}, or one of {_LAYOUTS}")
        source = next((name for name in ("seed", "uniforms") if name in extra), None)
        if source and (config.num_beams or 1) > 1:
            raise ValueError(f"{source}= cannot be combined with num_beams={config.num_beams}")
        if source == "seed" and config.do_sample and options.schedule == "adaptive" and rule != "coupled":
            raise ValueError(f"seed= with verification={rule!r} cannot be repeated with the schedule 'adaptive'")
        if extra.get("uniforms") is not None:
            uniforms = extra["uniforms"] = torch.as_tensor(extra["uniforms"])
            if source == "seed" or not config.do_sample or rule != "coupled":
                raise ValueError("uniforms= fixes tokens with do_sample and verification='coupled', without seed=")
            if not bool(((uniforms >= 0) & (uniforms < 1)).all()):
                raise ValueError("uniforms must lie in [0, 1)")
        needs_loop = bool(config.do_sample and source)
        return replace(options, verification=rule, extra=extra, needs_our_loop=needs_loop)

    def start(self, options: DraftOptions) -> ParallelSession:
        return ParallelSession(self.config, options, make_uniforms(options), self.slot_distribution)

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        if not options.do_sample:
            return GreedyVerifier(options.may_exclude_all)
        uniforms = cast(ParallelSession, session).uniforms
        is_coupled = options.verification == "coupled"
        return CoupledVerifier(uniforms) if is_coupled else SampledVerifier(options.verification, uniforms)


def make_uniforms(options: DraftOptions, may_stay: bool = True) -> Uniforms:
    """Return the uniforms of a call: fixed by position where draft and target pick with the same ones."""
    prompt, extra = options.prompt, options.extra
    is_coupled = options.do_sample and options.verification == "coupled"
    stay = (is_coupled and may_stay) or not options.speculates  # without drafts nothing is rejected
    table = extra.get("uniforms")
    shape = len(prompt), options.max_length - prompt.shape[1]
    if table is not None and (table.dim() != 2 or table.shape[0] != shape[0] or table.shape[1] < shape[1]):
        raise ValueError(f"uniforms have shape {tuple(table.shape)}; give one per new token, {shape}")
    table = None if table is None else table.to(prompt.device)
    return Uniforms(shape[0], prompt.device, table, extra.get("seed"), stay)


class ParallelGenerationMixin(ParallelDrafter, MTPGenerationMixin):
    """`generate` that drafts a block of tokens from uniforms, in the forward that verifies the last block.

    Beside the options of `MTPGenerationMixin`:

    - `verification`: `"coupled"` (the same uniforms for draft and target; the default where slots predict tokens,
      `variant="one_hot"`), `"block"` (the default where they predict distributions) or `"token"`;
    - `uniforms`: [B, max_new_tokens] in [0, 1), `uniforms[:, 0]` for the first new token: the tokens are those of
      sequential inverse-CDF decoding, with or without `use_mtp`;
    - `seed`: an int, whose stream i is that of sequence i, or one int per sequence. It repeats a run under every rule,
      and a sequence depends on its seed and its prompt alone: not on its neighbours, not on `max_new_tokens`. With
      `verification="coupled"` it does not depend on `use_mtp` either;
    - `slot_budget`: auxiliary slots per forward, split over the possible acceptance counts (3 N by default); or
      `"quadratic"`: N after every draft, so that each count leaves a whole new draft; or `"linear"`: N after the last
      draft alone, so that a plain step follows a rejection (both of masked prediction, arXiv 2507.11851);
    - `temperature`, `top_k`, `top_p`: where none is set, those that the drafts were learned for
      (`config.sampling`), not transformers' own.
    """

    def sampling_defaults(self, sources: Sources) -> Kwargs:
        """Return what drafts were learned for, where a call samples and sets no temperature, top-k or top-p."""
        learned = self.config.sampling
        is_set = any(first_set(name, sources) is not None for name in learned)
        return {} if is_set or not first_set("do_sample", sources) else dict(learned)


class ParallelAssistant(ParallelDrafter, AssistantDrafter):
    """Lets a model with parallel token prediction draft for a larger one with the same vocabulary.

    The larger model verifies: the output is its own, by every rule. With `verification="coupled"` and a seed or
    uniforms, it is that of sequential inverse-CDF decoding by the larger model alone.

    Example:
        >>> small.attach(large)
        >>> out = large.generate(**inputs, assistant_model=small, do_sample=True, seed=7)
    """

    reads_prompt = True

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        super().__init__(model, model.config.num_slots, vocab_size)

    @property
    def config(self) -> PTPConfig:
        return cast(PTPConfig, self.model.config)

    def slot_distribution(self, states: Tensor, before: Tensor) -> WindowDistribution:
        return cast(Any, self.model).slot_distribution(states, before)

    @property
    def window(self) -> int:
        """The longest draft and one: slots draft a token each, as does the last token before distributions."""
        return self.config.num_slots + 1 + (not self.config.is_one_hot)

    longest_draft, default_draft = BaseDrafter.longest_draft, BaseDrafter.default_draft

    def start(self, options: DraftOptions) -> SeparateSession:
        return SeparateSession(self.model, options, make_uniforms(options), self.shared_with(options.backbone))
