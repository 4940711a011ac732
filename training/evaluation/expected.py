"""Expected acceptance, teacher-forced: of a head's drafts along a given text, without drawing any draft.

Let x be a text that follows the target's distributions p_i, and q_i a head's distributions conditioned on the tokens of
x before them (including the first token of the window, which the last verification added). With P_k and Q_k the
products of p_i(x_i) and q_i(x_i), block verification (Sun et al. 2024) accepts the first k drafts of x with the weight
w_k = min(w_{k-1} p_k / q_k, 1), so that over drafts from q

    P(accepted >= k) = E_q[w_k] = E_p[w_k Q_k / P_k] = E_p[min_{j <= k} Q_j / P_j]
                     = E_p[sum_v min(m_{k-1} p_k(v), (Q_{k-1} / P_{k-1}) q_k(v))],   m_k = min_{j <= k} Q_j / P_j,

where the last step sums the k-th token out. Token verification (Leviathan et al. 2023) gives in the same way
E_p[prod_{j < k} min(1, q_j / p_j) sum_v min(p_k(v), q_k(v))]. Both are sums over the text's own tokens: nothing is
drawn, all heads are measured at the same positions, and one forward of the backbone serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...generation.verification.chains import check_rule
from ...modeling.sampling import draw
from .decoding import DecodingMode

_CHUNK = 128  # positions per evaluation of a head's distributions: [positions, n, v] in float64 must fit into memory


@dataclass(frozen=True)
class ExpectedAcceptance:
    """How many tokens of drafts are expected to be accepted.

    Attributes:
        by_position: For draft positions 1, 2, ...: the probability that the drafts are accepted up to there.
        standard_error: Standard error of `tokens_per_call`, from the spread between texts (positions of one text are
            not independent).
        places: Number of positions of the texts that were measured.
    """

    by_position: list[float]
    standard_error: float
    places: int

    @property
    def tokens_per_call(self) -> float:
        """Expected tokens of a call: the accepted drafts and the token that verification adds."""
        return 1.0 + sum(self.by_position)

    @classmethod
    def of(cls, reached: torch.Tensor) -> ExpectedAcceptance:
        """Return the means of P(accepted >= k) [N, S, m] at S positions in each of N texts."""
        per_text = reached.sum(-1).mean(-1)
        error = float(per_text.std()) / len(reached) ** 0.5 if len(reached) > 1 else float("nan")
        return cls(reached.mean((0, 1)).clamp(0, 1).tolist(), error, reached[..., 0].numel())


class TeacherForced:
    """Positions of texts, with the backbone's states and distributions: computed once for all heads of a backbone.

    Args:
        hidden: [N, S, d] states at S positions in each of N texts, from which heads draft.
        windows: [N, S, n] int64, the tokens after each position; the first is the one that a verification added.
        logits: [N, S, n - 1, v], the target's logits of the tokens after the first.
    """

    def __init__(self, hidden: torch.Tensor, windows: torch.Tensor, logits: torch.Tensor) -> None:
        self.hidden, self.windows, self.logits = hidden, windows, logits

    @classmethod
    @torch.no_grad()
    def on_text(
        cls, backbone: Any, ids: torch.Tensor, window: int, first: int = 64, every: int = 16, batch_size: int = 8
    ) -> TeacherForced:
        """Return positions of the texts themselves: right for T = 1, because the backbone was trained on such texts.

        Args:
            backbone: The model.
            ids: [N, L] int64.
            window: n.
            first: Column of the first position.
            every: Columns between positions.
            batch_size: Texts per forward.

        Raises:
            ValueError: Texts that are too short for one position.
        """
        columns = torch.arange(first, max(first, ids.shape[1] - window), every)
        if not len(columns):
            raise ValueError(
                f"ids has {ids.shape[1]} columns; first={first} and window={window} need more than {first + window}"
            )
        parts = []
        for part in ids.split(batch_size):
            outputs = backbone(part, use_cache=False, output_hidden_states=[-1])
            parts.append(_cut(outputs.hidden_states[-1], part, outputs.logits, columns, window))
        return cls(*(torch.cat(tensors) for tensors in zip(*parts)))

    @classmethod
    @torch.no_grad()
    def on_continuations(
        cls, backbone: Any, prefixes: torch.Tensor, window: int, mode: DecodingMode, places: int = 16, seed: int = 0
    ) -> TeacherForced:
        """Return positions of the backbone's own continuations: right for greedy decoding and any temperature.

        Args:
            backbone: The model.
            prefixes: [N, L] int64.
            window: n.
            mode: Way of decoding, of which only the temperature is read.
            places: Number of positions after each prefix, from its last token on.
            seed: Seed of sampled continuations.
        """
        generator = torch.Generator().manual_seed(seed)
        cache, inputs, hidden, logits, tokens = None, prefixes, [], [], []
        for _ in range(places + window - 1):
            outputs = backbone(
                inputs, past_key_values=cache, use_cache=True, output_hidden_states=[-1], logits_to_keep=1
            )
            cache = outputs.past_key_values
            hidden.append(outputs.hidden_states[-1][:, -1])
            logits.append(outputs.logits[:, -1])
            inputs = _next(logits[-1], mode.temperature, generator)[:, None]
            tokens.append(inputs)
        # column i of `hidden` and `logits` comes before token i: shift the text, so that columns count as in `on_text`
        text = torch.cat([prefixes[:, -1:], *tokens], dim=1)
        return cls(*_cut(torch.stack(hidden, 1), text, torch.stack(logits, 1), torch.arange(places), window))

    def acceptance(self, drafter: Any, mode: DecodingMode, rule: str = "block") -> ExpectedAcceptance:
        """Return the expected acceptance of a head's drafts of n - 1 tokens; arguments as for `reached`."""
        return ExpectedAcceptance.of(self.reached(drafter, mode, rule))

    @torch.no_grad()
    def reached(self, drafter: Any, mode: DecodingMode, rule: str = "block") -> torch.Tensor:
        """Return P(accepted >= k) for k = 1..n - 1 at every position.

        Args:
            drafter: A model with the method `window_distribution` of states.
            mode: Greedy, or a temperature, which is applied to both distributions.
            rule: `"block"` or `"token"`, for sampled drafts.

        Returns:
            [N, S, n - 1] float64.

        Raises:
            ValueError: An unknown rule.
        """
        check_rule(rule)
        count, positions = self.windows.shape[:2]
        flat = [tensor.flatten(0, 1).split(_CHUNK) for tensor in (self.hidden, self.windows, self.logits)]
        found = []
        for hidden, window, logits in zip(*flat):
            drafted = drafter.window_distribution(hidden).conditional_log_probs(window)[:, 1:]
            found.append(accepted_up_to(window[:, 1:], drafted, logits, mode.temperature, rule))
        return torch.cat(found).view(count, positions, -1)


def _next(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if not temperature:
        return logits.argmax(-1)
    return draw((logits.float() / temperature).softmax(-1), generator)


def _cut(
    hidden: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, columns: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states [N, S, d], windows [N, S, n] and logits [N, S, n - 1, v] at some columns."""
    ahead = columns[:, None] + torch.arange(1, window + 1)
    return hidden[:, columns], ids[:, ahead], logits[:, ahead[:, :-1]]


def accepted_up_to(
    tokens: torch.Tensor, drafted: torch.Tensor, logits: torch.Tensor, temperature: float, rule: str
) -> torch.Tensor:
    """Return P(accepted >= k) for k = 1..m.

    Args:
        tokens: [M, m], the text.
        drafted: [M, m, v] log q_i.
        logits: [M, m, v], those of the target.
        temperature: 0: greedy.
        rule: `"block"` or `"token"`, for sampled drafts.

    Returns:
        [M, m] float64.
    """
    if not temperature:
        return (drafted.argmax(-1) == logits.argmax(-1)).double().cumprod(1)
    q = (drafted.double() / temperature).log_softmax(-1)
    p = (logits.double() / temperature).log_softmax(-1)
    text = tokens[..., None]
    before = _accepted_before(q.gather(-1, text)[..., 0], p.gather(-1, text)[..., 0], rule)
    return torch.minimum(before[0][..., None] + p, before[1][..., None] + q).exp().sum(-1)


def _accepted_before(q: torch.Tensor, p: torch.Tensor, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log m_{k-1} and log Q_{k-1} / P_{k-1} (blocks), or twice log prod of min(1, q_j / p_j), [M, m]."""
    ratio = torch.nn.functional.pad((q - p)[:, :-1], (1, 0))
    if rule == "token":
        accepted = ratio.clamp(max=0).cumsum(1)
        return accepted, accepted
    total = ratio.cumsum(1)
    return total.cummin(1).values, total
