"""The loop as calls run it: what ends the drafts in the midst of a call.

Scores that are no numbers. Where scores of an open sequence are none (NaN, +inf, -inf everywhere), the cycle is
repeated on the cache as it was with b alone: a row that nobody sees is multiplied by 0, and 0 times NaN is NaN. If b's
scores are none either, the backbone is at fault, which is an error; else nothing is drafted from there on. So it is
where a draft was chosen from no numbers; what was drafted before these is verified, for drafts that are dropped for
what was drawn come too seldom.

Processors whose state their own calls move on. They are called as in plain decoding from then on. In the prefill they
may prepare; what moves again in the cycle after it, which has no drafts (the trial), is a state. Where it moves later,
the drafts are dropped, but drawn ones at which it moved: those up to them, themselves included, are verified
(`limits`). In plain decoding, sequences that are further on wait for the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backbone.target import Target
from .call.sequences import NewTokens
from .contract import DraftTree, TargetOutput
from .loop import SpeculativeLoop
from .plan import Plan, decode_plainly
from .results import Cycle
from .trees.building import up_to
from .verification.verifiers import GreedyVerifier


class GuardedLoop(SpeculativeLoop):
    """Scores that are no numbers end the drafts."""

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


class StatefulLoop(GuardedLoop):
    """Drafts until the state of processors moves, and plain decoding after that."""

    limits: list[int] | None = None  # the most tokens of every sequence, where the state moved on a drawn draft
    is_plain = is_trial = False

    def __init__(self, plan: Plan, target: Target) -> None:
        super().__init__(plan, target)
        assert plan.watch is not None  # as `speculative_decoding` sees to
        self.watch = plan.watch

    def _length(self) -> int:
        return 0 if self.is_trial else super()._length()

    def _scores(self, logits: Tensor, tree: DraftTree, is_prefill: bool) -> Tensor:
        """Return the scores of a block after the processors, whose state is as in plain decoding; see the file."""
        watch, processing, self.limits = self.watch, self.plan.draft_options.processing, None
        tokens, done = self.results.tokens, self.results.done
        if self.is_plain:
            return processing.in_step(tokens, logits, done)
        was_trial, self.is_trial = self.is_trial, False
        watch.note()
        scores = processing.in_step(tokens, logits, done) if was_trial else processing(tokens, logits, tree, done)
        if not watch.has_moved():
            return scores
        if is_prefill and not watch.has_matcher:
            self.is_trial = True
            return scores
        self.is_plain = True
        self._end_drafts(warns=False)
        decode_plainly(f"{watch.name}, whose state moves in its calls", self.plan.draft_options)
        if is_prefill or was_trial:
            return scores
        watch.restore()
        if tree.probs is not None:
            scores, limits = processing.until(tokens, logits, tree, done, lambda: watch.moved() is not None)
            watch.restore()
            if any(limit and not over for limit, over in zip(limits, done)):
                self.limits = limits
                return scores
        return processing.in_step(tokens, logits, done)

    def _judged(self, tree: DraftTree, outputs: TargetOutput, scores: Tensor) -> Cycle:
        if self.limits is not None:
            limits = torch.tensor(self.limits, device=scores.device)  # [B]
            result = self.verifier.verify(up_to(tree, limits), scores).first(limits)
            return Cycle(tree, tree, outputs, scores, result)
        if self.is_plain and tree is not self.empty:  # since this cycle: its drafts were read, and are dropped
            first = TargetOutput(outputs.logits[:, :1], outputs.first(1))
            return Cycle(tree, self.empty, first, scores, self.verifier.picked(scores, self.results.tokens))
        return super()._judged(tree, outputs, scores)

    def _skipped(self) -> list[bool]:
        return [done or waits for done, waits in zip(self.results.done, self._waiting())]

    def _waiting(self) -> list[bool]:
        """Return which sequences are further on than others, and wait for these."""
        if self.limits is not None:
            return [not limit for limit in self.limits]
        lengths = self.results.tokens.lengths
        fewest = min((n for n, done in zip(lengths, self.results.done) if not done), default=0)
        return [self.is_plain and n > fewest for n in lengths]

    def _undo(self) -> None:
        super()._undo()
        self.watch.restore()
