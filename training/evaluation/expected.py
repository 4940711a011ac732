"""Expected acceptance, teacher-forced: what a head's drafts are worth along a given text, without drawing any draft.

Let x be a text that follows the target's distributions p_i, and q_i a head's distributions given the tokens of x before
them (the first token of the window, which the last verification added, included). With P_k and Q_k the products of
p_i(x_i) and q_i(x_i), block verification (Sun et al. 2024) accepts the first k drafts of x with the weight
w_k = min(w_{k-1} p_k / q_k, 1), so that over drafts from q

    P(accepted >= k) = E_q[w_k] = E_p[w_k Q_k / P_k] = E_p[min_{j <= k} Q_j / P_j]
                     = E_p[sum_v min(m_{k-1} p_k(v), (Q_{k-1} / P_{k-1}) q_k(v))],   m_k = min_{j <= k} Q_j / P_j,

where the last step sums the k-th token out. Token verification (Leviathan et al. 2023) gives in the same way
E_p[prod_{j < k} min(1, q_j / p_j) sum_v min(p_k(v), q_k(v))]. Both are sums over the text's own tokens: nothing is
drawn, all heads are asked about the same places, and one pass of the backbone serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...generation.verification import check_rule
from ...modeling.sampling import draw
from .decoding import DecodingMode

_CHUNK = 128  # places per evaluation of a head's distributions: [places, n, v] in float64 must fit into memory


@dataclass(frozen=True)
class ExpectedAcceptance:
    """What drafts are expected to bring.

    Attributes:
        by_position: For draft positions 1, 2, ...: the probability that the drafts are accepted up to there.
        standard_error: Of `tokens_per_call`, from the spread between texts (places of one text are no independent
            witnesses).
        places: Places of the texts that were looked at.
    """

    by_position: list[float]
    standard_error: float
    places: int

    @property
    def tokens_per_call(self) -> float:
        """The accepted drafts and the token that verification adds."""
        return 1.0 + sum(self.by_position)

    @classmethod
    def of(cls, reached: torch.Tensor) -> ExpectedAcceptance:
        """The means of P(accepted >= k) [N, S, m] at S places in each of N texts."""
        per_text = reached.sum(-1).mean(-1)
        error = float(per_text.std()) / len(reached) ** 0.5 if len(reached) > 1 else float("nan")
        return cls(reached.mean((0, 1)).clamp(0, 1).tolist(), error, reached[..., 0].numel())


class TeacherForced:
    """Places of texts, with the backbone's states and distributions there: made once, asked for every head of this
    backbone.

    Args:
        hidden: [N, S, d] states, S places in each of N texts, of which heads draft.
        windows: [N, S, n] int64, the tokens behind each place; the first is the one that a verification added.
        logits: [N, S, n - 1, v], the target's logits of the tokens behind the first.
    """

    def __init__(self, hidden: torch.Tensor, windows: torch.Tensor, logits: torch.Tensor) -> None:
        self.hidden, self.windows, self.logits = hidden, windows, logits

    @classmethod
    @torch.no_grad()
    def on_text(
        cls, backbone: Any, ids: torch.Tensor, window: int, first: int = 64, every: int = 16, batch_size: int = 8
    ) -> TeacherForced:
        """Places on the texts themselves: right for T = 1, because text is what the backbone's own distribution
        imitates.

        Args:
            backbone: The model.
            ids: [N, L] int64.
            window: n.
            first: Column of the first place.
            every: Columns from place to place.
            batch_size: Texts per forward.

        Raises:
            ValueError: Texts that are too short for one place.
        """
        places = torch.arange(first, max(first, ids.shape[1] - window), every)
        if not len(places):
            raise ValueError(
                f"texts of {ids.shape[1]} tokens have no place with {first} tokens before and {window} behind"
            )
        parts = []
        for part in ids.split(batch_size):
            outputs = backbone(part, use_cache=False, output_hidden_states=[-1])
            parts.append(_cut(outputs.hidden_states[-1], part, outputs.logits, places, window))
        return cls(*(torch.cat(tensors) for tensors in zip(*parts)))

    @classmethod
    @torch.no_grad()
    def on_continuations(
        cls, backbone: Any, prefixes: torch.Tensor, window: int, mode: DecodingMode, places: int = 16, seed: int = 0
    ) -> TeacherForced:
        """Places along what the backbone itself writes behind prefixes: right for greedy decoding and any temperature.

        Args:
            backbone: The model.
            prefixes: [N, L] int64.
            window: n.
            mode: How it writes. Only its temperature counts.
            places: Places behind each prefix, from its last token on.
            seed: Of sampled continuations.
        """
        generator = torch.Generator().manual_seed(seed)
        cache, fed, hidden, logits, tokens = None, prefixes, [], [], []
        for _ in range(places + window - 1):
            outputs = backbone(fed, past_key_values=cache, use_cache=True, output_hidden_states=[-1], logits_to_keep=1)
            cache = outputs.past_key_values
            hidden.append(outputs.hidden_states[-1][:, -1])
            logits.append(outputs.logits[:, -1])
            fed = _next(logits[-1], mode.temperature, generator)[:, None]
            tokens.append(fed)
        # column i of `hidden` and `logits` stands before token i: shift the text so that places count as in `on_text`
        text = torch.cat([prefixes[:, -1:], *tokens], dim=1)
        return cls(*_cut(torch.stack(hidden, 1), text, torch.stack(logits, 1), torch.arange(places), window))

    def acceptance(self, drafter: Any, mode: DecodingMode, rule: str = "block") -> ExpectedAcceptance:
        """What a head's drafts of n - 1 tokens are expected to bring at these places; arguments as of `reached`."""
        return ExpectedAcceptance.of(self.reached(drafter, mode, rule))

    @torch.no_grad()
    def reached(self, drafter: Any, mode: DecodingMode, rule: str = "block") -> torch.Tensor:
        """P(accepted >= k) for k = 1..n - 1 at every place.

        Args:
            drafter: What has the `window_distribution` of the states.
            mode: Greedy, or a temperature, which both distributions get.
            rule: `"block"` or `"token"`, for sampled drafts.

        Returns:
            [N, S, n - 1] float64.

        Raises:
            ValueError: An unknown rule.
        """
        check_rule(rule)
        count, places = self.windows.shape[:2]
        flat = [tensor.flatten(0, 1).split(_CHUNK) for tensor in (self.hidden, self.windows, self.logits)]
        found = []
        for hidden, window, logits in zip(*flat):
            drafted = drafter.window_distribution(hidden).conditional_log_probs(window)[:, 1:]
            found.append(accepted_up_to(window[:, 1:], drafted, logits, mode.temperature, rule))
        return torch.cat(found).view(count, places, -1)


def _next(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if not temperature:
        return logits.argmax(-1)
    return draw((logits.float() / temperature).softmax(-1), generator)


def _cut(
    hidden: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, places: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States [N, S, d], windows [N, S, n] and logits [N, S, n - 1, v] of the columns `places`."""
    ahead = places[:, None] + torch.arange(1, window + 1)
    return hidden[:, places], ids[:, ahead], logits[:, ahead[:, :-1]]


def accepted_up_to(
    tokens: torch.Tensor, drafted: torch.Tensor, logits: torch.Tensor, temperature: float, rule: str
) -> torch.Tensor:
    """P(accepted >= k) for k = 1..m.

    Args:
        tokens: [M, m] the text.
        drafted: [M, m, v] log q_i.
        logits: [M, m, v] of the target.
        temperature: 0: greedy.
        rule: For sampled drafts.

    Returns:
        [M, m] float64.
    """
    if not temperature:
        return (drafted.argmax(-1) == logits.argmax(-1)).double().cumprod(1)
    q = (drafted.double() / temperature).log_softmax(-1)
    p = (logits.double() / temperature).log_softmax(-1)
    text = tokens[..., None]
    before = _kept_before(q.gather(-1, text)[..., 0], p.gather(-1, text)[..., 0], rule)
    return torch.minimum(before[0][..., None] + p, before[1][..., None] + q).exp().sum(-1)


def _kept_before(q: torch.Tensor, p: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """log m_{k-1} and log Q_{k-1} / P_{k-1} (blocks), or twice log prod of min(1, q_j / p_j): [M, m] each."""
    ratio = torch.nn.functional.pad((q - p)[:, :-1], (1, 0))
    if rule == "token":
        kept = ratio.clamp(max=0).cumsum(1)
        return kept, kept
    total = ratio.cumsum(1)
    return total.cummin(1).values, total
