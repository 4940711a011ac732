"""The number of tokens to draft next, from past acceptance and the cost of cycles. Knows no model.

The choice depends on finished cycles only, never on the draft it is made for, so that speculation stays lossless.
"""

from __future__ import annotations

import copy
from bisect import bisect
from collections import deque
from itertools import accumulate

_DECAY, _DECAY_OVERALL = 0.98, 0.999
_SHARED_TRIALS = 4.0
_FIRST_TRIALS = 2.5  # two or three drafts of a sequence; a large batch has as many after one
_NEWEST = 9  # cycles of a length whose median is its cost
_PACE_SHARE, _PACE_STEP = 0.4, 2.0  # how much of a cycle's surprise is the machine's, and the largest surprise
_PROBE_BUDGET, _PROBE_AGE = 0.02, 16
_HOPELESS = 0.5  # a shorter draft would have to take half the time that it took before
_PLAIN_BONUS = 1.06  # expectations err upwards, for the best of many is taken, and the slowest sequence ends a batch


class AcceptanceRates:
    """Running acceptance by draft position, up to `longest`; old verifications fade."""

    def __init__(self, longest: int) -> None:
        self.hits, self.trials = [0.0] * longest, [0.0] * longest
        self.overall = [0.5, 1.0]  # hits and trials of all positions, which fade slowly

    def update(self, drafted: int, accepted: list[int]) -> None:
        """Note a verification of `drafted` tokens in each sequence."""
        self.hits, self.trials = ([_DECAY * count for count in counts] for counts in (self.hits, self.trials))
        for position in range(min(drafted, len(self.hits))):
            fresh = [sum(count > position for count in accepted), sum(count >= position for count in accepted)]
            self.hits[position] += fresh[0]
            self.trials[position] += fresh[1]
            self.overall = [_DECAY_OVERALL * old + new for old, new in zip(self.overall, fresh)]

    def survival(self) -> list[float]:
        """Return S_1 .. S_longest: the product of the rates per position, each drawn towards that of all positions."""
        overall = self.overall[0] / self.overall[1]
        shares, survival = [], 1.0
        for hits, trials in zip(self.hits, self.trials):
            survival *= (hits + _SHARED_TRIALS * overall) / (trials + _SHARED_TRIALS)
            shares.append(survival)
        return shares


class CycleCosts:
    """Seconds of a cycle by draft length: the median of the newest ones, between measured lengths a straight line.

    Times are normalised by the machine's speed at their time, so that lengths that were tried long ago compare.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._pace = 0.0  # seconds, at this moment, of what took a time of 1

    def count(self, length: int) -> int:
        """Return how many cycles of this length were measured, as far as they are remembered."""
        return len(self._seen.get(length, ()))

    def add(self, length: int, seconds: float) -> None:
        """Note the time of a cycle."""
        seconds = max(seconds, 1e-9)
        if length in self._seen:
            surprise = min(max(seconds / self.seconds(length), 1 / _PACE_STEP), _PACE_STEP)
            self._pace *= surprise**_PACE_SHARE
        self._pace = self._pace or seconds
        self._seen.setdefault(length, deque(maxlen=_NEWEST)).append(seconds / self._pace)

    def seconds(self, length: int) -> float:
        """Return the time of a cycle of this length; longer ones never take less. 0 before any was measured."""
        if not self._seen:
            return 0.0
        lengths = sorted(self._seen)
        medians = (sorted(self._seen[each])[(len(self._seen[each]) - 1) // 2] for each in lengths)
        times = list(accumulate(medians, max))
        if len(lengths) == 1 or length < lengths[0]:
            return self._pace * times[0]
        index = min(bisect(lengths, length), len(lengths) - 1)
        slope = (times[index] - times[index - 1]) / (lengths[index] - lengths[index - 1])
        return self._pace * (times[index - 1] + slope * (length - lengths[index - 1]))


class AdaptiveSchedule:
    """The length with the most expected tokens per second, of 0 (plain decoding) to `longest`.

    Drafting m tokens yields 1 + S_1 + ... + S_m tokens on average (`AcceptanceRates.survival`), in the seconds that
    such cycles took. Lengths that were not tried for long are tried now and then, at about 2 % of all time.

    Args:
        longest: Upper bound of the length.
        lookahead: 1 where the forward of one cycle makes the draft of the next, else 0.
    """

    def __init__(self, longest: int, lookahead: int = 0) -> None:
        self.longest, self.lookahead = longest, lookahead
        self.rates, self.costs = AcceptanceRates(longest), CycleCosts()
        self.cycles, self.warm, self.tried = 0, False, dict.fromkeys(range(longest + 1), -_PROBE_AGE)
        self.total = self.lost = 0.0
        self._probed, self._again = 0, 0

    def resumed(self) -> AdaptiveSchedule:
        """Return a copy for the next call, which begins with what this one learned."""
        schedule = copy.deepcopy(self)
        schedule._again = 0
        return schedule

    def length(self) -> int:
        """Return full drafts at first (and a plain cycle, for its cost), then the best length by expectation."""
        if self.cycles == 1 - self.lookahead:
            return 0
        if self._again:  # one cycle made the draft that is tried, and the next verifies it
            self._again -= 1
            return self._probed
        self.warm = self.warm or (self.costs.count(self.longest) > 1 and self.rates.trials[0] > _FIRST_TRIALS)
        if not self.warm:
            return self.longest
        survival = self.rates.survival()
        yields = [1 + sum(survival[:length]) for length in range(self.longest + 1)]
        seconds = [max(self.costs.seconds(length), 1e-9) for length in range(self.longest + 1)]
        rates = [gain / cost for gain, cost in zip(yields, seconds)]
        rates[0] *= _PLAIN_BONUS
        best = max(range(self.longest + 1), key=rates.__getitem__)
        return self._probe(best, yields, seconds)

    def update(self, drafted: int, accepted: list[int], seconds: float, requested: int | None = None) -> None:
        """Note a finished cycle: tokens of the draft, accepted ones per open sequence, wall time, requested length."""
        self.cycles += 1
        # with `lookahead` the next draft is made in this cycle, and costs; elsewhere the one that was verified
        requested = drafted if requested is None or not self.lookahead else requested
        self.total += seconds
        self.tried[requested] = self.cycles
        self.costs.add(requested, seconds)
        self.rates.update(drafted, accepted)

    def _probe(self, best: int, yields: list[float], seconds: list[float]) -> int:
        """Return the best length, or one that was not tried for long, where the budget for that allows it."""
        rate = yields[best] / seconds[best]
        for length in sorted({0, best - 1, best + 1, self.longest} - {best}, key=lambda n: self.tried.get(n, 0)):
            if not 0 <= length <= self.longest or self.cycles - self.tried[length] < _PROBE_AGE:
                continue
            if length < best and yields[length] / seconds[length] < _HOPELESS * rate:
                continue
            loss = (seconds[length] - yields[length] / rate) * (1 + self.lookahead)
            if self.lost + loss <= _PROBE_BUDGET * self.total:
                self.lost += loss
                self._probed, self._again = length, self.lookahead
                return length
        return best
