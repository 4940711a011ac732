"""A batch as an EAGLE head trains on it: which rows have a target in a step, and what they see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..heads.losses import IGNORE


@dataclass
class TrainingBatch:
    """A batch of sequences and the backbone's last hidden states.

    Attributes:
        input_ids: [B, L] int64.
        labels: [B, L] int64, -100 where a token is not a target.
        positions: [B, L] int64.
        documents: [B, L] int64, the number of each token's document; -1 for padding.
        states: [B, L, D], the backbone's last hidden states.
        is_whole: Every sequence is one document without padding.
        summaries: [B, L, 2], the `logit_summaries` of the states, where they are known already.
        kept: [steps, rows] bool, rows of each step that count, which had counted in the step before; None: all.
    """

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor
    states: Tensor
    is_whole: bool
    summaries: Tensor | None = None
    kept: Tensor | None = None

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        labels: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        states: Tensor,
        summaries: Tensor | None = None,
    ) -> TrainingBatch:
        """Return a batch from the arguments of a model's forward."""
        real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        is_whole, documents = mask is None and positions is None, torch.zeros_like(input_ids)
        if positions is None:
            positions = (real.long().cumsum(1) - 1).clamp(min=0)
        else:
            positions = positions.expand(input_ids.shape)
            documents = nn.functional.pad(positions[:, 1:] <= positions[:, :-1], (1, 0)).long().cumsum(1)
        documents = documents.masked_fill(~real, -1)
        return cls(input_ids, labels, positions, documents, states, is_whole, summaries)

    def with_a_row(self, features: Tensor) -> tuple[Tensor, TrainingBatch]:
        """Return features [B, L, d] and the batch, padded on the right where it is too short to have a row.

        Such a row counts nowhere; with it every parameter gets its gradient, as in the other processes.
        """
        missing = 3 - features.shape[1]
        if missing <= 0:
            return features, self

        def padded(values: Tensor, fill: int = 0) -> Tensor:
            return nn.functional.pad(values, (0, 0) * (values.dim() - 2) + (0, missing), value=fill)

        ids, labels, documents = padded(self.input_ids), padded(self.labels, IGNORE), padded(self.documents, -1)
        states, summaries = padded(self.states), None if self.summaries is None else padded(self.summaries)
        return padded(features), TrainingBatch(ids, labels, padded(self.positions), documents, states, False, summaries)

    @property
    def num_rows(self) -> int:
        """Rows of step 0; the last two tokens have none, because no token follows their pair."""
        return max(self.input_ids.shape[1] - 2, 0)

    @property
    def following(self) -> Tensor:
        """The label of the token after each state, [B, L]; -100 where there is none."""
        return nn.functional.pad(self.labels[:, 1:], (0, 1), value=IGNORE)

    def ahead(self, values: Tensor, start: int, stop: int, by: int) -> Tensor:
        """Return `values` [B, L, ..] `by` tokens after rows start .. stop - 1; the last one repeats beyond the end."""
        last = values.shape[1] - 1
        return values[:, torch.arange(start + by, stop + by, device=values.device).clamp(max=last)]

    @property
    def lengths(self) -> Tensor:
        """Length of every token's document, [B, L]; of padding any number above 0."""
        numbers = self.documents.clamp(min=0)
        sizes = torch.zeros_like(numbers).scatter_add(1, numbers, (self.documents >= 0).long())
        return sizes.gather(1, numbers).clamp(min=1)

    def counted(self, step: int) -> Tensor:
        """Return which rows of a step have a target, [B, num_rows] bool."""
        rows = self.num_rows
        document = self.documents[:, :rows]
        reach = nn.functional.pad(self.documents, (0, step), value=-1)[:, 2 + step : 2 + step + rows]
        label = nn.functional.pad(self.labels, (0, step), value=IGNORE)[:, 2 + step : 2 + step + rows]
        found = (document >= 0) & (document == reach) & (label != IGNORE)
        return found if self.kept is None else found & self.kept[step]

    def visible(self, start: int, stop: int) -> Tensor:
        """Return which columns 0 .. stop - 1 of step 0 rows start .. stop - 1 see, [B, 1, rows, stop] bool."""
        columns = torch.arange(stop, device=self.documents.device)
        same = self.documents[:, start:stop, None] == self.documents[:, None, :stop]
        return (same & (columns <= columns[start:, None]))[:, None]
