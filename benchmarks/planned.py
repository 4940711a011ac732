"""Acceptance by plan, and the times of single cycles: speed measurements that need no trained weights.

A planned verifier pays for a whole verification, and then accepts what a table says. Random weights accept nothing;
with a plan, the times of a cycle and the tokens that it brings are those of trained drafters of that acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from tokenahead.extending import DraftTree, VerificationResult
from tokenahead.generation.call.sequences import Sequences
from tokenahead.generation.contract import descend, path_columns
from tokenahead.generation.results import Results
from tokenahead.generation.tensors.masks import cached_arange
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

    Texts go on as chains draft them, so that look-ups in them find further drafts. Everything is counted on the device,
    so that cycles can be replayed.

    Args:
        verifier: It pays.
        plan: [cycles, B] int64, accepted drafts; a shorter draft accepts all of its tokens at most.

    Attributes:
        accepted: [cycles, B] int64 of every verification.
    """

    takes_fixed = True

    def __init__(self, verifier: Verifier, plan: Tensor) -> None:
        self.verifier, self.plan = verifier, plan
        self.accepted, self.done = torch.zeros_like(plan), torch.zeros(1, dtype=torch.long, device=plan.device)

    def hold(self, hold: Callable[[str, Tensor], Tensor], count: int) -> None:
        """See `Verifier`."""
        self.verifier.hold(hold, count)
        self.plan, self.accepted = hold("planned.plan", self.plan), hold("planned.accepted", self.accepted)
        self.done = hold("planned.done", self.done)

    def first(self, scores: Tensor, tokens: Sequences) -> Tensor:
        """See `Verifier`."""
        return self.verifier.first(scores, tokens)

    def verify(self, tree: DraftTree, scores: Tensor) -> VerificationResult:
        """See `Verifier`."""
        result = self.verifier.verify(tree, scores)
        if tree.tokens.shape[1]:
            most = tree.tokens.shape[1] if tree.num_nodes is None else tree.num_nodes
            accepted = self.plan.index_select(0, self.done)[0].clamp(max=most)  # [B]
            drafts, path = tree.tokens, None
            if not tree.is_chain:  # along its first path
                reached = descend(tree, torch.ones_like(drafts, dtype=torch.bool))  # [B, m + 1]
                path, accepted = path_columns(reached, tree.depth), torch.minimum(accepted, reached.sum(1) - 1)
                drafts = drafts.gather(1, (path[:, 1:] - 1).clamp(min=0))  # [B, k]
                path = path.gather(1, torch.minimum(cached_arange(path.shape[1], path.device), accepted[:, None]))
            result = VerificationResult(accepted, torch.cat([drafts, drafts[:, :1]], 1), path, result.check)
        self.accepted.index_copy_(0, self.done, result.num_accepted[None])
        self.done.add_(1)
        return result

    def path_rows(self, result: VerificationResult) -> Tensor | None:
        """See `Verifier`."""
        return self.verifier.path_rows(result)

    def tokens_per_call(self, new_tokens: int) -> float:
        """Tokens per verification and sequence; a sequence that has ended counts in no further one."""
        ends = (self.accepted[: int(self.done)].cpu() + 1).cumsum(0)  # behind the first, which the prompt brings
        calls = (ends < new_tokens - 1).sum(0) + 1
        return (new_tokens - 1) * ends.shape[1] / int(calls.sum())


@contextmanager
def planned(drafter: Any, plan: Tensor, clock: Clock) -> Iterator[list[PlannedVerifier]]:
    """Calls with `drafter` accept by plan; yields their verifiers, one per call. Of trees the first path is followed.

    The clock marks when the host has read the prompt's token, and every cycle.
    """
    made, make, settle = list[PlannedVerifier](), drafter.make_verifier, Results.take

    def make_planned(*arguments: Any) -> PlannedVerifier:
        made.append(PlannedVerifier(make(*arguments), plan))
        return made[-1]

    def settled(*arguments: Any, **options: Any) -> Any:
        clock.mark()
        return settle(*arguments, **options)

    drafter.make_verifier, Results.take = make_planned, settled
    try:
        yield made
    finally:
        Results.take = settle
        del drafter.make_verifier
