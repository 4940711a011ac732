"""The loop as calls run it: scores that are no numbers end the drafts.

Where scores of an open sequence are no numbers (NaN, +inf, -inf everywhere), the cycle is repeated on the cache as it
was with b alone: a row that nobody sees is multiplied by 0, and 0 times NaN is NaN. If b's scores are none either, the
backbone is at fault, which is an error; else nothing is drafted from there on. So it is where a draft was chosen from
no numbers; what was drafted before these is verified, for drafts that are dropped for what was drawn come too seldom.
"""

from __future__ import annotations

from .call.sequences import NewTokens
from .loop import SpeculativeLoop
from .results import Cycle
from .verification.verifiers import GreedyVerifier


class GuardedLoop(SpeculativeLoop):
    """See the file."""

    def _repaired(self, cycle: Cycle) -> Cycle:
        """Return a cycle of b alone in the place of one with faults; from then on nothing is drafted.

        What was drafted is not looked at: scores that drafts alone made none are those of a backbone at fault.

        Raises:
            ValueError: Processors left no token, or the scores of that token alone are no numbers: it is the backbone.
        """
        are_scores = cycle.has_finite_scores()
        if are_scores and isinstance(self.verifier, GreedyVerifier) and not self.verifier.takes_infinity:
            self.verifier.takes_infinity = True  # processors made it, and plain decoding goes on from it
            return self._sound(self._on_host(self.results.write(cycle)))
        if are_scores or cycle.fed.is_empty:
            raise cycle.refusal(self.plan.call.backbone, self.processing)
        self._end_drafts(warns=False)
        self._undo()
        self.results.statistics.backbone_calls += 1
        cycle = self._sound(self._on_host(self._verified(*self._read(0, self.empty))))
        self.plan.call.drafter.warn_of_numbers()
        return cycle

    def _undo(self) -> None:
        """Leave nothing of the last block."""
        self.target.forget(NewTokens([0] * len(self.results.done), self.plan.prompt.device))
