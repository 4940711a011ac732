"""Measurements of a drafter along known text: loss, accuracy and acceptance by draft position, ranks, bits per byte.

Nothing is drawn; acceptance is that of `expected.accepted_up_to`, for every drafter that has distributions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from .distributions import Batch, DraftedProbs, drafted_probs
from .expected import accepted_up_to

TOP_K = (1, 5)
"""Numbers of the drafter's likeliest tokens for accuracies."""


@dataclass
class DraftMeasures:
    """Sums over text positions, by draft position: the j-th drafted token is j + 1 tokens ahead.

    Attributes:
        sums: By name, [m] float64.
        counts: [m] float64, positions whose first j drafted tokens are all targets.
    """

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: torch.Tensor | None = None

    def add(self, probs: DraftedProbs) -> None:
        """Add positions."""
        target, scored = probs.target.log_softmax(-1), probs.scored
        chosen = probs.draft.gather(-1, probs.tokens[..., None])
        rank = (probs.draft > chosen).sum(-1)
        terms = {
            "loss": -chosen[..., 0],
            "accepted_block": accepted_up_to(probs.tokens, probs.draft, target, 1.0, "block"),
            "accepted_token": accepted_up_to(probs.tokens, probs.draft, target, 1.0, "token"),
            "accepted_greedy": accepted_up_to(probs.tokens, probs.draft, target, 0.0, "block"),
            "overlap": torch.minimum(probs.draft, target).exp().sum(-1),
            **{f"top_{k}": (rank < k).float() for k in TOP_K},
        }
        for name, values in terms.items():
            total = torch.where(scored, values.double(), 0.0).sum(0).cpu()
            self.sums[name] = self.sums.get(name, 0.0) + total
        counts = scored.sum(0).double().cpu()
        self.counts = counts if self.counts is None else self.counts + counts

    def reduced(self, accelerator: Any) -> DraftMeasures:
        """Return the sum over all processes; every one of them calls this."""
        if accelerator.num_processes == 1:
            return self
        everyone: list[Any] = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(everyone, (self.sums, self.counts))
        total = DraftMeasures()
        for sums, counts in everyone:
            if counts is not None:
                total.counts = counts if total.counts is None else total.counts + counts
                total.sums = {name: total.sums.get(name, 0.0) + values for name, values in sums.items()}
        return total

    def means(self) -> dict[str, list[float]]:
        """Return means by draft position, up to the last one with targets; an infinite loss stays infinite."""
        if self.counts is None:
            return {}
        drafts = int((self.counts > 0).sum())
        return {name: (values[:drafts] / self.counts[:drafts]).tolist() for name, values in self.sums.items()}

    def expected_accepted(self, rule: str = "block") -> float | None:
        """Return how many drafts one verification is expected to accept at T = 1; None if nothing was measured."""
        means = self.means()
        return sum(means[f"accepted_{rule}"]) if means else None


@torch.no_grad()
def measure_drafts(model: Any, batch: Batch, measures: DraftMeasures | None = None) -> DraftMeasures:
    """Add a batch to measures, or to new ones, in evaluation mode.

    Args:
        model: See `drafted_probs`.
        batch: See `drafted_probs`.
        measures: Measures to add to; None: new ones.
    """
    measures, was_training = measures or DraftMeasures(), model.training
    model.eval()
    try:
        for probs in drafted_probs(model, batch):
            measures.add(probs)
    finally:
        model.train(was_training)
    return measures


@torch.no_grad()
def rank_accuracies(model: Any, batches: Iterable[Batch], ranks: int = 10, temperature: float = 0.0) -> torch.Tensor:
    """Return accuracies by depth and rank, given the true tokens before (Medusa, arXiv 2401.10774, section 2.3.3).

    `choices_from_accuracies` makes a tree of them, which `generate` takes as `draft_tree`:

        >>> choices = choices_from_accuracies(rank_accuracies(heads, batches), num_nodes=24)
        >>> out = backbone.generate(**inputs, assistant_model=heads, draft_tree=choices)

    Args:
        model: A drafter, see `drafted_probs`; text that its backbone wrote measures what it will draft.
        batches: `input_ids` and `labels` [B, L] and, optionally, `attention_mask` and `position_ids`.
        ranks: R, proposals per depth; at most the size of the vocabulary.
        temperature: Temperature of the target. 0: whether its likeliest token is proposed. Else: the probability that
            it draws the proposal, which is that of accepting it in a tree of fixed shape.

    Returns:
        [m, R] float64, m depths; the first drafted token is two tokens ahead.

    Raises:
        ValueError: No position of the batches is a target, or a negative temperature.
    """
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} must be at least 0")
    was_training = model.training
    model.eval()
    hits, counts = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for probs in drafted_probs(model, batch):
            proposed = probs.draft.topk(min(ranks, probs.draft.shape[-1])).indices
            if temperature:
                found = (probs.target / temperature).softmax(-1).gather(-1, proposed).double()
            else:
                found = (probs.target.argmax(-1, keepdim=True) == proposed).double()
            hits = hits + (found * probs.scored[..., None]).sum(0).cpu()
            counts = counts + probs.scored.sum(0).double().cpu()
    model.train(was_training)
    if not hits.dim():
        raise ValueError("rank_accuracies: no position of the batches is a target; give labels that are not all -100")
    return hits / counts.clamp(min=1)[:, None]


@torch.inference_mode()
def bits_per_byte(model: PreTrainedModel, windows: Sequence[Any], limit: int, batch_size: int = 16) -> list[float]:
    """Return the cross-entropy of every head on windows spread evenly over a text.

    Args:
        model: A model with `head_losses`.
        windows: The text (`ByteWindows`): entries with `input_ids` [L].
        limit: Number of windows, at most.
        batch_size: Windows per forward.

    Returns:
        Bits per byte of head 1, 2, ... (head j predicts the byte j ahead).
    """
    chosen = range(0, len(windows), -(-len(windows) // limit))
    total = torch.zeros(())
    for batch in torch.tensor(chosen).split(batch_size):
        ids = torch.stack([windows[int(index)]["input_ids"] for index in batch]).to(model.device)
        losses = model(ids, labels=ids, use_cache=False, logits_to_keep=1).head_losses
        total = total.to(losses) + losses * len(batch)
    return (total / len(chosen) / math.log(2)).tolist()


@torch.no_grad()
def window_bits(model: torch.nn.Module, ids: torch.Tensor, batch_size: int = 8) -> torch.Tensor:
    """Return the bits per byte of the next byte, window by window.

    Args:
        model: A causal language model over bytes.
        ids: [N, L] windows that begin with `<bos>`.
        batch_size: Windows per forward.

    Returns:
        [N] float64; windows have one length, so their mean is that of the text, and their spread its uncertainty.
    """
    found = []
    for part in ids.split(batch_size):
        logits = model(part, use_cache=False).logits[:, :-1].float()
        nats = cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none").view(len(part), -1)
        found.append(nats.double().mean(1) / math.log(2))
    return torch.cat(found)
