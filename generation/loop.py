"""The decoding loop: draft, one backbone call, verify, accept, roll back. Each sequence accepts on its own.

    tokens     ... x y b            b: the token that the last verification added, not in the cache yet
    draft            |  d1 d2 d3                              DraftSession.propose
    inputs           b  d1 d2 d3    one backbone call         Target.forward
    scores           d1 d2 z  -     the target's choices      Processing, Verifier.verify
    new tokens       d1 d2 z        two drafts and a token    Results.take
    cache      ... x y b  d1 d2     rolled back to here       Target.keep
    next                     z = b  and so on                 DraftSession.advance

The host waits for the device once in a cycle, for accepted counts, tokens, drafts, and whether all scores are numbers.
Where sequences end (at eos, at stop strings, at the length limit) goes back in one copy, and only where they differ.

Beside it: scores that are no numbers (`guarded`), processors whose state moves (`stateful`), and cycles of fixed
shapes, recorded and replayed (`recorded`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .backbone.target import Target
from .call.outputs import GenerateSpeculativeOutput
from .call.schedule import ConstantLength
from .call.sequences import NewTokens
from .contract import DraftTree, PrefillOutput, TargetOutput, VerificationResult
from .graphs import Observer
from .plan import SpeculationPlan
from .results import Results
from .tensors.masks import to_device
from .tensors.wrapped_models import untyped
from .verification.cycles import Cycle

P = ParamSpec("P")
R = TypeVar("R")
REGION_OBSERVER: Observer | None = None
"""Called in place of every region of a cycle that could be replayed: `"cycle"`, or `"forward"` where the rest of it
needs the host."""


def region_observer() -> Observer | None:
    """Return `REGION_OBSERVER` as it is now."""
    return REGION_OBSERVER


class SpeculativeLoop:
    """One call of `generate` after its prompt.

    State between cycles: the tokens of every sequence (`results`), of which all but the last are in the cache
    (`target`), and the session's.

    Args:
        plan: Complete (`SpeculationPlan.complete`).
        target: The backbone, with the prompt in its cache.
    """

    def __init__(self, plan: SpeculationPlan, target: Target) -> None:
        self.plan, self.target, self.session, self.verifier = plan, target, plan.session, plan.verifier
        self.results, self.empty = Results(plan, target), DraftTree.chain(plan.prompt[:, :0])
        self.processing = plan.draft_options.processing if plan.draft_options.processors else None
        self.lengths, self.hidden_layers = plan.schedule or ConstantLength(self.session.num_tokens), plan.hidden_layers
        self.drops_finished, self.drafted, self.called = plan.may_drop_finished(), 0.0, 0.0

    def run(self, outputs: PrefillOutput, synced_gpus: bool = False) -> GenerateSpeculativeOutput | Tensor:
        """Decode after the outputs of the prefill until every sequence has ended.

        Args:
            outputs: Transformers' own.
            synced_gpus: Keep calling the backbone until all peers are done.

        Returns:
            The sequences [B, L + new], or a `GenerateSpeculativeOutput` where the config asks for a dict.
        """
        try:
            self._first(outputs)
            self.session.begin(outputs, self.target)
            peers, device = untyped(self.plan.call.backbone), self.results.tokens.ids.device
            while peers._has_unfinished_sequences(all(self.results.done), synced_gpus, device=device):
                started = self.drafted = self.called = time.perf_counter()
                length = self._length()
                cycle, accepted = self._cycle(length)
                if self.drops_finished and any(self.results.done):
                    self.target.drop_finished(self.results.done)
                ended = time.perf_counter()
                if self.session is self.plan.session and self._is_steady():
                    self.lengths.update(cycle.tree.depth, accepted, ended - started, length)
                self.results.statistics.time(started, self.drafted, self.called, ended)
            return self._finished()
        except BaseException:  # a user's cache must not end with layers that only this loop can use
            self.target.abandon()
            raise

    def _first(self, outputs: Any) -> None:
        """Take the token after the prompt, one per sequence."""
        logits = outputs.logits[:, -1:].to(self.plan.prompt.device, torch.float32)  # [B, 1, V]
        scores = self._scores(logits, self.empty, is_prefill=True)
        states = TargetOutput(logits, outputs.hidden_states)
        cycle = Cycle(self.empty, self.empty, states, scores, self._picked(scores))
        cycle = self._sound(self._on_host(self._written(cycle)))
        self.results.take(cycle, cycle.accepted, is_prefill=True)

    def _length(self) -> int:
        """Return the longest path to draft now: verification adds one more token, and nothing goes beyond the end."""
        longest, positions = min(self.lengths.length(), self.session.num_tokens), self.results.positions_left()
        if self.session.is_deterministic:  # a shorter draft is verified differently
            return longest
        return max(min(longest, self.results.tokens_left() - 1, positions), 0)

    def _is_steady(self) -> bool:
        """Return whether the cycle took as long as the next one of its kind will."""
        return self.target.is_steady

    def _cycle(self, length: int) -> tuple[Cycle, list[int]]:
        """Draft, verify, and move on; return the cycle, and the accepted drafts of the open sequences."""
        self.results.statistics.backbone_calls += 1
        cycle = self._on_host(self._verified(*self._region("forward", self._read, length)))
        return self._settled(self._sound(cycle))

    def _region(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what a part of a cycle returns in which the host waits for nothing."""
        caller = REGION_OBSERVER
        return function(*args, **kwargs) if caller is None else caller(name, function, *args, **kwargs)

    def _read(self, length: int, drafted: DraftTree | None = None) -> tuple[DraftTree, TargetOutput, Tensor | None]:
        """Draft, where nobody has, and call the backbone on b and the draft; return also `Cycle.numbers`."""
        tree = drafted or self.session.propose(self.results.tokens, length)
        numbers = self.plan.draft_options.numbers.taken(tree.tokens.device)
        self.drafted = time.perf_counter()
        return tree, self._forward(tree), numbers

    def _forward(self, tree: DraftTree) -> TargetOutput:
        """Call the backbone on b and a draft."""
        block = torch.cat([self.results.tokens.last()[:, None], tree.tokens], dim=1)  # [B, m + 1]
        outputs = self.target.forward(block, tree, self.hidden_layers)
        outputs.logits = to_device(outputs.logits, block.device, torch.float32)  # [B, m + 1, V]
        outputs.block = block, outputs.logits
        self.called = time.perf_counter()
        return outputs

    def _verified(self, tree: DraftTree, outputs: TargetOutput, numbers: Tensor | None = None) -> Cycle:
        """Verify a draft."""
        return self._written(self._judged(tree, outputs, self._scores(outputs.logits, tree), numbers))

    def _judged(self, tree: DraftTree, outputs: TargetOutput, scores: Tensor, numbers: Tensor | None) -> Cycle:
        """Return the verification of a draft by scores [B, m + 1, v]."""
        result = self._picked(scores) if tree is self.empty else self.verifier.verify(tree, scores)
        return Cycle(tree, tree, outputs, scores, result, numbers)

    def _scores(self, logits: Tensor, tree: DraftTree, is_prefill: bool = False) -> Tensor:
        """Return the target's scores [B, m + 1, v] of a block, after the logits processors of the call."""
        if self.processing is None:
            return logits
        return self.processing(self.results.tokens, logits, tree, self.results.done)

    def _picked(self, scores: Tensor) -> VerificationResult:
        """Return the result without drafts, from scores [B, 1, v]."""
        first = self.verifier.first(scores[:, 0], self.results.tokens)
        return VerificationResult(torch.zeros_like(first), first[:, None])

    def _written(self, cycle: Cycle) -> Cycle:
        """Write new tokens, and what the host reads of a cycle."""
        self.results.tokens.write(cycle.result.tokens)
        cycle.write(self._rows(cycle))
        return cycle

    def _rows(self, cycle: Cycle) -> Tensor | None:
        """Return numbers that are none where scores are none; None: nobody looks at them."""
        return None

    def _on_host(self, cycle: Cycle) -> Cycle:
        """Let the host read what it needs: it waits for the device, once in a cycle."""
        cycle.read()
        return cycle

    def _sound(self, cycle: Cycle) -> Cycle:
        """Return the cycle, or another where its scores are no numbers (`guarded`)."""
        return cycle

    def _settled(self, cycle: Cycle) -> tuple[Cycle, list[int]]:
        """Count the new tokens, and move on from them; return what `_cycle` does."""
        before = self.results.done
        new = self.results.take(cycle, self._accepted(cycle))
        accepted = [count for count, done in zip(cycle.accepted, before) if not done]
        # the last token that a sequence keeps is a draft; where none is cut `first` would change nothing
        if self.results.stopping.holds and sum(new.counts) < sum(accepted) + len(accepted):
            cycle.result = cycle.result.first(new.on_device)
        self._move_on(cycle, new)
        return cycle, accepted

    def _accepted(self, cycle: Cycle) -> list[int]:
        """Return the accepted drafts per sequence; -1: it gets not even a token."""
        return cycle.accepted

    def _move_on(self, cycle: Cycle, new: NewTokens) -> None:
        """Leave new tokens in the cache, and show the session what was verified."""
        tree, result = cycle.tree, cycle.result
        self.target.keep(new, None if tree.is_chain else result.path)
        self.session.advance(cycle.outputs.along(result, tree), result)

    def _finished(self) -> GenerateSpeculativeOutput | Tensor:
        return self.results.finished()
