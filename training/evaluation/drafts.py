"""Distributions of drafts and of the backbone along known sequences, and measures of them.

The verifier's distribution of the token at depth j is the backbone's own, j - 1 positions further on: one forward gives
it for every depth. The drafter's is conditioned on the true tokens before it. Nothing is drawn; `expected` makes calls
of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object

from ...modeling.common.chunks import LOGITS_PER_CHUNK
from ...modeling.heads.losses import IGNORE, depth_targets, tokens_ahead
from .expected import GREEDY_RULE, SAMPLED, ExpectedCalls, acceptance_along

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class DraftedProbs:
    """Some positions of a batch, and the distributions of the tokens that are drafted after them."""

    rows: torch.Tensor  # [N] int64, index of the sequence of each position
    columns: torch.Tensor  # [N] int64, its index in the sequence
    draft: torch.Tensor  # [N, m, v], log-probabilities of the drafter for drafts 1 to m, given the true tokens before
    target: torch.Tensor  # [N, m, v], the backbone's logits for the same tokens
    tokens: torch.Tensor  # [N, m] int64, the tokens that follow
    scored: torch.Tensor  # [N, m] bool, True where that token and all before it in the draft are targets


def has_probs(model: object) -> bool:
    """Return whether a drafter's drafts have distributions before they are drawn; PTP's slots need uniforms first."""
    return hasattr(model, "distributions")


def usual_drafts(model: Any) -> int:
    """Return the default length of a model's drafts; 1 where it drafts none."""
    return max(1, model.default_draft())


def drafted_probs(model: Any, batch: Batch, length: int | None = None) -> Iterator[DraftedProbs]:
    """Yield the distributions of all drafts along a batch of sequences, positions with small logits [N, m, V] at once.

    Args:
        model: A drafter that `has_probs`, attached, not wrapped.
        batch: `input_ids` and `labels` [B, L] and, optionally, `attention_mask` and `position_ids`.
        length: m, tokens per draft; None: `usual_drafts`.
    """
    ids, length = batch["input_ids"], length or usual_drafts(model)
    targets = depth_targets(batch["labels"], length + 1, batch.get("attention_mask"), batch.get("position_ids"))
    scored = (targets != IGNORE).long().cumprod(-1).bool()[..., 1:]  # [B, L, m]
    if not scored.any():
        return
    tokens = torch.where(targets == IGNORE, tokens_ahead(ids, length + 1, 0), targets)  # [B, L, m + 1]
    known = model.distributions(batch, length)
    rows, columns = scored[..., 0].nonzero(as_tuple=True)
    size = max(1, LOGITS_PER_CHUNK // (length * model.policy.config.get_text_config().vocab_size))
    ahead = torch.arange(1, length + 1, device=columns.device)
    for row, column in zip(rows.split(size), columns.split(size)):
        seen = (column[:, None] + ahead).clamp(max=ids.shape[1] - 1)
        yield DraftedProbs(
            row,
            column,
            known.draft(row, column, tokens[row, column]),
            known.target(known.states[row[:, None], seen]).float(),
            tokens[row, column, 1:],
            scored[row, column],
        )


TOP_K = (1, 5)
"""Numbers of the drafter's likeliest tokens for accuracies."""


@dataclass
class DraftMeasures:
    """Measures along sequences: sums by draft position (the j-th draft is j + 1 tokens ahead), and expected calls."""

    temperature: float = 1.0  # of the target and the drafter; 0: greedy
    length: int | None = None  # m, tokens per draft; None: `usual_drafts`
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # [m] float64: `loss`, `top_k`, and `backbone_loss`
    counts: torch.Tensor | None = None  # [m] float64, positions whose first j drafted tokens are all targets
    calls: dict[str, ExpectedCalls] = field(default_factory=dict)  # by the rule of verification

    @torch.no_grad()
    def add(self, model: Any, batch: Batch) -> DraftMeasures:
        """Add a batch of sequences, in evaluation mode; arguments as for `drafted_probs`. Return the measures."""
        was_training, positions = model.training, torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
        accepted: dict[str, torch.Tensor] = {}
        model.eval()
        for probs in drafted_probs(model, batch, self.length):
            self._add_positions(probs)
            at = probs.rows.cpu(), probs.columns.cpu()
            positions[at] = True
            for rule in SAMPLED if self.temperature else GREEDY_RULE:
                shares = acceptance_along(probs.draft, probs.target, probs.tokens, self.temperature, rule).cpu()
                whole = accepted.setdefault(rule, shares.new_zeros(*positions.shape, shares.shape[-1]))
                whole[at] = shares
        model.train(was_training)
        calls = {rule: ExpectedCalls.along(whole, positions) for rule, whole in accepted.items()}
        self._merge(DraftMeasures(calls=calls))
        return self

    def _add_positions(self, probs: DraftedProbs) -> None:
        token = probs.tokens[..., None]
        chosen = probs.draft.gather(-1, token)
        rank = (probs.draft > chosen).sum(-1)
        terms = {
            "loss": -chosen[..., 0],
            "backbone_loss": -probs.target.log_softmax(-1).gather(-1, token)[..., 0],
            **{f"top_{k}": (rank < k).float() for k in TOP_K},
        }
        sums = {name: torch.where(probs.scored, values.double(), 0.0).sum(0).cpu() for name, values in terms.items()}
        self._merge(DraftMeasures(sums=sums, counts=probs.scored.sum(0).double().cpu()))

    def _merge(self, other: DraftMeasures) -> None:
        if other.counts is not None:
            self.counts = other.counts if self.counts is None else self.counts + other.counts
        for name, values in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + values
        for rule, calls in other.calls.items():
            self.calls[rule] = self.calls[rule] + calls if rule in self.calls else calls

    def reduced(self) -> DraftMeasures:
        """Return the measures of all processes; every one of them calls this."""
        total = DraftMeasures(self.temperature, self.length)
        for part in gather_object([self]):
            total._merge(part)
        return total

    def means(self) -> dict[str, list[float]]:
        """Return means by draft position, up to the last one with targets; an infinite loss stays infinite."""
        if self.counts is None:
            return {}
        drafts = int((self.counts > 0).sum())
        return {name: (values[:drafts] / self.counts[:drafts]).tolist() for name, values in self.sums.items()}


def text_of(prompts: torch.Tensor, new: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return prompts [B, P] and outputs after them [B, T + 1] as a batch that scores the outputs."""
    return {"input_ids": torch.cat([prompts, new], 1), "labels": torch.cat([torch.full_like(prompts, IGNORE), new], 1)}


@torch.no_grad()
def rank_accuracies(model: Any, batches: Iterable[Batch], ranks: int = 10, temperature: float = 0.0) -> torch.Tensor:
    """Return accuracies by depth and rank, given the true tokens before (Medusa, arXiv 2401.10774, section 2.3.3).

    `choices_from_accuracies` makes a tree of them, which `generate` takes as `draft_tree`.

    Args:
        model, batches: See `drafted_probs`; outputs of the backbone measure future drafts.
        ranks: R, proposals per depth; at most the size of the vocabulary.
        temperature: Temperature of the target. 0: whether its likeliest token is proposed. Else: the probability that
            it draws the proposal, which is that of accepting it in a tree of fixed shape.

    Returns:
        [m, R] float64, m depths; the first drafted token is two tokens ahead.

    Raises:
        ValueError: No position of the batches is a target.
    """
    was_training = model.training
    model.eval()
    hits, counts = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for probs in drafted_probs(model, batch):
            proposed = probs.draft.topk(min(ranks, probs.draft.shape[-1])).indices
            if temperature:
                shares = (probs.target / temperature).softmax(-1).gather(-1, proposed).double()
            else:
                shares = (probs.target.argmax(-1, keepdim=True) == proposed).double()
            hits = hits + (shares * probs.scored[..., None]).sum(0).cpu()
            counts = counts + probs.scored.sum(0).double().cpu()
    model.train(was_training)
    if not hits.dim():
        raise ValueError("rank_accuracies: no position of the batches is a target; give labels that are not all -100")
    return hits / counts.clamp(min=1)[:, None]
