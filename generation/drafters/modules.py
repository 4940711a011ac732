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

from ...modeling.sampling import race
from ..contract import DraftTree, Verdict, line
from ..targets import Fed, crop_layer, shift_cache, shift_mask, shift_source, shifted
from ..tokens import TokenRows
from ..windows import hold, restrict
from .protocol import DraftOptions, View

_LAG = 64
"""Columns that may be left to be computed by the modules that a short draft did not need; by so many, and those of a
block, rows may move to the right meanwhile, so that layers with an attention window keep them to spare."""


class ModuleDrafter:
    """Drafts by chaining modules on the backbone's last hidden state.

    A draft ends with the first token to which its own law gave less probability than the threshold, in all rows.

    Args:
        model: Offers `mtp.step`, `num_modules`, and its embeddings in and out.
        options: Of the call.
    """

    hidden_layers = -1

    def __init__(self, model: Any, options: DraftOptions) -> None:
        self.model, self.options, self.depth = model, options, model.num_modules
        self.num_tokens = options.num_tokens
        self.vocabulary = options.extra.get("draft_vocabulary", model.draft_vocabulary)
        self.cache, self.cached = model.mtp.new_cache(), 0
        hold(self.cache)
        self.states = self.mask = self.view = None
        self.is_padded = False

    def begin(self, outputs: Any, view: View) -> None:
        """Takes the prompt's states [B, L, D]; what an earlier call left in the backbone's cache is not looked at."""
        self.view, self.states = view, outputs.hidden_states[-1]
        self.mask = view.mask[:, -self.states.shape[1] :]
        self.is_padded = view.is_padded

    def advance(self, fed: Fed, verdict: Verdict) -> None:
        """Appends the newest states of every row, right-aligned, and moves the modules' cache as the backbone's."""
        shifts, longest = self.view.shifts, self.view.kept.longest
        self.states = torch.cat([self.states, fed.hidden_states[-1][:, :longest]], dim=1)
        self.mask = nn.functional.pad(self.mask, (0, longest), value=True)
        if shifts is not None:
            self.is_padded = True
            self.states = shifted(self.states, shift_source(shifts, self.states.shape[1]), dim=1)
            self.mask = shift_mask(self.mask, shift_source(shifts, self.mask.shape[1]))
            if self.cached:
                shift_cache(self.cache, shifts, self.mask[:, : self.cached])
        # rows that fall behind need states of columns that were settled already
        wanted = max(self.mask.shape[1] - self.cached, self.depth + self.num_tokens)
        self.states = self.states[:, -wanted:]

    def propose(self, tokens: TokenRows, length: int) -> DraftTree:
        """A chain of up to `length` tokens behind every row."""
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        pending = self.mask.shape[1] - self.cached
        hidden, ids, mask = self.states[:, -pending:], tokens.newest(pending), self.mask
        positions = self.view.counts[:, None] - pending + line(pending, ids.device)
        late, options = pending > _LAG, None
        drafts, laws = [], []
        for k in range(1, max(length, self.depth if late else 1) + 1):
            if k > self.depth:  # the last module goes on, one new column at a time
                hidden, ids, positions = hidden[:, -1:], ids[:, -1:], positions[:, -1:] + 1
                mask, options = nn.functional.pad(mask, (0, 1), value=True), None
            options = options or self._options(k, hidden, positions, mask)
            hidden = self.model.mtp.step(k, hidden, self.model.get_input_embeddings()(ids), **options)
            token, law = self._choose(hidden[:, -1])
            ids = torch.cat([ids[:, 1:], token[:, None]], dim=1)
            drafts.append(token)
            laws.append(law)
            if not late and self._is_unsure(token, law):
                break
        self._settle(len(drafts))
        draft = torch.stack(drafts[:length], 1)
        return DraftTree.chain(draft, torch.stack(laws[:length], 1) if self.options.do_sample else None)

    def _options(self, k: int, hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        """What `step` takes beside states and embeddings; made once for all modules that attend alike.

        They have the same columns before and behind them, and so the same mask and the same rotary embedding.
        """
        options: dict[str, Any] = {
            "position_ids": positions.clamp(min=0) if self.is_padded else positions,
            "attention_mask": mask if self.is_padded else None,
            "past_key_values": self.cache,
        }
        modules = self.model.mtp
        if k < self.depth and len({module.kind for module in modules}) == 1:
            options["prepared"] = modules.options(k - 1, hidden, **options)
        return options

    def _choose(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A token [B] from states [B, D], and the law it was drawn from (its own, where greedy; None if not needed)."""
        is_plain = not self.options.do_sample and not self.options.threshold
        if self.vocabulary is None:
            logits = self.model.readout(hidden)
        else:
            logits = self.vocabulary.logits(self.model.readout, hidden)
            if is_plain:
                return self.vocabulary.on(logits.device)[logits.argmax(-1)], None
            logits = self.vocabulary.spread(logits, self.model.config.vocab_size)
        if is_plain:
            return logits.argmax(-1), None
        law = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        if not self.options.do_sample:
            return law.argmax(-1), law
        warped = self.options.processing.warp(law)
        if self.vocabulary is not None:  # processors may have left none of its tokens: any law will do then
            warped = torch.where(warped.isnan().any(-1, keepdim=True), law, warped)
        return race(warped), warped

    def coverage(self, tokens: torch.Tensor) -> float | None:
        """The share of tokens [N] that could be drafted; None where all can."""
        return None if self.vocabulary is None else self.vocabulary.coverage(tokens)

    def _is_unsure(self, token: torch.Tensor, law: torch.Tensor | None) -> bool:
        """Asked of a token that is drafted in any case, so that the drafts kept still follow their laws."""
        threshold = self.options.threshold
        return threshold > 0 and bool((law.gather(-1, token[:, None]) < threshold).all())

    def _settle(self, steps: int) -> None:
        """Leaves only those columns in the modules' cache whose tokens are verified, in all modules alike."""
        if steps >= self.depth:
            self.cached = max(self.cached, self.mask.shape[1] - self.depth + 1)
        for layer in self.cache.layers:
            crop_layer(layer, min(0, self.cached - layer.get_seq_length()))
        restrict(self.cache, spare=_LAG + self.num_tokens + 1)
