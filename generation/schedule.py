"""How many tokens to draft next, from what was accepted and from what cycles cost. Knows no model.

The choice looks at finished cycles only, never at the draft it is made for, so that speculation stays lossless.
"""

from __future__ import annotations

from typing import Protocol

_KEEP = 0.98
_FIRST_CYCLES = 4
_PROBE_BUDGET = 0.02
_SHARED_TRIALS = 4.0


class DraftSchedule(Protocol):
    """Decides the length of each draft."""

    def length(self) -> int:
        """Tokens to draft in the next cycle."""

    def update(self, drafted: int, accepted: list[int], seconds: float, asked: int | None = None) -> None:
        """Takes in a finished cycle: draft length, accepted drafts per open row, wall time, and the length asked for.

        Where the forward that verifies a draft also makes the next one, a cycle pays for what was asked in it, whether
        or not there was a draft to verify yet.
        """


class ConstantSchedule:
    """Always the same length.

    Args:
        longest: Tokens to draft.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def length(self) -> int:
        """The length."""
        return self.longest

    def update(self, drafted: int, accepted: list[int], seconds: float, asked: int | None = None) -> None:
        """Nothing to learn."""


class AcceptanceRates:
    """Running acceptance by draft position; old verifications fade.

    Args:
        longest: Positions.
    """

    def __init__(self, longest: int) -> None:
        self.hits, self.trials = [0.0] * longest, [0.0] * longest

    def update(self, drafted: int, accepted: list[int]) -> None:
        """Takes in a verification of `drafted` tokens in each row."""
        self.hits, self.trials = ([_KEEP * count for count in counts] for counts in (self.hits, self.trials))
        for position in range(min(drafted, len(self.hits))):
            self.hits[position] += sum(count > position for count in accepted)
            self.trials[position] += sum(count >= position for count in accepted)

    def survival(self) -> list[float]:
        """S_1 .. S_longest: the product of the rates per position, each drawn towards the rate of all positions."""
        overall = (sum(self.hits) + 0.5) / (sum(self.trials) + 1)
        shares, survival = [], 1.0
        for hits, trials in zip(self.hits, self.trials):
            survival *= (hits + _SHARED_TRIALS * overall) / (trials + _SHARED_TRIALS)
            shares.append(survival)
        return shares


class AdaptiveSchedule:
    """The length with the most expected tokens per second.

    Drafting m tokens yields 1 + S_1 + ... + S_m tokens on average, S_i being the probability of accepting i drafts:
    the product of running rates per position, each drawn towards the rate of all positions where it was seldom tried.
    It takes t(m) = a + b m seconds, fitted to the running cycles. Where drafting does not pay (m = 0, plain decoding) a
    full draft is still tried now and then, so rarely that it costs about 2 %.

    Args:
        longest: Upper bound of the length.
        lead: Cycles between asking for a draft and having it: 1 where the forward of one cycle makes the draft of the
            next, else 0.
    """

    def __init__(self, longest: int, lead: int = 0) -> None:
        self.longest, self.lead = longest, lead
        self.rates = AcceptanceRates(longest)
        self.cycles = 0
        self.idle = 0
        self.costs = _LinearCost()

    def length(self) -> int:
        """Full drafts at first (and one plain cycle, for its cost), then the best length by expectation."""
        if self.cycles < _FIRST_CYCLES + self.lead:
            return 0 if self.cycles == 1 - self.lead else self.longest
        survival = self.rates.survival()
        best = max(range(self.longest + 1), key=lambda length: self._tokens_per_second(length, survival))
        extra = self.costs.seconds(self.longest) / max(self.costs.seconds(0), 1e-9) - 1
        if best == 0 and self.idle * _PROBE_BUDGET > extra * (1 + self.lead):
            return self.longest
        return best

    def update(self, drafted: int, accepted: list[int], seconds: float, asked: int | None = None) -> None:
        """Updates acceptance for the positions that were drafted, and the cost of a cycle of this length."""
        self.cycles += 1
        self.idle = 0 if drafted else self.idle + 1
        self.costs.add(drafted if asked is None else asked, seconds)
        self.rates.update(drafted, accepted)

    def _tokens_per_second(self, length: int, survival: list[float]) -> float:
        return (1 + sum(survival[:length])) / max(self.costs.seconds(length), 1e-9)


class _LinearCost:
    """Least squares of seconds against draft length, old cycles fading; slow outliers are clipped."""

    def __init__(self) -> None:
        self.weight = self.x = self.y = self.xx = self.xy = 0.0

    def add(self, length: int, seconds: float) -> None:
        if self.weight > 3:
            seconds = min(seconds, 3 * self.seconds(length))
        fresh = (1.0, length, seconds, length * length, length * seconds)
        old = (self.weight, self.x, self.y, self.xx, self.xy)
        self.weight, self.x, self.y, self.xx, self.xy = (_KEEP * a + b for a, b in zip(old, fresh))

    def seconds(self, length: int) -> float:
        if self.weight == 0:
            return 0.0
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        slope = (self.xy / self.weight - mean_x * mean_y) / spread if spread > 1e-9 else 0.0
        return max(mean_y + max(slope, 0.0) * (length - mean_x), 0.1 * mean_y)
