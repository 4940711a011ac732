"""A smaller model with parallel token prediction drafts for a larger one (PTP paper, 3.3.1): one call per draft."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from ...configuration.cache_names import CACHE
from ...configuration.ptp import PTPConfig
from ...generation.assistant.drafter import AssistantDrafter
from ...generation.assistant.session import AssistantSession, SharedVocabulary
from ...generation.backbone.cache import block_mask
from ...generation.backbone.target import RaggedBackbone
from ...generation.call.constraints import DraftMasks
from ...generation.call.options import CallOptions, DraftOptions
from ...generation.call.processing import Processing
from ...generation.call.sequences import Sequences
from ...generation.contract import (
    CacheView,
    DraftTree,
    PrefillOutput,
    TargetOutput,
    VerificationResult,
    requested_states,
)
from ...generation.tensors.masks import cached_arange, cached_range
from ...generation.tensors.wrapped_models import Kwargs, untyped
from ...generation.verification.verifiers import Uniforms
from ..heads.window_distribution import WindowDistribution
from .generation import ParallelDrafter, make_uniforms
from .session import ParallelSession


class ParallelAssistant(ParallelDrafter, AssistantDrafter):
    """Lets a model with parallel token prediction draft for a larger one with the same vocabulary.

    The larger model verifies: the output is its own, by every rule. With `verification="coupled"` and a seed or
    uniforms, it is that of sequential inverse-CDF decoding by the larger model alone.

    Args:
        model: A `PTPForCausalLM`.
        vocab_size: See `AssistantDrafter`.

    Example:
        >>> small.attach(large)
        >>> out = large.generate(**inputs, assistant_model=small, do_sample=True, seed=7)
    """

    reads_prompt = True

    def __init__(self, model: PreTrainedModel, vocab_size: int | None = None) -> None:
        super().__init__(model, model.config.num_slots, vocab_size)

    @property
    def config(self) -> PTPConfig:
        """The drafting model's."""
        return cast(PTPConfig, self.model.config)

    def slot_distribution(self, states: Tensor, before: Tensor) -> WindowDistribution:
        """Return the drafting model's."""
        return untyped(self.model).slot_distribution(states, before)

    @property
    def window(self) -> int:
        """The longest draft and one: a slot drafts a token each; where slots give distributions, the last token drafts,
        too."""
        return self.config.num_slots + 1 + (not self.config.predicts_first)

    def longest_draft(self) -> int:
        """Return window - 1."""
        return self.window - 1

    def default_draft(self) -> int:
        """Return the longest draft."""
        return self.longest_draft()

    def sampling_defaults(self, sources: tuple[object, ...]) -> Kwargs:
        """Return none: an assistant does not change the distribution of its target."""
        return {}

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """See `ParallelSession`; there is one group of slots.

        Raises:
            ValueError: Options for several groups or several vectors.
        """
        for name in ("slot_budget", "best_of"):
            if name in options.extra:
                raise ValueError(f"{name}= is for a model that drafts for itself; leave it out with assistant_model")
        return super().prepare_call(options, config)

    def start(self, options: DraftOptions) -> SeparateSession:
        """Return the session of one call."""
        self.warn_of_mismatch(options)
        return SeparateSession(self.model, options, make_uniforms(options), self.shared_with(options.backbone))


class SeparateSession(ParallelSession):
    """The drafts of one call; see `ParallelAssistant`.

    The drafting model has its own cache, of accepted tokens: slots do not count. Sequences with different numbers
    of new tokens are read alike: those with fewer read some tokens again.
    """

    lookahead = 0

    def __init__(
        self, model: PreTrainedModel, options: DraftOptions, uniforms: Uniforms, vocabulary: SharedVocabulary
    ) -> None:
        super().__init__(model.config, options, uniforms, distribution=untyped(model).slot_distribution)
        self.takes_fixed, self.hidden_layers = False, None  # a sampler head reads states of its own model
        self.chain, self.vocabulary = AssistantSession(model, options, vocabulary), vocabulary
        self.unread: list[int] = []
        """Tokens of every sequence that the drafting model has not read."""

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Read the prompt, all but its last token."""
        self.view = view
        self.unread = [2] * len(self.options.prompt)
        if self.options.speculates:
            self.chain.begin(outputs, view)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return a chain of `length` tokens after every sequence, from one call."""
        if length < 1 or not self.options.speculates:
            self.uniforms.draw(tokens, 1)
            return DraftTree.chain(tokens.ids[:, :0])
        if self.uniforms.stay:
            drawn = self.uniforms.draw(tokens, length + 1)[:, :length]
        else:  # the rule must not use again what the draft has used
            drawn = self.uniforms.fresh(length)
            self.uniforms.draw(tokens, length + 1)
        first, slots = (part.to(tokens.ids.device) for part in self._read(tokens, drawn, length))
        return DraftTree.chain(*self._chosen(first, slots, drawn, self._masks(tokens)))

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Count the new tokens; a sequence that has ended goes on with the others."""
        new = self.view.new_tokens
        self.unread = [unread + (count or new.longest) for unread, count in zip(self.unread, new.counts)]
        if self.options.speculates:
            cast(RaggedBackbone, self.chain.target).layout.keep(new)

    def _chosen(
        self, first: Tensor, slots: Tensor, drawn: Tensor, masks: DraftMasks | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return tokens and distributions of a draft, from the last token's logits [B, v] and those or states of the
        slots.

        Where slots give distributions, the model's own drafts the first token, and there is a slot less than `drawn`
        [B, length].
        """
        exists = torch.ones_like(drawn, dtype=torch.bool)  # [B, length]
        if self.is_one_hot:
            return self._drafts(slots, drawn, exists, masks=masks)
        distribution = first.to(torch.promote_types(first.dtype, torch.float32)).softmax(-1)  # [B, v]
        token, distribution = self._pick(distribution, drawn[:, 0], masks, self.options.processing)
        probs = distribution[:, None] if self.gives_probs else None  # [B, 1, V]
        if slots.shape[1] == 0:
            return token[:, None], probs
        tokens, others = self._drafts(slots, drawn[:, 1:], exists[:, 1:], token, masks)
        probs = probs if probs is None else torch.cat([probs.to(others.dtype), others], dim=1)
        return torch.cat([token[:, None], tokens], dim=1), probs

    def _pick(
        self, probs: Tensor, uniforms: Tensor, masks: DraftMasks | None = None, warps: Processing | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `ParallelSession`; over the ids of the model that verifies."""
        return super()._pick(self.vocabulary.fitted(probs), uniforms, masks, warps)

    def _read(self, tokens: Sequences, drawn: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Read new tokens, and slots after them; return logits [B, v] of the last token, and logits or states of the
        slots."""
        model, layout = self.chain.model, cast(RaggedBackbone, self.chain.target).layout
        count, slots, device = max(self.unread), length if self.is_one_hot else length - 1, model.device
        layout.block_offset = 2 - count  # the prompt was read up to its last token
        depths = layout.counts[:, None] + cached_range(layout.block_offset, count + slots, device)  # [B, count + slots]
        is_slot = (cached_arange(count + slots, device) >= count).long()  # [count + slots]
        positions = (depths - is_slot * self.is_one_hot).clamp(min=0)  # a one-hot slot 0 stands where b does
        if self.config.learned_positions is not None:
            positions = positions.clamp(max=self.config.learned_positions - 1)
        inputs = self._slot_inputs(drawn[:, :slots], device) if slots else {}
        outputs = model(
            self.vocabulary.readable(tokens.newest(count)).to(device),
            attention_mask=block_mask(layout, count + slots, model.config.get_text_config(), model.dtype),
            position_ids=positions,
            **{CACHE: self.chain.target.cache},
            use_cache=True,
            logits_to_keep=slots + 1,
            output_hidden_states=requested_states(None if self.distribution is None else -1),
            **inputs,
        )
        self.unread = [0] * len(self.unread)
        of_slots = outputs.logits[:, 1:] if self.distribution is None else outputs.hidden_states[-1][:, count:]
        return outputs.logits[:, 0], of_slots  # [B, v]

    def _slot_inputs(self, drawn: Tensor, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs of slots [B, A], on a device."""
        if not self.config.reads_uniforms:
            return {"masks": cached_arange(drawn.shape[1], device)[None]}
        return {"uniforms": self.slot_uniforms(drawn).to(device)}
