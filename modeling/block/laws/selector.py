"""The path selector of DFlash 2: the likeliest tokens of every place, chosen by the token before them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init

from ....configuration.block import BlockDrafterConfig
from ...heads.window_distribution import FactorisedDistribution
from .base import BlockLaw, Inner, RowTables, scattered


class SelectorLaw(BlockLaw):
    """The K likeliest tokens of every place, each chosen given the token before it (DFlash 2).

    A candidate y behind y' has its base logit and sum_r A[y']_r (H h)_r B[y]_r, where h is the row that drafts it.

    Args:
        config: Of the drafter.
        rank: R.
        top_k: K.
    """

    module_name = "candidate_selector"

    def __init__(self, config: BlockDrafterConfig, rank: int = 256, top_k: int = 16) -> None:
        super().__init__(config)
        self.top_k, self.width = min(top_k, self.num_columns), rank
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(self.num_columns, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.reset_head(0.02)

    @torch.no_grad()
    def reset_head(self, std: float) -> None:
        """Draw codebooks whose products vary by 1 (`std` is not read); H is 0: no token says anything."""
        for codebook in (self.predecessor_codebook, self.successor_codebook):
            init.normal_(codebook, std=codebook.shape[1] ** -0.25)
        init.zeros_(self.hidden_projection.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.predecessor_codebook)

    def scores(self, before: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the scores [..., K] of columns [..., K], behind e [..., R] of the tokens before, at rows [..., d]."""
        weights = before * self.hidden_projection(rows.to(before.dtype))  # [..., R]
        return (self.successor_codebook[columns] @ weights[..., None])[..., 0]

    def inner(self, rows: Tensor, logits: Tensor) -> Inner:
        kept = torch.full_like(logits, -torch.inf)
        candidates = self._candidates(logits)
        kept = kept.scatter(-1, candidates, logits.gather(-1, candidates))
        return FactorisedDistribution(kept[..., None, :])  # [..., m, 1, v]

    def tables(self, rows: Tensor, logits: Tensor, anchor: Tensor | None) -> RowTables:
        return SelectorTables(self, rows, self._candidates(logits), logits.shape[-1])

    def _candidates(self, logits: Tensor) -> Tensor:
        return logits.detach().topk(self.top_k, -1).indices  # [..., m, K]

    def choice_terms(self, rows: Tensor, logits: Tensor, before: Tensor, labels: Tensor) -> Tensor:
        """Return -log q of labels [..., m] among candidates, one of which each is, given ids `before` [..., m].

        The weakest candidate makes room for a label that is none; labels are columns.
        """
        candidates = self._candidates(logits)  # [..., m, K], the weakest last
        is_label = candidates == labels[..., None]
        weakest = torch.where(is_label.any(-1), candidates[..., -1], labels)
        candidates = torch.cat([candidates[..., :-1], weakest[..., None]], -1)
        scores = logits.gather(-1, candidates) + self.scores(self.embed(before), rows, candidates)
        log_q = scores.log_softmax(-1)
        return -log_q.masked_fill(candidates != labels[..., None], 0).sum(-1)


class SelectorTables(RowTables):
    """The scores of a selector for the rows of a block, at their candidates [..., m, K]."""

    def __init__(self, selector: SelectorLaw, rows: Tensor, candidates: Tensor, size: int) -> None:
        self.selector, self.rows, self.candidates, self.size = selector, rows, candidates, size

    def embed(self, ids: Tensor) -> Tensor:
        return self.selector.embed(ids)

    def bias(self, embedded: Tensor, place: int, state: Tensor | None) -> tuple[Tensor, None]:
        places = slice(place, place + embedded.shape[-2])
        columns = self.candidates[..., places, :]
        scores = self.selector.scores(embedded, self.rows[..., places, :], columns)
        return scattered(scores, columns, self.size), None
