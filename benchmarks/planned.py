"""Acceptance by plan, and the times of single cycles: speed measurements that need no trained weights.

A planned verifier pays for a whole verification, and then accepts what a table says. Random weights accept nothing;
with a plan, the times of a cycle and the tokens that it brings are those of trained drafters of that acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from tokenahead.extending import DraftTree, VerificationResult
from tokenahead.generation.call.sequences import Sequences
from tokenahead.generation.verification.verifiers import Verifier


class Clock(StoppingCriteria):
    """Marks moments of a call, on the accelerator's own time line where there is one; the host does not wait.

    A stopping criterion that never stops: plain decoding marks the end of every step by it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.marks = device, list[Any]()

    def mark(self) -> None:
        """Mark this moment."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Mark this moment and go on."""
        self.mark()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def milliseconds(self) -> list[float]:
        """Between neighbouring marks; waits for the accelerator."""
        pairs = list(zip(self.marks, self.marks[1:]))
        if self.device.type != "cuda":
            return [1000 * (end - start) for start, end in pairs]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) for start, end in pairs]


def plan_of(rate: float, cycles: int, batch: int, seed: int = 0, longest: int = 64) -> Tensor:
    """Accepted drafts [cycles, B]: each with probability `rate` if those before it are, the same for every seed."""
    draws = torch.rand(cycles, batch, longest, generator=torch.Generator().manual_seed(seed))
    return (draws < rate).long().cumprod(-1).sum(-1)


class PlannedVerifier(Verifier):
    """Verifies as another verifier does, and accepts by plan; the added token is the next draft.

    Texts go on as chains draft them, so that look-ups in them find further drafts.

    Args:
        verifier: It pays.
        plan: [cycles, B] int64, accepted drafts; a shorter draft accepts all of its tokens at most.
        clock: Marks the end of the prompt and the beginning of every verification.

    Attributes:
        accepted: [B] int64 of every verification.
    """

    def __init__(self, verifier: Verifier, plan: Tensor, clock: Clock) -> None:
        self.verifier, self.plan, self.clock = verifier, plan, clock
        self.accepted: list[Tensor] = []

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        """See `Verifier`."""
        token = self.verifier.first(scores, tokens)
        self.clock.mark()
        return token

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """See `Verifier`."""
        self.clock.mark()
        result = self.verifier.verify(tree, scores)
        if tree.tokens.shape[1]:
            planned = self.plan[len(self.accepted)]
            most = tree.tokens.shape[1] if tree.num_nodes is None else tree.num_nodes
            accepted = planned.clamp(max=most)
            tokens = torch.cat([tree.tokens, tree.tokens[:, :1]], dim=1)
            result = VerificationResult(accepted, tokens, check=result.check)
        self.accepted.append(result.num_accepted)
        return result

    def check(self, result: VerificationResult) -> Tensor | None:
        """See `Verifier`."""
        return self.verifier.check(result)

    def tokens_per_call(self, new_tokens: int) -> float:
        """Tokens per verification and sequence; a sequence that has ended counts in no further one."""
        ends = (torch.stack(self.accepted).cpu() + 1).cumsum(0)  # tokens behind the first, which the prompt brings
        calls = (ends < new_tokens - 1).sum(0) + 1
        return (new_tokens - 1) * ends.shape[1] / int(calls.sum())


@contextmanager
def planned(drafter: Any, plan: Tensor, clock: Clock) -> Iterator[list[PlannedVerifier]]:
    """Calls with `drafter` accept by plan; yields their verifiers, one per call. Chains only."""
    made, make = list[PlannedVerifier](), drafter.make_verifier

    def make_planned(*arguments: Any) -> PlannedVerifier:
        made.append(PlannedVerifier(make(*arguments), plan, clock))
        return made[-1]

    drafter.make_verifier = make_planned
    try:
        yield made
    finally:
        del drafter.make_verifier
