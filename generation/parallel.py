"""Parallel token prediction in the decoding loop: one forward verifies the pending drafts and makes the next ones.

The uniform of an output position belongs to that position, whatever is drafted or rejected on the way. With the coupled
rule the target picks with the same uniforms as the drafts, so the text is that of sequential inverse-CDF decoding,
whatever the student drafts (PTP paper, Theorem 1 and Algorithm 1; here all accepted drafts bring one more token).
Speculative rules treat the drafts as samples of known laws; a uniform that a rejected draft has used must not be used
again, so every cycle draws fresh ones.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from ..modeling.uniforms import pick
from .loop import SpeculativeLoop
from .modules import FullHistoryMixin
from .processing import Processing
from .schedule import AcceptanceRates
from .slots import SlotLayout, split_budget
from .targets import RepackedTarget
from .tokens import TokenRows
from .verification import block_acceptance, coupled_acceptance, token_acceptance, verify_greedy

RULES = ("coupled", "block", "token")


class ParallelDrafter:
    """Reads the next drafts off the auxiliary slots of the forward that verified the last ones.

    Args:
        model: A `PTPForCausalLM`.
        generation_config: Prepared by `ParallelGenerationMixin`.
        logits_processor: The target's processors.
    """

    def __init__(
        self, model: Any, generation_config: GenerationConfig, logits_processor: LogitsProcessorList | None = None
    ) -> None:
        self.is_one_hot = model.config.variant == "one_hot"
        self.slots = model.config.num_slots
        self.num_tokens = generation_config.num_assistant_tokens
        self.do_sample = bool(generation_config.do_sample)
        self.is_coupled = generation_config.verification == "coupled"
        self.budget = generation_config.slot_budget
        self.may_draft = generation_config.may_draft
        self.warps = Processing(logits_processor or LogitsProcessorList()) if model.config.learned_whole_law else None
        self.rates = AcceptanceRates(self.num_tokens)
        self.layout: SlotLayout | None = None
        self.logits: torch.Tensor | None = None
        self.uniforms: torch.Tensor | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor | None] | None = None

    @property
    def longest_group(self) -> int:
        """Slots that a group needs for the longest draft: a one-hot slot 0 predicts what the target picks itself."""
        return min(self.slots, self.num_tokens + self.is_one_hot)

    def begin(self, outputs: Any, target: RepackedTarget) -> None:
        """Nothing is drafted by the prompt's own pass."""

    def propose(self, tokens: TokenRows, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The drafts read last, at most `length` of them."""
        if self.pending is None:
            return tokens.ids[:, :0], None
        draft, q = self.pending
        return draft[:, :length], None if q is None else q[:, :length]

    def arrange(self, drafted: int, device: torch.device) -> SlotLayout | None:
        """The slots of the next forward, behind `drafted` drafts; None where nothing may be drafted."""
        sizes = split_budget(self.budget, drafted, self.longest_group, self.rates) if self.may_draft else [0]
        self.layout = SlotLayout.of(sizes, device) if sum(sizes) else None
        return self.layout

    def advance(self, outputs: Any, kept: list[int]) -> None:
        """Reads the group behind the tokens that each row kept."""
        self.pending = None
        if self.layout is None:
            return
        chosen = [max(count - 1, 0) for count in kept]
        index, exists = self.layout.of_group(chosen)
        rows = torch.arange(len(kept), device=index.device)[:, None]
        logits, uniforms = self.logits[rows, index], self.uniforms
        if self.is_one_hot:
            logits, exists = logits[:, 1:], exists[:, 1:]
        if logits.shape[1] == 0:
            return
        self.pending = self._drafts(logits, self._own_uniforms(uniforms, index), exists)

    def _own_uniforms(self, uniforms: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The uniform of each drafted token: a categorical slot predicts the token after its own uniform's."""
        following = index if self.is_one_hot else index + 1
        return uniforms.gather(1, following)[:, 1 if self.is_one_hot else 0 :]

    def _drafts(
        self, logits: torch.Tensor, uniforms: torch.Tensor, exists: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens and laws; a place that a row does not have holds token 0, certain."""
        probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        if self.is_one_hot or not self.do_sample:
            draft = probs.argmax(-1)
        else:
            probs = probs if self.warps is None or not self.warps.pointwise else self.warps.warp(probs)
            draft = pick(uniforms, probs)
        draft = draft.masked_fill(~exists, 0)
        if not self.do_sample or self.is_coupled:
            return draft, None
        if self.is_one_hot:
            probs = torch.nn.functional.one_hot(draft, probs.shape[-1]).to(probs)
        certain = torch.nn.functional.one_hot(torch.zeros_like(draft), probs.shape[-1]).to(probs)
        return draft, torch.where(exists[..., None], probs, certain)
