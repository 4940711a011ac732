"""`generate` with parallel token prediction: options, uniforms and verifiers of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from ...configuration.fields import refuse
from ...configuration.ptp import SAMPLING, PTPConfig
from ...generation.attach import MTPGenerationMixin
from ...generation.call.options import CallOptions, DraftOptions, Sources, first_set
from ...generation.contract import DraftSession
from ...generation.drafter import BaseDrafter, DrafterFacts
from ...generation.tensors.wrapped_models import Kwargs, untyped
from ...generation.verification.verifiers import CoupledVerifier, GreedyVerifier, SampledVerifier, Uniforms, Verifier
from ..heads.window_distribution import WindowDistribution
from .session import BestOfSession, CentralVerifier, ParallelSession

logger = logging.get_logger(__name__)
_LAYOUTS = ("quadratic", "linear")
_SLOTS = {
    "one_hot": "parallel token prediction; a slot predicts the token that its own uniform picks",
    "categorical": "parallel token prediction; a slot predicts the distribution of the token after its own",
    "mask": "masked prediction; a slot, made of a mask token, predicts the distribution of the token after its own",
}


class ParallelDrafter(BaseDrafter):
    """Drafts from uniforms; see `ParallelGenerationMixin` for the options of a call.

    A class that uses it offers `config`, a `PTPConfig`, and `slot_distribution` (`PTPForCausalLM.slot_distribution`).
    """

    config: PTPConfig
    slot_distribution: Callable[[Tensor, Tensor], WindowDistribution]
    rules = ("coupled", "block", "token")
    reads_prompt = False
    not_served = "it drafts inside the call that verifies, for which no engine has code"

    @property
    def window(self) -> int:
        """The longest draft and one: N slots draft N - 1 tokens (one-hot, slot 0 repeats the target's pick) or N."""
        return self.config.num_slots + (not self.config.predicts_first)

    @classmethod
    def facts(cls, config: PTPConfig, drafter: object = None) -> DrafterFacts:
        window = config.num_slots + (not config.predicts_first)
        reads = ("Uniforms as", f"`{config.features}`, {config.feature_dim} features")
        rows = [
            ("Drafts", f"`{config.variant}`: {_SLOTS[config.variant]}"),
            ("Slots", f"{config.num_slots}: {window - 1} drafted besides the next token"),
            reads if config.reads_uniforms else ("Sampler head", f"`{config.sampler}`"),
            ("Learned for", ", ".join(f"{name} {value}" for name, value in (config.sampling or {}).items())),
        ]
        paper = "samragh2025future" if config.variant == "mask" else "draxler2025ptp"
        return DrafterFacts("uniforms", window, rows, (paper,))

    def sampling_defaults(self, sources: Sources) -> Kwargs:
        """Return the temperature, top-k and top-p that the drafts were learned for, where a call samples and sets
        none."""
        learned = self.config.sampling or {}
        is_set = any(first_set(name, sources) is not None for name in learned)
        return {} if is_set or not first_set("do_sample", sources) else dict(learned)

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Validate the options of parallel token prediction, and choose the rule.

        Raises:
            ValueError: Uniforms outside [0, 1), with another rule than the coupled one or with a seed; a seed or
                uniforms where beams are searched; no slots; an option of another kind of drafter.
        """
        extra = options.extra
        if options.draft_tree is not None:
            raise ValueError(f"draft_tree={options.draft_tree!r}: slots draft chains; leave it out")
        default = "coupled" if self.config.predicts_tokens or "uniforms" in extra else "block"
        options = replace(options, verification=options.verification or default)
        _check_options(options, config, self.config)
        has_source = bool(config.do_sample and ("uniforms" in extra or "seed" in extra))
        extra = {"slot_budget": 3 * self.config.num_slots} | extra
        return replace(options, extra=extra, needs_our_loop=has_source)

    def start(self, options: DraftOptions) -> ParallelSession:
        """Return a session with slots after every possible number of accepted drafts."""
        self.warn_of_mismatch(options)
        many, uniforms = options.extra.get("best_of", 1) if options.speculates else 1, make_uniforms(options)
        if many > 1:
            return BestOfSession(self.config, options, uniforms, many=many)
        return ParallelSession(self.config, options, uniforms, distribution=self.slot_distribution)

    def make_verifier(self, options: DraftOptions, session: DraftSession) -> Verifier:
        """Return a greedy verifier, a coupled one, or one of a speculative rule with its own uniforms."""
        if not options.do_sample:
            return GreedyVerifier(options.may_exclude_all)
        session = cast(ParallelSession, session)
        if options.verification != "coupled":
            return SampledVerifier(options.verification, session.uniforms)
        return CentralVerifier(session) if isinstance(session, BestOfSession) else CoupledVerifier(session.uniforms)

    def warn_of_mismatch(self, options: DraftOptions) -> None:
        """Warn of a target that the drafts were not learned for."""
        learned, actual = self.config.sampling or {}, options.sampling
        fits = all((actual[name] or SAMPLING[name]) == learned[name] for name in SAMPLING)
        if fits or not (options.speculates and options.do_sample):
            return
        then, now = (", ".join(f"{name}={values[name]}" for name in SAMPLING) for values in (learned, actual))
        logger.warning_once(
            f"The drafts were learned for {then}, and the target is sampled with {now}: the text stays exact, but "
            f"fewer drafts are accepted. Leave these options out, or distil with sampling={actual}."
        )


def make_uniforms(options: DraftOptions) -> Uniforms:
    """Return the uniforms of a call: fixed by position where draft and target pick with the same ones.

    Raises:
        ValueError: Uniforms of another shape than [B, max_new_tokens], another number of seeds than of sequences.
    """
    prompt, extra = options.prompt, options.extra
    is_coupled = options.do_sample and options.verification == "coupled" and extra.get("best_of", 1) == 1
    stay = is_coupled or not options.speculates  # without drafts nothing is rejected
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
      (`config.sampling`), not transformers' own;
    - `best_of`: M vectors of uniforms to draft from in every cycle, the most central of which is chosen: more drafts
      are accepted, for M^2 times the slots. A run with `seed` can be repeated, but differs from that of
      `use_mtp=False`.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' `generate`, with the options above.

        Raises:
            RuntimeError: transformers' own loop calls it for an assistant: this model was not attached.
        """
        if getattr(kwargs.get("generation_config"), "is_assistant", None):
            raise RuntimeError(f"this {type(self).__name__} is no assistant_model yet: call attach(model) on it first")
        return super().generate(*args, **kwargs)


def _check_options(options: CallOptions, config: GenerationConfig, own: PTPConfig) -> None:
    """Refuse slots that draft nothing, and uniforms, seeds and best-of-M where they would not fix or choose tokens."""
    extra, rule, samples, beams = untyped(options.extra), options.verification, config.do_sample, config.num_beams or 1
    budget, many, uniforms = extra.get("slot_budget", _LAYOUTS[0]), extra.get("best_of", 1), extra.get("uniforms")
    least, is_number = 1 + own.predicts_first, isinstance(budget, int) and not isinstance(budget, bool)
    is_count = isinstance(many, int) and not isinstance(many, bool) and many >= 1
    is_coupled, has_many, names = rule == "coupled", is_count and many > 1, " or ".join(map(repr, _LAYOUTS))
    given, source = uniforms is not None, next((name for name in ("seed", "uniforms") if name in extra), None)
    by_clock = source == "seed" and samples and options.schedule == "adaptive" and not (is_coupled and many == 1)
    kind = (uniforms.dtype, tuple(uniforms.shape)) if isinstance(uniforms, Tensor) else type(uniforms).__name__
    are_floats = isinstance(uniforms, Tensor) and uniforms.is_floating_point() and uniforms.numel()
    low, high = (float(uniforms.min()), float(uniforms.max())) if are_floats else (0.0, 0.0)
    wanted, plainly = "pass do_sample=True, or drop it", "to decode plainly use use_mtp=False"
    refuse(
        [
            (not is_number and budget not in _LAYOUTS, f"slot_budget={budget!r} must be a whole number, {names}"),
            (is_number and budget < least, f"slot_budget={budget} must be at least {least}; {plainly}"),
            (not is_count, f"best_of={many!r} must be a whole number of at least 1"),
            (
                has_many and "uniforms" in extra,
                f"best_of={many} draws new uniforms: drop uniforms=, or repeat a run with seed=",
            ),
            (has_many and not is_coupled, f"best_of={many} needs verification='coupled', not {rule!r}"),
            (has_many and not samples, f"best_of={many} is for sampling: {wanted}"),
            (
                has_many and not own.reads_uniforms,
                f"best_of={many}: masks read no uniforms to choose among; leave it out",
            ),
            (
                given and not is_coupled,
                f"uniforms= fixes the tokens only with verification='coupled', not {rule!r}",
            ),
            (given and "seed" in extra, "give uniforms= or seed=, not both"),
            (given and not samples, f"uniforms= is for sampling: {wanted}"),
            (
                given and not are_floats,
                f"uniforms is {kind}: pass torch.tensor(uniforms), floats of [B, max_new_tokens]",
            ),
            (not (low >= 0 and high < 1), f"uniforms must lie in [0, 1), not in [{low:g}, {high:g}]"),
            (source and beams > 1, f"{source}= cannot be combined with num_beams={beams}; drop one of them"),
            (
                by_clock,
                f"seed= with verification={rule!r} and num_assistant_tokens_schedule='adaptive' (by the clock): "
                "drop one",
            ),
        ]
    )
