"""Expected calls along a sequence: how many verifications speculative decoding would take to write it, without drawing.

Let x_0 .. x_T be a sequence that follows the target's distributions p, and q the drafter's, both conditioned on the
tokens of x before each. Of a cycle that begins with x_t, the first k drafts are accepted, and the sequence continues as
x does, with the probability p(x_{t+1}) .. p(x_{t+k}) m_k(t), where with P_j and Q_j the products of p and q over
x_{t+1} .. x_{t+j}

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

from dataclasses import dataclass

import torch

from ...generation.tensors.tensor_files import Fields
from ...modeling.common.teacher import cycle_starts
from ...modeling.heads.losses import tokens_ahead

SAMPLED, GREEDY_RULE = ("block", "token"), ("greedy",)
"""Ways to verify sampled drafts, and greedy ones."""


def acceptance_along(
    draft: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor, temperature: float, rule: str
) -> torch.Tensor:
    """Return m_k, the probability that at least k drafts are accepted given the tokens, for k = 1 .. m.

    Args:
        draft: [..., m, V], log-probabilities of the drafter, each conditioned on the tokens before it.
        target: [..., m, V], logits of the target for the same tokens.
        tokens: [..., m] int64.
        temperature: Applied to both.
        rule: `"block"`, `"token"` or `"greedy"`.

    Returns:
        [..., m] float64.
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

    def as_lists(self) -> dict[str, list]:
        """Return the fields for JSON."""
        return {name: values.tolist() for name, values in vars(self).items()}

    @classmethod
    def from_lists(cls, lists: dict[str, list]) -> ExpectedCalls:
        """Return the inverse of `as_lists`."""
        calls, accepted = (torch.tensor(lists[name], dtype=torch.float64) for name in ("calls", "accepted"))
        return cls(torch.tensor(lists["tokens"]), calls, accepted)

    def fields(self) -> Fields:
        """Return the fields of a `DecodingResult`."""
        names = "expected_tokens_per_call", "expected_standard_error", "expected_by_position"
        return dict(zip(names, (self.tokens_per_call, self.standard_error, self.by_position)))
