"""Loops on a cache of a fixed size, where a cycle is recorded once and replayed (`graphs`).

The ends of sequences are also found on the device (`Stopping.counts`), so that a whole cycle comes before the host
reads it. Where the next cycle needs nothing of the host, it is launched before the host reads this one (`ahead`); where
all sequences turn out to have ended, it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from .backbone.static import HeldBuffers
from .backbone.target import Target
from .call.sequences import FixedSequences, Graphs, NewTokens
from .contract import DraftTree, PrefillOutput
from .graphs import Recorder, fingerprint, held_draft, obstacle_to_whole
from .guarded import GuardedLoop, StatefulLoop
from .plan import Plan
from .results import Cycle, GenerateSpeculativeOutput

R = TypeVar("R")
_LENGTHS = 1, 2, 4  # that adaptive drafts are rounded up to where each has a recording; full ones have another


class RecordedLoop(GuardedLoop):
    """In tensors with constant addresses."""

    fixed: FixedSequences
    target: Any  # Target & HeldBuffers
    recorder: Recorder | None = None  # records and replays; None: nothing does
    ahead: Cycle | None = None  # launched, and not read by the host yet
    is_whole = False  # the host is needed nowhere within a cycle
    is_constant = False  # this cycle has the shapes of others

    def __init__(self, plan: Plan, target: Target) -> None:
        super().__init__(plan, target)
        self.told = self.results.statistics.graphs = Graphs()

    def _first(self, outputs: PrefillOutput) -> None:
        super()._first(outputs)
        plan, target, results = self.plan, self.target, self.results
        room, hold = target.room - results.unwritten, target.held
        results.tokens = self.fixed = FixedSequences(results.tokens, room, hold)
        results.stopping.hold(hold, self.fixed.ids.device)
        self.verifier.hold(hold, room - self.fixed.prompt_length)
        if results.records is not None:
            results.records.copies = True
        reason = obstacle_to_whole(plan.draft_options, results.stopping.others)
        self.is_whole = reason is None
        if reason is not None:
            self.told.reasons["cycle"] = reason
        served = results.records, results.streamer, plan.schedule, results.table
        is_served = any(each is not None for each in served)
        self.needs_host = is_served or self.session.reads_host or plan.call.synced_gpus  # between two cycles
        if plan.unrecorded is not None:
            self.told.reasons["cycle" if self.is_whole else "forward"] = plan.unrecorded
        elif target.buffers is not None:
            shape = fingerprint(*plan.marks, self.is_whole, results.table, plan.hidden_layers, *target.marks)
            self.recorder = Recorder(target.buffers, shape, self.plan.verifier_model.device, self.told)
            self.recorder.begins = not self.session.first_differs and target.fits()

    def _drafts(self) -> bool:
        return self.session is self.plan.session

    def _length(self) -> int:
        is_recorded = self.recorder is not None or self.observer is not None
        most = self.plan.session.num_tokens
        self.is_constant = is_recorded and self.results.positions_left() >= most
        if not self.is_constant:
            return super()._length()
        # drafts beyond the end are cut
        self.target.last_position = None if self.results.table is None else self.results.table - 1
        longest = most if self.schedule is None else self.schedule.length()
        return min(n for n in (0, *_LENGTHS, most) if n >= longest)

    @property
    def is_steady(self) -> bool:
        return self.recorder is None or self.recorder.is_steady

    def _cycle(self, length: int) -> Cycle:
        self.results.statistics.backbone_calls += 1
        drafted = None
        if self.session.reads_host:
            drafted = held_draft(self.session.propose(self.fixed, length), self.target.held)
        if self.is_whole and (self._drafts() or self.ahead is not None):
            cycle = self.ahead or self._region("cycle", self._whole, length, drafted).send()
            self.ahead = self._region("cycle", self._whole, length, None).send() if self._is_followed() else None
            cycle = self._on_host(cycle)
            if cycle.faults and self.ahead is not None:  # it left no trace, so that the next one did its work
                cycle, self.ahead = self._on_host(self.ahead), None
            if not cycle.faults:
                self.results.take(cycle)
                return cycle
        else:
            cycle = self._on_host(self._verified(*self._region("forward", self._read, length, drafted)))
        return self._settled(cycle)

    def _is_followed(self) -> bool:
        """Return whether another cycle surely follows one that nobody has read, but for ends of sequences by eos."""
        is_alike = self.is_constant and self._drafts() and not self.needs_host
        return is_alike and self.results.tokens_left() > self.session.num_tokens + 1

    def _region(self, name: str, function: Callable[..., R], *args: Any) -> R:
        if self.observer is None and self.recorder is not None and self.is_constant and self._drafts():
            return self.recorder(name, function, *args)
        return super()._region(name, function, *args)

    def _whole(self, length: int, drafted: DraftTree | None) -> Cycle:
        """Return a cycle that ends before the host has read it; where a sequence is at fault, it leaves no trace."""
        cycle = self._verified(*self._read(length, drafted))
        counts = self.results.stopping.counts(self.fixed, cycle.result, cycle.is_sound())  # [B]
        self._move_on(cycle, NewTokens.unread(counts))
        return cycle

    def _move_on(self, cycle: Cycle, new: NewTokens) -> None:
        if new.counts:  # the host decided
            self.fixed.end(self.results.done)
        new = NewTokens.unread(new.on_device)  # nobody is told more
        self.fixed.extend(new)
        super()._move_on(cycle, new)

    def _on_host(self, cycle: Cycle) -> Cycle:
        cycle = super()._on_host(cycle)
        self.target.widest = max(self.target.widest, 1 + cycle.fed.tokens.shape[1])  # of blocks that were replayed, too
        if self.is_constant:
            cycle.shorten(self.results.tokens_left() - 1)
        return cycle

    def _repaired(self, cycle: Cycle) -> Cycle:
        cycle = super()._repaired(cycle)
        if getattr(self.verifier, "takes_infinity", False):  # which no recording knew
            self.recorder = None
        return cycle

    def run(self, outputs: PrefillOutput) -> GenerateSpeculativeOutput | Tensor:
        output = super().run(outputs)
        if self.ahead is not None and self.told.replayed:
            self.told.replayed["cycle"] -= 1
        return output


class StatefulRecordedLoop(StatefulLoop, RecordedLoop):
    """In constant tensors, with processors that may have a state."""


def static_loop_of(plan: Plan, target: Target) -> GuardedLoop:
    """Return the loop of a call on a static cache; the statistics say why nothing is recorded."""
    is_stateful = plan.watch is not None
    if isinstance(target, HeldBuffers) and target.buffers is not None and target.is_fixed:
        return (StatefulRecordedLoop if is_stateful else RecordedLoop)(plan, target)
    loop = (StatefulLoop if is_stateful else GuardedLoop)(plan, target)
    reason = plan.unfixed or "another cache than transformers' own"
    loop.results.statistics.graphs = Graphs(reasons={"cycle": reason})
    return loop
