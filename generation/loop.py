"""The decoding loop: draft, one backbone call, verify, accept, roll back. Each sequence accepts on its own.

    tokens     ... x y b            b: the token that the last verification added, not in the cache yet
    draft            |  d1 d2 d3                              DraftSession.propose
    inputs           b  d1 d2 d3    one backbone call         Target.forward
    scores           d1 d2 z  -     the target's choices      Processing, Verifier.verify
    new tokens       d1 d2 z        two drafts and a token    Results.take
    cache      ... x y b  d1 d2     rolled back to here       Target.keep
    next                     z = b  and so on                 DraftSession.advance

The host waits for the device once in a cycle (`Cycle.read`). Beside it: scores that are no numbers and processors
whose state moves (`guarded`), and cycles of fixed shapes, recorded and replayed (`recorded`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .backbone.target import Target
from .call.sequences import NewTokens
from .contract import DraftTree, NoDrafts, PrefillOutput, TargetOutput
from .plan import Plan
from .results import Cycle, GenerateSpeculativeOutput, Results

R = TypeVar("R")
REGION_OBSERVER: Callable[..., Any] | None = None  # tests set it: it runs what could be replayed, "cycle" or "forward"


class SpeculativeLoop:
    """One call of `generate` after its prompt, on its plan, and the backbone with the prompt in its cache.

    State between cycles: the tokens of every sequence (`results`), of which all but the last are in the cache
    (`target`), and the session's. A cycle with faults becomes another one, or an error (`_repaired`, in `guarded`).
    """

    _repaired: Callable[[Cycle], Cycle]
    is_steady = True  # the cycle took as long as the next one of its kind will

    def __init__(self, plan: Plan, target: Target) -> None:
        self.plan, self.target, self.session, self.verifier = plan, target, plan.session, plan.verifier
        self.results, self.empty = Results(plan, target), DraftTree.chain(plan.prompt[:, :0])
        self.processing = plan.draft_options.processing if plan.draft_options.processors else None
        self.schedule, self.observer, self.drops_finished = plan.schedule, REGION_OBSERVER, plan.may_drop_finished()

    def run(self, outputs: PrefillOutput) -> GenerateSpeculativeOutput | Tensor:
        """Decode after transformers' prefill until all sequences have ended, and return the output of the call."""
        try:
            self._first(outputs)
            self.session.begin(outputs, self.target)
            peers, device = cast(Any, self.plan.call.backbone), self.results.tokens.ids.device
            while peers._has_unfinished_sequences(all(self.results.done), self.plan.call.synced_gpus, device=device):
                started = self.drafted = self.called = time.perf_counter()
                length = self._length()
                cycle = self._cycle(length)
                if self.drops_finished and any(self.results.done):
                    self.target.drop_finished(self.results.done)
                ended = time.perf_counter()
                if self.schedule is not None:
                    seconds = ended - started if self.is_steady and self.target.is_steady else None
                    self.schedule.update(cycle.tree.depth, cycle.accepted, seconds, length, cycle.depths)
                self.results.statistics.time(started, self.drafted, self.called, ended)
            return self.results.finished()
        except BaseException:  # a user's cache must not end with layers that only this loop can use
            self.target.abandon()
            raise

    def _first(self, outputs: Any) -> None:
        """Take the token after the prompt."""
        logits = outputs.logits[:, -1:].to(self.plan.prompt.device, torch.float32)  # [B, 1, V]
        cycle = self._verified(self.empty, TargetOutput(logits, outputs.hidden_states), is_prefill=True)
        self.results.take(self._sound(self._on_host(cycle)), is_prefill=True)

    def _length(self) -> int:
        """Return the longest path to draft now: verification adds one more token, and nothing goes beyond the end."""
        kinds = self.session.kinds(self.results.tokens) if self.schedule and self.schedule.reads_kinds else ()
        longest = self.session.num_tokens if self.schedule is None else self.schedule.length(kinds)
        left = min(self.results.positions_left(), self.results.tokens_left() - 1)
        return longest if self.session.is_deterministic else max(min(longest, left), 0)  # shortening changes its text

    def _cycle(self, length: int) -> Cycle:
        """Draft, verify, and move on."""
        self.results.statistics.backbone_calls += 1
        return self._settled(self._on_host(self._verified(*self._region("forward", self._read, length))))

    def _region(self, name: str, function: Callable[..., R], *args: Any) -> R:
        """Run a part of a cycle in which the host waits for nothing, which a replay may replace."""
        return function(*args) if self.observer is None else self.observer(name, function, *args)

    def _read(self, length: int, drafted: DraftTree | None = None) -> tuple[DraftTree, TargetOutput]:
        """Draft, unless `recorded` has drafted on the host, and call the backbone on b and the draft."""
        tree = drafted or self.session.propose(self.results.tokens, length)
        tree.numbers = self.plan.draft_options.numbers.taken(tree.tokens.device)
        block = torch.cat([self.results.tokens.last()[:, None], tree.tokens], dim=1)  # [B, m + 1]
        self.drafted = time.perf_counter()
        outputs = self.target.forward(block, tree, self.plan.hidden_layers)
        outputs.logits = outputs.logits.to(block.device, torch.float32)  # [B, m + 1, V]
        outputs.block, self.called = (block, outputs.logits), time.perf_counter()
        return tree, outputs

    def _verified(self, tree: DraftTree, outputs: TargetOutput, is_prefill: bool = False) -> Cycle:
        """Return the verification of a draft: nothing waits for the device yet."""
        return self.results.write(self._judged(tree, outputs, self._scores(outputs.logits, tree, is_prefill)))

    def _scores(self, logits: Tensor, tree: DraftTree, is_prefill: bool) -> Tensor:
        """Return scores [B, m + 1, v] of a block, after the logits processors of the call."""
        tokens, done = self.results.tokens, self.results.done
        return logits if self.processing is None else self.processing(tokens, logits, tree, done)

    def _judged(self, tree: DraftTree, outputs: TargetOutput, scores: Tensor) -> Cycle:
        tokens, verifier = self.results.tokens, self.verifier
        result = verifier.picked(scores, tokens) if tree is self.empty else verifier.verify(tree, scores)
        return Cycle(tree, tree, outputs, scores, result)

    def _on_host(self, cycle: Cycle) -> Cycle:
        """Let the host read the cycle: `faults` are scores, and `strays` numbers of drafts, that are no numbers."""
        cycle.read(self._skipped())
        if any(cycle.strays):
            self._end_drafts(warns=not cycle.faults)  # else the backbone itself may be at fault
        return cycle

    def _settled(self, cycle: Cycle) -> Cycle:
        """Count the new tokens, leave them in the cache, and show the session what was verified."""
        cycle = self._sound(cycle)
        new = self.results.take(cycle)
        # of a sequence that was cut, the last token that is left is a draft, and counts as the added one
        if self.results.stopping.holds and sum(new.counts) < sum(count + 1 for count in cycle.accepted):
            cycle.result = cycle.result.first(new.on_device)
        self._move_on(cycle, new)
        return cycle

    def _move_on(self, cycle: Cycle, new: NewTokens) -> None:
        self.target.keep(new, None if cycle.tree.is_chain else cycle.result.path)
        self.session.advance(cycle.outputs.along(cycle.result, cycle.tree), cycle.result)

    def _end_drafts(self, warns: bool = True) -> None:
        """Draft nothing from now on; `warns`: for the drafter computes no numbers."""
        self.session, self.schedule = NoDrafts(self.empty), None
        if warns:
            self.plan.call.drafter.warn_of_numbers()

    def _sound(self, cycle: Cycle) -> Cycle:  # without faults
        return self._repaired(cycle) if cycle.faults else cycle

    def _skipped(self) -> list[bool]:  # which sequences get nothing in this cycle
        return self.results.done
