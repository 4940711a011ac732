"""Distributions of drafts and of the backbone along known sequences, measures of them, and the calls that they make.

The verifier's distribution of the token at depth j is the backbone's own, j - 1 positions further on: one forward gives
it for every depth. The drafter's is conditioned on the true tokens before it. Nothing is drawn.

Expected calls are how many verifications speculative decoding would take to write a sequence. Let x_0 .. x_T be a
sequence that follows the target's distributions p, and q the drafter's, both conditioned on the tokens of x before
each. Of a cycle that begins with x_t, the first k drafts are accepted, and the sequence continues as x does, with the
probability p(x_{t+1}) .. p(x_{t+k}) m_k(t), where with P_j and Q_j the products of p and q over x_{t+1} .. x_{t+j}

    block (Sun et al. 2024)         m_k = min over j <= k of min(1, Q_j / P_j)
    token (Leviathan et al. 2023)   m_k = product over j <= k of min(1, q_j / p_j)
    greedy                          m_k = 1 while argmax q = argmax p

Verification is lossless, so that what follows the accepted drafts has the distribution of the sequence whatever was
accepted: P(at least k accepted, x_{t+1} .. x_{t+k+1}) = P(at least k accepted, x_{t+1} .. x_{t+k}) p(x_{t+k+1}). So
m_k(t) is the probability that at least k drafts are accepted given that x is what is written, and the probability w_t
that a cycle begins with x_t follows from one pass over the sequence:

    w_0 = 1,    w_{t+k+1} += w_t (m_k(t) - m_{k+1}(t))    for k = 0 .. m,    m_0 = 1, m_{m+1} = 0

The sum of w is the expected number of verifications of this very sequence, and T over it the tokens per call. Exact for
chains of a constant length m along sequences of the target's own distribution, from drafters whose state depends on
verified tokens alone. Near its end, drafts are cut to what is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import gather_object

from ...modeling.common.chunks import LOGITS_PER_CHUNK
from ...modeling.common.teacher import cycle_starts
from ...modeling.heads.losses import IGNORE, depth_targets, tokens_ahead

Batch = Mapping[str, torch.Tensor]
SAMPLED, GREEDY_RULE = ("block", "token"), ("greedy",)
"""Ways to verify sampled drafts, and greedy ones."""


def acceptance_along(
    draft: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor, temperature: float, rule: str
) -> torch.Tensor:
    """Return m_k [..., m] float64, the probability that at least k drafts are accepted given the tokens [..., m].

    `draft` are log-probabilities of the drafter, each conditioned on the tokens before it, and `target` the target's
    logits [..., m, V]; the temperature applies to both. The rule is `"block"`, `"token"` or `"greedy"`.
    """
    if rule == "greedy":
        return (draft.argmax(-1) == target.argmax(-1)).double().cumprod(-1)
    chosen = tokens[..., None]
    q, p = ((x.double() / temperature).log_softmax(-1).gather(-1, chosen)[..., 0] for x in (draft, target))
    if rule == "token":
        return (q - p).clamp(max=0).cumsum(-1).exp()
    return (q - p).cumsum(-1).cummin(-1).values.clamp(max=0).exp()


def ratio_of_sums(tokens: torch.Tensor, calls: torch.Tensor) -> tuple[float, float | None]:
    """Return the tokens per call of N sequences, as a ratio of sums, and its standard error over them; None of one."""
    tokens, calls = tokens.double(), calls.double()
    ratio, count = float(tokens.sum() / calls.sum()), len(tokens)
    if count == 1:
        return ratio, None
    spread = float((tokens - ratio * calls).square().sum()) * count / (count - 1)
    return ratio, spread**0.5 / float(calls.sum())


@dataclass(frozen=True)
class ExpectedCalls:
    """Expected calls of decoding along N sequences."""

    tokens: torch.Tensor  # [N], tokens of each sequence after its first: T
    calls: torch.Tensor  # [N] float64, expected verifications of each sequence
    accepted: torch.Tensor  # [N, m] float64, how many of them are expected to accept at least 1 .. m drafts

    @classmethod
    def along(cls, accepted: torch.Tensor, positions: torch.Tensor) -> ExpectedCalls:
        """Return the expected calls of the sequences of a batch; those without a position are left out.

        `accepted` [B, L, m]: m_k of the drafts after each position, `positions` [B, L] bool, see `cycle_starts`.
        """
        accepted, positions = accepted.cpu(), positions.cpu()
        is_left = positions[..., None] & tokens_ahead(positions, accepted.shape[-1], False).cumprod(-1).bool()
        accepted = torch.where(is_left, accepted, 0.0)
        starts, is_scored = cycle_starts(accepted, positions), positions.any(1)
        totals = positions.sum(1), starts.sum(1), (starts[..., None] * accepted).sum(1)
        return cls(*(each[is_scored] for each in totals))

    def __add__(self, other: ExpectedCalls) -> ExpectedCalls:
        return ExpectedCalls(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values())))

    @property
    def tokens_per_call(self) -> float:
        """Expected tokens of a verification: the accepted drafts, and the token that it adds."""
        return ratio_of_sums(self.tokens, self.calls)[0]

    @property
    def standard_error(self) -> float | None:
        """Standard error of `tokens_per_call`, from the spread between sequences; None of one."""
        return ratio_of_sums(self.tokens, self.calls)[1]

    @property
    def by_position(self) -> list[float]:
        """For draft positions 1, 2, ...: the share of verifications that accept so many; 1 + its sum is the above."""
        return (self.accepted.sum(0) / self.calls.sum()).clamp(0, 1).tolist()


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

    The drafter `has_probs`, is attached and not wrapped; the batch has `input_ids` and `labels` [B, L] and, optionally,
    `attention_mask` and `position_ids`. `length`: m, tokens per draft; None: `usual_drafts`.
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
    sums: dict[str, torch.Tensor] = field(default_factory=dict)  # [m] float64: `loss`, `top_k`, ..., and `count`
    calls: dict[str, ExpectedCalls] = field(default_factory=dict)  # by the rule of verification

    @torch.no_grad()
    def add(self, model: Any, batch: Batch) -> DraftMeasures:
        """Add a batch of sequences, in evaluation mode; arguments as for `drafted_probs`. Return the measures."""
        was_training, positions = model.training, torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
        accepted: dict[str, torch.Tensor] = {}
        model.eval()
        for probs in drafted_probs(model, batch, self.length):
            _add_to(self.sums, self._sums(probs))
            at = probs.rows.cpu(), probs.columns.cpu()
            positions[at] = True
            for rule in SAMPLED if self.temperature else GREEDY_RULE:
                shares = acceptance_along(probs.draft, probs.target, probs.tokens, self.temperature, rule).cpu()
                whole = accepted.setdefault(rule, shares.new_zeros(*positions.shape, shares.shape[-1]))
                whole[at] = shares
        model.train(was_training)
        _add_to(self.calls, {rule: ExpectedCalls.along(whole, positions) for rule, whole in accepted.items()})
        return self

    @staticmethod
    def _sums(probs: DraftedProbs) -> dict[str, torch.Tensor]:
        token = probs.tokens[..., None]
        chosen = probs.draft.gather(-1, token)
        rank = (probs.draft > chosen).sum(-1)
        terms = {
            "count": torch.ones_like(chosen[..., 0]),
            "loss": -chosen[..., 0],
            "backbone_loss": -probs.target.log_softmax(-1).gather(-1, token)[..., 0],
            **{f"top_{k}": (rank < k).float() for k in TOP_K},
        }
        return {name: torch.where(probs.scored, each.double(), 0.0).sum(0).cpu() for name, each in terms.items()}

    def reduced(self) -> DraftMeasures:
        """Return the measures of all processes; every one of them calls this."""
        total = DraftMeasures(self.temperature, self.length)
        for part in gather_object([self]):
            _add_to(total.sums, part.sums)
            _add_to(total.calls, part.calls)
        return total

    def means(self) -> dict[str, list[float]]:
        """Return means by draft position, up to the last one with targets; an infinite loss stays infinite."""
        if not self.sums:
            return {}
        count = self.sums["count"][self.sums["count"] > 0]
        sums = {name: values[: len(count)] for name, values in self.sums.items() if name != "count"}
        return {name: (values / count).tolist() for name, values in sums.items()}


def _add_to(totals: dict[str, Any], further: Mapping[str, Any]) -> None:
    for name, each in further.items():
        totals[name] = totals[name] + each if name in totals else each


def text_of(prompts: torch.Tensor, new: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return prompts [B, P] and outputs after them [B, T + 1] as a batch that scores the outputs."""
    return {"input_ids": torch.cat([prompts, new], 1), "labels": torch.cat([torch.full_like(prompts, IGNORE), new], 1)}


@torch.no_grad()
def rank_accuracies(model: Any, batches: Iterable[Batch], ranks: int = 10, temperature: float = 0.0) -> torch.Tensor:
    """Return accuracies [m, R] by depth and rank, given the true tokens before (Medusa, arXiv 2401.10774, 2.3.3).

    `choices_from_accuracies` makes a tree of them, which `generate` takes as `draft_tree`. Arguments as for
    `drafted_probs`; outputs of the backbone measure future drafts. At temperature 0: whether the target's likeliest
    token is among R proposals. Else: the probability that it draws the proposal, which is that of accepting it in a
    tree of fixed shape. The first drafted token is two tokens ahead.
    """
    was_training = model.training
    model.eval()
    sums: dict[str, torch.Tensor] = {}
    for batch in batches:
        for probs in drafted_probs(model, batch):
            proposed = probs.draft.topk(min(ranks, probs.draft.shape[-1])).indices
            if temperature:
                shares = (probs.target / temperature).softmax(-1).gather(-1, proposed).double()
            else:
                shares = (probs.target.argmax(-1, keepdim=True) == proposed).double()
            hits = (shares * probs.scored[..., None]).sum(0).cpu()
            _add_to(sums, {"hits": hits, "count": probs.scored.sum(0).cpu()})
    model.train(was_training)
    return sums["hits"] / sums["count"].clamp(min=1)[:, None]
