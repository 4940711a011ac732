"""What heads learn from depth 2 on: the backbone's own distributions, or the drafts that block verification accepts.

The backbone's distribution of x_{t+j} is that of its state at t + j - 1, so it costs no further forward. The acceptance
of a drafted token is alpha = sum_x min(p(x), q(x)) (Leviathan et al. 2023), p the verifier's distribution and q the
drafter's, so total variation is 1 - alpha, and LK is -log alpha.

The loss "block" is the acceptance of block verification. Along a sequence x drawn from p (the whole of it), a cycle
that begins with x_t accepts at least k drafts with the probability m_k(t) = min over j <= k of min(1, Q_j / P_j), Q and
P the products of q and p over the drafts' tokens. The loss is - sum_k m_k, averaged over positions. Cycles begin more
often where drafts are rejected. The expected number of calls W = sum_t w_t, with C(t) the calls left at t, has the
derivative dW / dm_k(t) = - w_t (C(t+k) - C(t+k+1)), so that with these weights of m_k, without gradient, the loss is
the number of calls (`position_weighting="expected_calls"`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...configuration.loss_options import DIVERGENCES, LossOptions
from ..heads.window_distribution import WindowDistribution, at_tokens, exact
from .backbone_parts import BackboneParts
from .chunks import LOGITS_PER_CHUNK

ACCEPTANCES = ("tv", "lk", "lk_kl")
"""Divergences that are functions of the acceptance."""
_KL_SCALE, _KL_DECAY = 1.0, 3.0


@dataclass
class Teacher:
    """What a head learns from depth 2 on.

    `arguments` are, per position, states of the next n - 1 positions [B, L, (n - 1) d], and logsumexp of their logits
    over all tokens, [B, L, n - 1], where that over the columns differs.
    """

    options: LossOptions
    backbone: BackboneParts
    arguments: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        options: LossOptions,
        backbone: BackboneParts | None,
        last_states: Tensor | None,
        scored: Tensor,
        summaries: Tensor | None = None,
    ) -> Teacher:
        """Return a teacher for the windows after each of the last hidden states [B, L, d], scored where [B, L, n].

        `summaries` are those of these states (`logit_summaries`); None: computed here, where they are read.
        """
        if last_states is None or backbone is None:
            raise ValueError("target='teacher' needs the backbone's last hidden states, not None")
        states = last_states.detach()
        # over a draft vocabulary p is renormalised, but for what is accepted: a token that is never drafted never is
        parts = [states]
        if backbone.vocabulary is not None and options.divergence in ACCEPTANCES:
            if summaries is None:
                summaries = logit_summaries(BackboneParts(backbone.model), states, teacher_inputs(scored))
            parts.append(summaries[..., :1])
        return cls(options, backbone, tuple(ahead(part, scored.shape[-1]) for part in parts))

    def terms(
        self, distribution: WindowDistribution, tokens: Tensor, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the terms and acceptances of some positions, [N, n] each; at depth 1 the likelihood, and 0.

        `tokens` are [N, n] int64, `inputs` chunks of `arguments`. Without depth 1 both are [N, n - 1].
        """
        tokens, depths = tokens[..., -distribution.window :], tokens.shape[-1] - 1
        log_probs = distribution.conditional_log_probs(tokens)  # [N, n or n - 1, v]
        likelihood = at_tokens(log_probs, tokens)
        log_q = log_probs[..., -depths:, :]  # [N, n - 1, v]
        parts = [part.unflatten(-1, (depths, -1)) for part in inputs]  # [N, n - 1, d], [N, n - 1, 1]
        with torch.no_grad():
            log_p = self.backbone.unembed(parts[0]).to(log_q.dtype)  # [N, n - 1, v]
            log_p = log_p.log_softmax(-1) if len(parts) == 1 else log_p - parts[1].to(log_q.dtype)
        kind, share = self.options.divergence, self.options.label_weight
        mixed, accepted = teacher_terms(kind, share, log_p, log_q, likelihood[..., -depths:])
        first = likelihood[..., :-depths]  # [N, 1], or [N, 0]
        return torch.cat([-first, mixed], -1), nn.functional.pad(accepted, (first.shape[-1], 0))


@torch.no_grad()
def of_logits(
    backbone: BackboneParts, states: Tensor, where: Tensor, read: Callable[..., Tensor], *arguments: Tensor
) -> Tensor:
    """Return what `read` makes of logits at states [B, L, d] and of arguments [B, L, ..]; 0 if not `where`."""
    rows = where.flatten().nonzero()[:, 0].to(states.device)  # [N]
    flat = [values.flatten(0, 1)[rows] for values in (states, *arguments)]  # [N, ...]
    size = max(1, LOGITS_PER_CHUNK // backbone.unembed(states[:1, 0]).shape[-1])
    chunks = zip(*(values.split(size) for values in flat))
    found = torch.cat([read(exact(backbone.unembed(part)), *parts) for part, *parts in chunks])  # [N, ...]
    whole = found.new_zeros(where.numel(), *found.shape[1:]).index_copy(0, rows, found)  # [B L, ...]
    return whole.unflatten(0, where.shape)


def logit_summaries(backbone: BackboneParts, states: Tensor, where: Tensor) -> Tensor:
    """Return logsumexp of all logits at states [B, L, d], and the likeliest token's id, [B, L, 2]; 0 if not `where`."""

    def read(logits: Tensor) -> Tensor:
        return torch.stack([logits.logsumexp(-1), logits.argmax(-1).to(logits.dtype)], -1)  # [N, 2]

    return of_logits(backbone, states, where, read)


def ahead(values: Tensor, window: int) -> Tensor:
    """Return for every position the values [B, L, (n - 1) c] of the n - 1 following ones; 0 beyond the end."""
    padded = nn.functional.pad(values, (0, 0, 0, window - 1))  # [B, L + n - 1, c]
    return torch.cat([padded[:, k : k + values.shape[1]] for k in range(1, window)], -1)  # [B, L, (n - 1) c]


def teacher_inputs(scored: Tensor) -> Tensor:
    """Return which states are before a scored token of depth 2 or more, [B, L] bool, from targets [B, L, n]."""
    shifted = [pad(scored[..., depth], (depth, 0))[:, : scored.shape[1]] for depth in range(1, scored.shape[-1])]
    return torch.stack([torch.zeros_like(scored[..., 0]), *shifted]).any(0)  # [B, L]


def teacher_terms(kind: str, share: float, log_p: Tensor, log_q: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """Return (1 - share) D(p, q) - share log q(label), the `likelihood`, and the detached acceptance, [...] each."""
    distance = divergence(kind, log_p, log_q)
    mixed = distance if share == 0 else (1 - share) * distance - share * likelihood
    return mixed, acceptance(log_p, log_q.detach())


def divergence(kind: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return how far q is from p, [...] in nats (total variation: a probability), from normalised logarithms [..., v].

    Of `DIVERGENCES`, `"lk_kl"` is -log alpha + exp(-3 alpha) KL(p || q), with alpha of the same position and detached:
    KL leads where q is still far from p. `log_q` may be -inf where p is 0.
    """
    if kind not in DIVERGENCES:
        raise ValueError(f"divergence={kind!r} is none of {DIVERGENCES}")
    if kind in ("cross_entropy", "kl"):
        p = log_p.exp()
        if kind == "kl":
            log_q = log_q - log_p
        return -torch.where(p > 0, p * log_q, 0.0).sum(-1)
    if kind == "reverse_kl":
        q = log_q.exp()
        return torch.where(q > 0, q * (log_q - log_p), 0.0).sum(-1)
    if kind == "tv":
        return 1 - acceptance(log_p, log_q)
    lk = -log_acceptance(log_p, log_q)
    if kind == "lk":
        return lk
    fading = (-_KL_DECAY * (-lk).detach().exp()).exp()
    return lk + _KL_SCALE * fading * divergence("kl", log_p, log_q)


def acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return alpha = sum_x min(p(x), q(x)), [...]: the probability that a token drawn from q is accepted."""
    return torch.minimum(log_p, log_q).exp().sum(-1)


def log_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return log alpha, [...], without underflow where p and q hardly overlap."""
    return torch.minimum(log_p, log_q).logsumexp(-1)


def accepted_along(log_q: Tensor, log_p: Tensor, drafted: Tensor) -> Tensor:
    """Return m_k, the probability that block verification accepts at least k drafts of a sequence, for k = 1 .. m.

    `log_q` and `log_p` [..., m] are of the sequence's tokens after a cycle's first one; `drafted` [..., m] is False
    where the sequence ends or a token is never drafted: from there on m_k is 0.
    """
    ratios = torch.where(drafted, log_q - log_p, 0.0)  # [..., m]
    accepted = ratios.cumsum(-1).cummin(-1).values.clamp(max=0).exp()  # the least of Q_j / P_j so far, and 1
    return torch.where(drafted.long().cumprod(-1).bool(), accepted, 0.0)


def cycle_starts(accepted: Tensor, eligible: Tensor) -> Tensor:
    """Return w, the probability that a cycle begins at each position, [B, L] float64.

    `accepted` [B, L, m] are m_k of the drafts at each position, 0 where they reach beyond the sequence; `eligible`
    [B, L] says where a cycle may begin: every run of True is a sequence.
    """
    jumps = _jumps(accepted, eligible)
    length, reach = jumps.shape[1:]
    starts = pad((eligible & ~pad(eligible, (1, -1))).double(), (0, reach))  # [B, L + m + 1]
    for position in range(length):
        # a cycle that accepts k drafts here is followed by one that begins k + 1 tokens later
        starts[:, position + 1 : position + 1 + reach] += starts[:, position, None] * jumps[:, position]
    return starts[:, :length] * eligible


def _jumps(accepted: Tensor, eligible: Tensor) -> Tensor:
    """Return the probability that exactly 0 .. m drafts are accepted, [B, L, m + 1]; 0 where no cycle begins."""
    return (pad(accepted, (1, 0), value=1.0) - pad(accepted, (0, 1))) * eligible[..., None]


def call_weights(accepted: Tensor, eligible: Tensor) -> Tensor:
    """Return w_t (C(t+k) - C(t+k+1)), the expected calls that m_k(t) saves, [B, L, m] float64; see `cycle_starts`."""
    accepted = accepted.detach().double()
    jumps = _jumps(accepted, eligible)
    length, reach = jumps.shape[1:]
    left = jumps.new_zeros(len(jumps), length + reach + 1)  # calls left, [B, L + m + 2]
    for position in reversed(range(length)):
        later = (jumps[:, position] * left[:, position + 1 : position + 1 + reach]).sum(-1)  # [B]
        left[:, position] = (1 + later) * eligible[:, position]
    after = left[:, 1:].unfold(1, reach, 1)[:, :length]  # [B, L, m + 1]
    return cycle_starts(accepted, eligible)[..., None] * (after[..., :-1] - after[..., 1:])


def position_weights(kind: str, accepted: Tensor, eligible: Tensor) -> Tensor:
    """Return the weights of m_k by one of `POSITION_WEIGHTINGS`, [B, L, m] as `accepted`; see `cycle_starts`."""
    if kind == "uniform":
        return eligible[..., None].to(accepted).expand_as(accepted)
    return call_weights(accepted.cpu(), eligible.cpu()).to(accepted)


@torch.no_grad()
def sequence_log_probs(backbone: BackboneParts, states: Tensor, following: Tensor) -> Tensor:
    """Return log p of the token `following` [B, L] each state [B, L, d], [B, L] float32; of a negative one 0."""

    def read(logits: Tensor, ids: Tensor) -> Tensor:
        return logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(-1)  # [N]

    whole = BackboneParts(backbone.model)
    return of_logits(whole, states.detach(), following >= 0, read, following.clamp(min=0))


def block_terms(
    log_q: Tensor, log_p: Tensor, drafted: Tensor, weights: Tensor, label_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the terms of all depths, of m_k times `weights` [..., m], and m_k (`accepted_along`), [..., m] each."""
    accepted = accepted_along(log_q, log_p, drafted)
    terms = -(1 - label_weight) * weights * accepted
    if label_weight:
        terms = terms - label_weight * torch.where(drafted, log_q, 0.0)
    return terms, accepted.detach()


def block_slopes(
    log_q: Tensor, log_p: Tensor, drafted: Tensor, eligible: Tensor, kind: str, label_weight: float
) -> Tensor:
    """Return the terms of whole sequences, their slopes in `log_q` [B, L, m], and m_k, [B, L, m, 3], without gradients.

    A term depends on depths before its own, whose logits exist one chunk at a time: with them the loss is linear. See
    `cycle_starts`; `kind` is one of `POSITION_WEIGHTINGS`.
    """
    log_q, drafted = log_q.detach(), drafted & eligible[..., None]  # [B, L, m]
    weights = position_weights(kind, accepted_along(log_q, log_p, drafted), eligible)
    with torch.enable_grad():
        terms, accepted = block_terms(log_q.requires_grad_(), log_p, drafted, weights, label_weight)
        (slopes,) = torch.autograd.grad(terms.sum(), log_q)
    return torch.stack([terms.detach(), slopes, accepted], -1)


@dataclass
class BlockTarget:
    """What heads learn from depth 2 on, in place of a `Teacher`.

    `arguments` are log p of the drafts' tokens, whether they are drafted, and weights, [B, L, n - 1] each.
    """

    label_weight: float
    arguments: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        label_weight: float,
        backbone: BackboneParts | None,
        last_states: Tensor | None,
        tokens: Tensor,
        scored: Tensor,
        drafted: Tensor,
    ) -> BlockTarget:
        """Return the target of a batch, with all positions weighed alike, from the verifier's last states [B, L, d].

        `tokens` [B, L, n] is the window after every position; `drafted` says where a scored token may also be drafted.
        """
        if last_states is None or backbone is None:
            raise ValueError("divergence='block' needs the backbone's last hidden states, not None")
        log_p = sequence_log_probs(backbone, last_states, tokens[..., 0].masked_fill(~teacher_inputs(scored), -1))
        eligible = scored[..., :2].all(-1)[..., None]  # [B, L, 1]
        drafted = drafted[..., 1:] & eligible  # [B, L, n - 1]
        arguments = ahead(log_p[..., None], scored.shape[-1]), drafted, eligible.to(log_p).expand(drafted.shape)
        return cls(label_weight, arguments)

    def terms(
        self, distribution: WindowDistribution, tokens: Tensor, inputs: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the terms and m_k of some positions, [N, n] each; see `Teacher.terms`."""
        log_p, drafted, weights = inputs
        log_q = distribution.token_log_probs(tokens[..., -distribution.window :])
        first, log_q = log_q.tensor_split([log_q.shape[-1] - drafted.shape[-1]], -1)  # [N, 1 or 0], [N, n - 1]
        terms, accepted = block_terms(log_q, log_p.to(log_q), drafted, weights.to(log_q), self.label_weight)
        return torch.cat([-first, terms], -1), pad(accepted, (first.shape[-1], 0))

    def weigh_by_calls(self, accepted: Tensor) -> None:
        """Weigh positions by the calls that a rejection there costs, from m_k at all of them, [B, L, n - 1]."""
        log_p, drafted, weights = self.arguments
        self.arguments = log_p, drafted, position_weights("expected_calls", accepted, weights[..., 0].bool())
