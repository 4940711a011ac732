"""What a doctor finds: a line per check, the accepted drafts by depth, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ...generation.tensors.tensor_files import Fields

OK, NOTE, FAULT, SKIPPED = "ok", "note", "fault", "-"
"""States of a check; a skipped one had nothing to look at."""


@dataclass(frozen=True)
class Finding:
    """One check: its name, its state, and what it saw."""

    check: str
    state: str
    words: str


@dataclass(frozen=True)
class Accepted:
    """Shares of verifications that accept at least 1, 2, ... drafts.

    Attributes:
        decoded: In calls of `generate`.
        expected: Along the same texts, where the drafter has distributions: what `decoded` should be.
        fresh: What its first draft reaches where every draft is made from the backbone's own states.
        tokens_per_call: Of the calls.
        verifications: How many there were.
    """

    decoded: list[float] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)
    tokens_per_call: float | None = None
    verifications: int = 0


@dataclass(frozen=True)
class Diagnosis:
    """What was looked at, in the order of the checks.

    Attributes:
        findings: One per check.
        accepted: Accepted drafts by depth.
    """

    findings: Sequence[Finding]
    accepted: Accepted = field(default_factory=Accepted)

    @property
    def faults(self) -> list[Finding]:
        """What lets fewer drafts be accepted."""
        return [finding for finding in self.findings if finding.state == FAULT]

    @property
    def is_well(self) -> bool:
        """Whether nothing is at fault."""
        return not self.faults

    @property
    def verdict(self) -> str:
        """Everything at fault, in one sentence."""
        if self.is_well:
            per_call = self.accepted.tokens_per_call
            return "nothing is at fault" + (f": {per_call:.2f} tokens per call" if per_call else "")
        return "at fault: " + "; ".join(f"{finding.check} ({finding.words})" for finding in self.faults)

    def as_dict(self) -> Fields:
        """Return values for a JSON object."""
        return asdict(self) | {"verdict": self.verdict, "is_well": self.is_well}
