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

from ...modeling.sampling import pick
from ..loop import SpeculativeLoop
from ..processing import Processing
from ..schedule import AcceptanceRates
from ..targets import RepackedTarget
from ..tokens import TokenRows
from ..verification import coupled_acceptance, verify, verify_greedy
from .slots import SlotLayout, split_budget


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
        self.is_certain = model.config.predicts_tokens
        self.num_tokens = generation_config.num_assistant_tokens
        # a one-hot slot 0 predicts what the target picks itself
        self.longest_group = min(model.config.num_slots, self.num_tokens + self.is_one_hot)
        self.do_sample = bool(generation_config.do_sample)
        self.is_coupled = generation_config.verification == "coupled"
        self.budget = generation_config.slot_budget
        self.many = 1  # vectors of uniforms to draft from
        processing = Processing(logits_processor or LogitsProcessorList())
        self.warps = processing if processing.pointwise and not model.config.learns_warped_law else None
        self.rates = AcceptanceRates(self.num_tokens)
        self.layout: SlotLayout | None = None
        self.logits: torch.Tensor | None = None
        self.uniforms: torch.Tensor | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def begin(self, outputs: Any, target: RepackedTarget) -> None:
        """Nothing is drafted by the prompt's own pass."""

    def propose(self, tokens: TokenRows, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The drafts read last, at most `length` of them."""
        if self.pending is None:
            return tokens.ids[:, :0], None
        draft, q = self.pending
        return draft[:, :length], None if q is None else q[:, :length]

    @property
    def num_branches(self) -> int:
        """Drafts that the next forward verifies."""
        return 1

    def arrange(self, drafted: int, device: torch.device) -> SlotLayout:
        """The slots of the next forward, behind `drafted` tokens in all branches."""
        sizes = split_budget(self.budget, drafted // self.num_branches, self.longest_group, self.rates)
        self.layout = SlotLayout.of(sizes, device, self.num_branches, self.many)
        return self.layout

    def read(self, logits: torch.Tensor, uniforms: torch.Tensor) -> None:
        """Takes the logits of the slots [B, A, v], and the uniforms of the output positions from the block's on."""
        self.logits, self.uniforms = logits, uniforms

    def advance(self, outputs: Any, kept: list[int]) -> None:
        """Drafts from the group behind the tokens that each row kept."""
        self.pending = None
        if self.layout is None:
            return
        chosen = [max(count - 1, 0) for count in kept]
        index, exists = self.layout.of_group(chosen)
        index = index[:, 0]
        if self.is_one_hot:
            index, exists = index[:, 1:], exists[:, 1:]
        if index.shape[1] == 0:
            return
        rows = torch.arange(len(kept), device=index.device)[:, None]
        start = torch.tensor(chosen, device=index.device)[:, None] + 1  # the target picks the token before
        uniforms = self.uniforms.gather(1, start + torch.arange(index.shape[1], device=index.device))
        self.pending = self._drafts(self.logits[rows, index], uniforms, exists)

    def _drafts(
        self, logits: torch.Tensor, uniforms: torch.Tensor, exists: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens, and their laws where a rule asks for them; a place that a row lacks holds token 0, for certain."""
        probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        if self.is_certain or not self.do_sample:
            draft = probs.argmax(-1)
        else:
            probs = probs if self.warps is None else self.warps.warp(probs)
            draft = pick(uniforms, probs)
        draft = draft.masked_fill(~exists, 0)
        if not self.do_sample or self.is_coupled:
            return draft, None
        certain = torch.nn.functional.one_hot(draft, probs.shape[-1]).to(probs)
        return draft, certain if self.is_certain else torch.where(exists[..., None], probs, certain)


class ParallelLoop(SpeculativeLoop):
    """One call of `generate` of a `PTPForCausalLM`; see `SpeculativeLoop`."""

    drafter: ParallelDrafter

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_coupled = self.config.do_sample and self.rule == "coupled"
        self.table = self.config.uniforms
        self.generator = self.config.uniform_generator

    def _first(self, scores: torch.Tensor) -> torch.Tensor:
        if not self.is_coupled:
            return super()._first(scores)
        return pick(self._uniforms(1, first=True).to(scores.device), law_of(scores))

    def _uniforms(self, count: int, first: bool = False) -> torch.Tensor:
        """u of the next `count` output positions of every row, [B, count]."""
        batch = len(self.done)
        if not self.is_coupled:
            return torch.rand(batch, count, device=self.tokens.ids.device, generator=self.generator)
        starts = [0 if first else n - self.tokens.prompt_length for n in self.tokens.lengths]
        missing = max(starts) + count - self.table.shape[1]
        if missing > 0:  # beyond what was given: of tokens that are drafted but never returned
            more = torch.rand(batch, missing + 64, generator=self.generator, device=self.table.device)
            self.table = torch.cat([self.table, more.to(self.table.dtype)], dim=1)
        index = torch.tensor(starts, device=self.table.device)[:, None]
        return self.table.gather(1, index + torch.arange(count, device=self.table.device))

    def _forward(self, block: torch.Tensor) -> Any:
        """One backbone call on [b, draft | slots]; the slots leave the cache again at once."""
        fed, drafter = block.shape[1], self.drafter
        self.current = self._uniforms(fed + drafter.longest_group + 1)
        layout = drafter.arrange(fed - 1, block.device) if self.config.use_slots else None
        if layout is None:
            return super()._forward(block)
        self.statistics.backbone_calls += 1
        positions = self.target.counts[:, None] + layout.order
        if not drafter.is_one_hot:
            positions[:, fed:] += 1
        if self.model.config.learned_positions is not None:  # what is drafted beyond the table is beyond the text
            positions.clamp_(max=self.model.config.learned_positions - 1)
        uniforms = self._of_slots(layout)
        outputs = self.target.forward(
            block,
            uniforms=uniforms if self.config.do_sample else torch.full_like(uniforms, 0.5),
            attention_mask=layout.visible(self.target.mask),
            position_ids=positions,
            output_hidden_states=bool(self.config.output_hidden_states),
        )
        self.target.cache.crop(-len(layout.group))
        drafter.read(outputs.logits[:, fed:], self.current)
        outputs.logits = outputs.logits[:, :fed]
        if outputs.hidden_states is not None:
            outputs.hidden_states = tuple(states[:, :fed] for states in outputs.hidden_states)
        return outputs

    def _of_slots(self, layout: SlotLayout) -> torch.Tensor:
        """Uniforms of the slots, [B, A]: those of their output positions."""
        return self.current[:, layout.group + layout.place]

    def _verify(
        self, draft: torch.Tensor, q: torch.Tensor | None, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        uniforms = self.current[:, : scores.shape[1]]
        if not self.config.do_sample:
            accepted, new = verify_greedy(draft, scores)
        elif self.is_coupled:
            accepted, new = coupled_acceptance(draft, uniforms, law_of(scores))
        else:
            accepted, added = verify(draft, q, scores.softmax(-1), self.rule, self.generator, uniforms)
            new = torch.nn.functional.pad(draft, (0, 1)).scatter_(1, accepted[:, None], added[:, None])
        self.drafter.rates.update(draft.shape[1], self._of_open_rows(accepted))
        return accepted, new

    def _of_open_rows(self, counts: torch.Tensor) -> list[int]:
        return [count for count, done in zip(counts.tolist(), self.done) if not done]


def law_of(scores: torch.Tensor) -> torch.Tensor:
    """Probabilities in float64: cumulative sums over a large vocabulary in float32 misplace picks."""
    return scores.double().softmax(-1)
