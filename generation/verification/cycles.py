"""A cycle after its verification, and what the host reads of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..call.processing import Processing
from ..contract import DraftTree, TargetOutput, VerificationResult
from ..tensors.masks import cached_arange

_NO_NUMBER = 0xFF << 23
"""The bits of a float32 that are all set in NaN and in infinity, and in no number."""
_MASKED = -1 << 23
"""The bits of -inf as int32: what was noted of a row that processors masked."""


@dataclass(eq=False)
class Cycle:
    """One verification, and what the host reads of it.

    Attributes:
        fed: The tree that the backbone read; `tree` is the one that was verified.
        outputs: Of the backbone.
        scores: [B, m + 1, v], after the logits processors.
        result: Of the verification.
        numbers: [B], NaN or +inf where a draft was chosen from what is no number; None: not known. Such a draft is
            never accepted in sampled calls, and is verified as any in others.
        accepted: Accepted drafts per sequence.
        new: New tokens per sequence, and what follows them in `result.tokens`.
        drafts: Real drafts per sequence.
        faults: Open sequences that would go on from scores that are no numbers.
        strays: Sequences where `numbers` are none; of their drafts those that were accepted count.
        rows: `Verifier.path_rows`, or [B, 1].
        report: [B, n] int64, all that the host reads.
        arrival: On an accelerator, when a report that was sent has arrived.
    """

    fed: DraftTree
    tree: DraftTree
    outputs: TargetOutput
    scores: Tensor
    result: VerificationResult
    numbers: Tensor | None = None
    accepted: list[int] = field(default_factory=list)
    new: list[list[int]] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    strays: list[bool] = field(default_factory=list)
    rows: Tensor | None = None
    report: Tensor | None = None
    arrival: torch.cuda.Event | None = None

    def send(self) -> Cycle:
        """Begin to copy the report to the host, which goes on meanwhile: what runs next may write to its tensors."""
        assert self.report is not None
        sent = replace(self, report=self.report.to("cpu", non_blocking=True, copy=True))  # [B, n], in pinned memory
        if self.report.is_cuda:
            sent.arrival = torch.cuda.Event()
            sent.arrival.record(torch.cuda.current_stream(self.report.device))
        return sent

    def write(self, rows: Tensor | None) -> None:
        """Write the report; see `rows`."""
        self.rows = rows
        floats = [part for part in (None if self.numbers is None else self.numbers[:, None], rows) if part is not None]
        joined = torch.cat(floats, 1) if len(floats) > 1 else floats[0] if floats else None  # [B, up to 1 + r]
        bits = None if joined is None else joined.float().view(torch.int32).long()  # `cat` copies one dtype at once
        counts = [part[:, None] for part in (self.result.num_accepted, self.tree.num_nodes) if part is not None]
        parts = counts if bits is None else [*counts, bits]
        # [B, up to 3 + r + (k + 1) + m]
        self.report = torch.cat([*parts, self.result.tokens, self.tree.tokens], dim=1)

    def read(self) -> list[bool]:
        """Read the report, in one copy, and return which sequences are at fault."""
        assert self.report is not None
        if self.arrival is not None:
            self.arrival.synchronize()
        real, numbers, width = self.tree.num_nodes, self.numbers, self.result.tokens.shape[1]
        start = 1 if real is None else 2
        first = start + (numbers is not None)
        text = first + (0 if self.rows is None else self.rows.shape[1])
        is_faulty, self.strays, self.accepted, self.new, self.drafts = [], [], [], [], []
        for ids in self.report.tolist():
            read = ids[first : min(text, first + 1 + ids[0])]
            is_faulty.append(any(number & _NO_NUMBER == _NO_NUMBER for number in read))
            is_known = numbers is not None and ids[start] != _MASKED
            self.strays.append(is_known and ids[start] & _NO_NUMBER == _NO_NUMBER)
            self.accepted.append(ids[0])
            self.new.append(ids[text : text + width])
            drafts = ids[text + width :] if real is None else ids[text + width :][: ids[1]]
            # how many were drafted before such a number only the device knows
            self.drafts.append(self.new[-1][: ids[0]] if self.strays[-1] else drafts)
        return is_faulty

    def is_sound(self) -> Tensor | None:
        """Return which sequences are not at fault, [B] bool on the device; None: nothing looks at any."""
        if self.rows is None:
            return None
        is_after = cached_arange(self.rows.shape[1], self.rows.device) > self.result.num_accepted[:, None]  # [B, r]
        return (self.rows.isfinite() | is_after).all(1)

    def shorten(self, longest: int) -> None:
        """Count no more drafts than so many, which could be accepted: longer ones were drafted to keep a shape."""
        self.accepted = [min(count, longest) for count in self.accepted]
        if self.tree.is_chain:
            self.drafts = [draft[:longest] for draft in self.drafts]

    def has_finite_scores(self) -> bool:
        """Return whether the backbone's scores of the faulty sequences are numbers; the host waits."""
        return bool(self.outputs.logits[self.faults].amax(-1).isfinite().all())

    def refusal(self, backbone: object, processing: Processing | None) -> ValueError:
        """Return the error of a sequence that has no token to choose."""
        first = f"sequence {self.faults[0]}"
        if not self.has_finite_scores():
            return ValueError(
                f"{first}: the scores of the backbone itself ({type(backbone).__name__}) are not finite: NaN, +inf, or "
                "-inf for every token; look for a damaged checkpoint, or an overflow in half precision"
            )
        constraints = [] if processing is None else processing.constraints.all
        names = ", ".join(type(processor).__name__ for processor in constraints)
        return ValueError(
            f"{first} has no token to choose: its scores are NaN, or all -inf, after the logits processors, and those "
            f"of the backbone are finite; look for processors that exclude every token (here: {names or 'none'})"
        )
