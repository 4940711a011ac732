"""The loss that is paid: the drafts that block verification is expected to accept, differentiable in log q.

Along a text x that was drawn from the verifier's distribution p, a cycle that begins with x_t accepts at least k drafts
with the probability m_k(t) = min over j <= k of min(1, Q_j / P_j), Q and P the products of q and p over the drafts'
tokens (`training.evaluation.expected`). The loss is - sum_k m_k, averaged over places: the expected accepted drafts,
all places alike. It reads log p of the text's own tokens, and no other probability of the verifier. The text must be
the verifier's own, drawn at temperature 1 from its whole distribution: on other text the mean estimates nothing.

Cycles begin more often where drafts are rejected. The expected number of calls W = sum_t w_t, with C(t) those that are
left at t, has the derivative dW / dm_k(t) = - w_t (C(t+k) - C(t+k+1)), so that these weights of m_k, without gradient,
make the loss that of the calls (`loss_places="calls"`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from .backbone_parts import BackboneParts
from .teacher import ahead, of_logits
from .window_distribution import WindowDistribution

PLACES = ("all", "calls")
"""Which places count how much: all alike, or by what a rejection there costs."""


def accepted_along(log_q: torch.Tensor, log_p: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Return m_k, the probability that block verification accepts at least k drafts given the text, for k = 1 .. m.

    Args:
        log_q: [..., m], of the text's tokens after a cycle's first one, each given those before it.
        log_p: [..., m], the verifier's.
        drafted: [..., m] bool, False where the text ends or a token is never drafted; from there on m_k is 0.
    """
    ratios = torch.where(drafted, log_q - log_p, 0.0)
    accepted = ratios.cumsum(-1).cummin(-1).values.clamp(max=0).exp()
    return torch.where(drafted.long().cumprod(-1).bool(), accepted, 0.0)


def cycle_starts(accepted: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return w, the probability that a cycle begins at each position, [B, L] float64.

    Args:
        accepted: [B, L, m], m_k of the drafts at each position; 0 where they would reach beyond the text.
        places: [B, L] bool, True where a cycle may begin; every run of them is a text of its own.
    """
    jumps = _jumps(accepted, places)
    length, reach = jumps.shape[1:]
    starts = pad((places & ~pad(places, (1, -1))).double(), (0, reach))
    for position in range(length):
        starts[:, position + 1 : position + 1 + reach] += starts[:, position, None] * jumps[:, position]
    return starts[:, :length] * places


def _jumps(accepted: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the probability that exactly 0 .. m drafts are accepted, [B, L, m + 1]; 0 where no cycle begins."""
    return (pad(accepted, (1, 0), value=1.0) - pad(accepted, (0, 1))) * places[..., None]


def call_weights(accepted: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return w_t (C(t+k) - C(t+k+1)), what a greater m_k(t) saves in expected calls, [B, L, m] float64.

    Arguments as for `cycle_starts`.
    """
    accepted = accepted.detach().double()
    jumps = _jumps(accepted, places)
    length, reach = jumps.shape[1:]
    left = jumps.new_zeros(len(jumps), length + reach + 1)
    for position in reversed(range(length)):
        later = (jumps[:, position] * left[:, position + 1 : position + 1 + reach]).sum(-1)
        left[:, position] = (1 + later) * places[:, position]
    after = left[:, 1:].unfold(1, reach, 1)[:, :length]
    return cycle_starts(accepted, places)[..., None] * (after[..., :-1] - after[..., 1:])


def place_weights(kind: str, accepted: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the weights of m_k, [B, L, m], like `accepted`: 0 where no cycle begins.

    Args:
        kind: One of `PLACES`.
        accepted: [B, L, m]; read for `"calls"` alone, on the processor.
        places: [B, L] bool, see `cycle_starts`.
    """
    if kind == "all":
        return places[..., None].to(accepted).expand_as(accepted)
    return call_weights(accepted.cpu(), places.cpu()).to(accepted)


@torch.no_grad()
def text_log_probs(backbone: BackboneParts, states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return log p of the token `following` [B, L] every state [B, L, d], given all tokens before: [B, L] float32."""

    def read(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True),)

    return of_logits(BackboneParts(backbone.model), states.detach(), read, following[..., None])[0][..., 0]


def block_terms(
    log_q: torch.Tensor,
    log_p: torch.Tensor,
    drafted: torch.Tensor,
    places: torch.Tensor,
    kind: str = "all",
    label_weight: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the terms of all depths of a whole text, and m_k, [B, L, m] each.

    Args:
        log_q: [B, L, m], see `accepted_along`.
        log_p: [B, L, m].
        drafted: [B, L, m] bool.
        places: [B, L] bool, see `cycle_starts`.
        kind: One of `PLACES`.
        label_weight: Share of the likelihood of drafted tokens that is mixed in.
    """
    drafted = drafted & places[..., None]
    accepted = accepted_along(log_q, log_p, drafted)
    terms = -(1 - label_weight) * place_weights(kind, accepted.detach(), places) * accepted
    if label_weight:
        terms = terms - label_weight * torch.where(drafted, log_q, 0.0)
    return terms, accepted.detach()


@dataclass
class BlockTarget:
    """What heads learn from depth 2 on, in place of a `Teacher`.

    Attributes:
        label_weight: Share of the labels' likelihood that is mixed in.
        arguments: Per position, log p of the drafts' tokens, whether they are drafted, and the places' weights,
            [B, L, n - 1] each.
        missing: None, as of a teacher whose whole distribution is read.
    """

    label_weight: float
    arguments: tuple[torch.Tensor, ...]
    missing: None = None

    @classmethod
    def of(
        cls,
        label_weight: float,
        backbone: BackboneParts | None,
        last_states: torch.Tensor | None,
        tokens: torch.Tensor,
        scored: torch.Tensor,
        drafted: torch.Tensor,
    ) -> BlockTarget:
        """Return the target of a batch, all places alike.

        Args:
            label_weight: See the class.
            backbone: The verifier.
            last_states: [B, L, d], its last hidden states.
            tokens: [B, L, n] int64, the window after every position.
            scored: [B, L, n] bool, where something is scored.
            drafted: [B, L, n] bool, where such a token may be drafted, too.

        Raises:
            ValueError: There is no verifier.
        """
        if last_states is None or backbone is None:
            raise ValueError("loss_divergence='block' needs the backbone's last hidden states, and none were given")
        log_p = text_log_probs(backbone, last_states, tokens[..., 0])
        places = scored[..., :2].all(-1)[..., None]
        drafted = drafted[..., 1:] & places
        arguments = ahead(log_p[..., None], scored.shape[-1]), drafted, places.to(log_p).expand(drafted.shape)
        return cls(label_weight, arguments)

    def terms(
        self, distribution: WindowDistribution, tokens: torch.Tensor, taught: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the terms of some positions, and m_k there, [N, n] each; see `Teacher.terms`."""
        log_p, drafted, weights = taught
        log_q, share = distribution.token_log_probs(tokens), self.label_weight
        accepted = accepted_along(log_q[..., 1:], log_p.to(log_q.dtype), drafted)
        terms = -(1 - share) * weights.to(log_q.dtype) * accepted
        if share:
            terms = terms - share * torch.where(drafted, log_q[..., 1:], 0.0)
        return torch.cat([-log_q[..., :1], terms], -1), pad(accepted.detach(), (1, 0))

    def by_calls(self, accepted: torch.Tensor) -> None:
        """Weigh places by what a rejection there costs, from m_k at all of them, [B, L, n - 1]."""
        log_p, drafted, weights = self.arguments
        self.arguments = log_p, drafted, place_weights("calls", accepted, weights[..., 0].bool())
