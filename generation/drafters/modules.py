"""Drafts of sequential modules (DeepSeek-V3): a chain of depth D, whose last module is reused for longer drafts.

Columns are those of the backbone's cache: column i of module k holds h^{k-1}_i together with the embedding of the token
k places further on. Beyond the newest D - 1 columns, all of these tokens are verified; the last D - 1 columns of deeper
modules were computed from drafts, and are computed again once it is known which of them stayed. The modules' own cache
therefore ends D - 1 columns before the backbone's, and the hidden states of the columns after it are kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, LogitsProcessorList

from ...modeling.sampling import race
from ..full_history import FullHistoryMixin
from ..processing import Processing
from ..targets import RepackedTarget, repack, shift_right
from ..tokens import TokenRows

_LAG = 64  # columns that may be left to be computed by the modules that a short draft did not need


class ModuleDrafter:
    """Drafts by chaining modules on the backbone's last hidden state.

    Args:
        model: Offers `mtp.step`, `num_modules`, and its embeddings in and out.
        generation_config: `do_sample`, `num_assistant_tokens` and `assistant_confidence_threshold` are read. A draft
            ends with the first token to which its own law gave less probability than the threshold, in all rows.
        logits_processor: The target's processors.
    """

    def __init__(
        self, model: Any, generation_config: GenerationConfig, logits_processor: LogitsProcessorList | None = None
    ) -> None:
        self.model, self.depth = model, model.num_modules
        self.num_tokens = generation_config.num_assistant_tokens or self.depth
        self.do_sample = bool(generation_config.do_sample)
        self.threshold = generation_config.assistant_confidence_threshold or 0.0
        self.processing = Processing(logits_processor or LogitsProcessorList())
        self.cache, self.cached = DynamicCache(), 0
        self.states = self.mask = self.target = None
        self.is_padded = False

    def begin(self, outputs: Any, target: RepackedTarget) -> None:
        """Takes the prompt's states [B, L, D]; what an earlier call left in the backbone's cache is not looked at."""
        self.target, self.states = target, outputs.hidden_states[-1]
        self.mask = target.mask[:, -self.states.shape[1] :]
        self.is_padded = target.is_padded

    def advance(self, outputs: Any, kept: list[int]) -> None:
        """Appends the newest states of every row, right-aligned, and moves the modules' cache as the backbone's."""
        shifts, longest = self.target.shifts, max(kept)
        self.states = torch.cat([self.states, outputs.hidden_states[-1][:, :longest]], dim=1)
        self.mask = nn.functional.pad(self.mask, (0, longest), value=True)
        if any(shifts):
            self.is_padded = True
            self.states, self.mask = shift_right(self.states, shifts), shift_right(self.mask, shifts)
            repack(self.cache, shifts)
        # rows that fall behind need states of columns that were settled already
        wanted = max(self.mask.shape[1] - self.cached, self.depth + self.num_tokens)
        self.states = self.states[:, -wanted:]

    def propose(self, tokens: TokenRows, length: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts up to `length` tokens behind every row: ids [B, m] and, unless greedy, their laws [B, m, v]."""
        pending = self.mask.shape[1] - self.cached
        hidden, ids, mask = self.states[:, -pending:], tokens.newest(pending), self.mask
        positions = self.target.counts[:, None] + torch.arange(-pending, 0, device=ids.device)
        late = pending > _LAG
        drafts, laws = [], []
        for k in range(1, max(length, self.depth if late else 1) + 1):
            if k > self.depth:  # the last module goes on, one new column at a time
                hidden, ids, positions = hidden[:, -1:], ids[:, -1:], positions[:, -1:] + 1
                mask = nn.functional.pad(mask, (0, 1), value=True)
            hidden = self._step(k, hidden, ids, positions, mask)
            token, law = self._choose(hidden[:, -1])
            ids = torch.cat([ids[:, 1:], token[:, None]], dim=1)
            drafts.append(token)
            laws.append(law)
            if not late and self._is_unsure(token, law):
                break
        self._settle(len(drafts))
        draft, q = torch.stack(drafts[:length], 1), torch.stack(laws[:length], 1)
        return draft, q if self.do_sample else None

    def _step(
        self, k: int, hidden: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        return self.model.mtp.step(
            k,
            hidden,
            self.model.get_input_embeddings()(ids),
            position_ids=positions.clamp(min=0),
            attention_mask=mask if self.is_padded else None,
            past_key_values=self.cache,
        )

    def _choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A token [B] from states [B, D], and the law it was drawn from (its own, where greedy)."""
        logits = self.model.get_output_embeddings()(hidden)
        law = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        if not self.do_sample:
            return law.argmax(-1), law
        law = self.processing.warp(law) if self.processing.pointwise else law
        return race(law), law

    def _is_unsure(self, token: torch.Tensor, law: torch.Tensor) -> bool:
        """Asked of a token that is drafted in any case, so that the drafts kept still follow their laws."""
        return self.threshold > 0 and bool((law.gather(-1, token[:, None]) < self.threshold).all())

    def _settle(self, steps: int) -> None:
        """Leaves only those columns in the modules' cache whose tokens are verified, in all modules alike."""
        if steps >= self.depth:
            self.cached = max(self.cached, self.mask.shape[1] - self.depth + 1)
        for layer in self.cache.layers:
            layer.crop(min(0, self.cached - layer.get_seq_length()))


class ModuleGenerationMixin(FullHistoryMixin):
    """`generate` with drafts of sequential modules, of any length: `num_assistant_tokens` may exceed D."""

    _drafts_any_length = True

    def _drafter(self, generation_config: GenerationConfig, logits_processor: LogitsProcessorList) -> ModuleDrafter:
        return ModuleDrafter(self, generation_config, logits_processor)
