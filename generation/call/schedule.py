"""The number of tokens to draft next, from past acceptance and the cost of cycles. Knows no model.

What cycles cost is known beforehand (`ExpectedSchedule`, the default), or is measured (`AdaptiveSchedule`).

The choice depends on finished cycles only, never on the draft it is made for, so that speculation stays lossless.
"""

from __future__ import annotations

import copy
from bisect import bisect
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate

_DECAY, _DECAY_OVERALL = 0.98, 0.999
_SHARED_TRIALS = 4.0
_FIRST_TRIALS = 2.5  # two or three drafts of a sequence; a large batch has as many after one
_NEWEST = 9  # cycles of a length whose median is its cost
_PACE_SHARE, _PACE_STEP = 0.4, 2.0  # how much of a cycle's surprise is the machine's, and the largest surprise
_PROBE_BUDGET, _PROBE_AGE = 0.02, 16
_HOPELESS = 0.5  # a shorter draft would have to take half the time that it took before
_PLAIN_BONUS = 1.06  # expectations err upwards, for the best of many is taken, and the slowest sequence ends a batch
_PRIOR_TRIALS = 4.0  # what an expectation of a kind of drafts counts as
_HOPE = 0.8  # the acceptance for which drafts are asked again
_PAUSE = 16  # plain cycles before that, at first


class AcceptanceRates:
    """Running acceptance by draft position, up to `longest`; old verifications fade.

    Before anything is known, a share of `first` drafts is expected to be accepted, and of `later` ones behind those.
    """

    def __init__(self, longest: int, first: float = 0.5, later: float = 0.5, weight: float = 1.0) -> None:
        self.hits, self.trials = [0.0] * longest, [0.0] * longest
        # hits and trials of the first position, and of all later ones, which fade slowly
        self.overall = [[first * weight, weight], [later * weight, weight]]

    def update(self, drafted: int, accepted: list[int]) -> None:
        """Note a verification of `drafted` tokens in each sequence."""
        self.hits, self.trials = ([_DECAY * count for count in counts] for counts in (self.hits, self.trials))
        for position in range(min(drafted, len(self.hits))):
            fresh = [sum(count > position for count in accepted), sum(count >= position for count in accepted)]
            self.hits[position] += fresh[0]
            self.trials[position] += fresh[1]
            place = min(position, 1)
            self.overall[place] = [_DECAY_OVERALL * old + new for old, new in zip(self.overall[place], fresh)]

    def fade(self, share: float) -> None:
        """Leave a share of everything that was counted."""
        self.hits, self.trials = ([share * count for count in counts] for counts in (self.hits, self.trials))
        self.overall = [[share * count for count in counts] for counts in self.overall]

    def survival(self) -> list[float]:
        """Return S_1 .. S_longest: the product of the rates per position, each drawn towards that of all positions."""
        first, later = (hits / trials for hits, trials in self.overall)
        shares, survival = [], 1.0
        for position, (hits, trials) in enumerate(zip(self.hits, self.trials)):
            survival *= (hits + _SHARED_TRIALS * (later if position else first)) / (trials + _SHARED_TRIALS)
            shares.append(survival)
        return shares


class ExpectedSchedule:
    """The length with the most expected tokens for what cycles cost, of 0 (plain decoding) to the longest.

    Drafting m tokens yields 1 + S_1 + ... + S_m tokens on average, by the acceptance of this call's earlier cycles: a
    function of its text, so that a seed repeats a call. Kinds of drafts, as n-grams of one token and of three, have
    rates of their own. Where no length pays for a kind, its drafts are asked again after 16, 32, 64, ... cycles.

    Args:
        costs: By kind of drafts, of cycles by length, in those of length 0.
        priors: By kind, the acceptance that is expected of a first token, and of later ones.
        lookahead: 1 where the forward of one cycle makes the draft of the next, else 0.
    """

    reads_kinds = True

    def __init__(self, costs: list[list[float]], priors: Sequence[tuple[float, float]], lookahead: int = 0) -> None:
        self.costs, self.lookahead, self.longest = costs, lookahead, max(map(len, costs)) - 1
        self.rates = [AcceptanceRates(self.longest, *prior, weight=_PRIOR_TRIALS) for prior in priors]
        self.pauses, self.waited, self.kinds = [_PAUSE] * len(priors), [0] * len(priors), list[int]()
        self.again, self.ended = 0, 0  # cycles that are still asked for drafts, and sequences that are done

    def length(self, kinds: Sequence[int] = ()) -> int:
        """Return the length of the next drafts, whose kinds are known of every sequence; -1: it gets none."""
        self.kinds, gains = list(kinds), [0.0] * self.longest
        for kind, count in Counter(kind for kind in kinds if kind >= 0).items():
            share = count / max(len(kinds) - self.ended, count)
            gains = [gain + share * alive for gain, alive in zip(gains, self.rates[kind].survival())]
        if (kind := max(kinds, default=-1)) < 0:
            return 0
        hopeful = [_HOPE ** (position + 1) for position in range(self.longest)]
        if self.again:
            self.again -= 1
            return self._best(kind, hopeful)
        if best := self._best(kind, gains):
            self.pauses[kind] = _PAUSE
            return best
        self.waited[kind] += 1
        if self.waited[kind] <= self.pauses[kind]:
            return 0
        self.waited[kind], self.pauses[kind], self.again = 0, 2 * self.pauses[kind], self.lookahead
        self.rates[kind].fade(0.5)  # text has gone on since
        return self._best(kind, hopeful)

    def update(self, drafted: int, accepted: list[int], seconds: float | None, asked: int, depths: list[int]) -> None:
        """Note a finished cycle, as in `AdaptiveSchedule`, with the longest path of the draft per sequence."""
        self.ended = sum(count < 0 for count in accepted)
        for kind, depth, count in zip(self.kinds, depths, accepted):
            if kind >= 0 and depth and count >= 0:
                self.rates[kind].update(depth, [count])

    def _best(self, kind: int, gains: list[float]) -> int:
        rates = [gain / cost for gain, cost in zip(accumulate(gains, initial=1.0), self.costs[kind])]
        return max(range(len(rates)), key=rates.__getitem__)


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

    reads_kinds = False  # on an accelerator the host would wait for them

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

    def length(self, kinds: Sequence[int] = ()) -> int:
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

    def update(
        self,
        drafted: int,
        accepted: list[int],
        seconds: float | None,
        requested: int | None = None,
        depths: Sequence[int] = (),
    ) -> None:
        """Note a finished cycle: tokens of the draft, accepted ones per sequence (-1: none asked), wall time, request.

        The time is None where the next cycle of its kind takes another; the paths of single sequences are not read.
        """
        if seconds is None:
            return
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
