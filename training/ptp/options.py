"""Options of `PTPTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

METHODS = ("distil", "inverse")
"""Where uniforms come from: a teacher's distribution, or the student's own (inverse autoregressive training)."""
LOSSES = ("ce", "kl", "reverse_kl", "bce")
"""How a slot's distribution is compared with its target."""
SEQUENCES = ("dataset", "teacher", "student")
"""Who writes the tokens that completions consist of."""


@dataclass(frozen=True)
class PTPOptions:
    """Options of `PTPTrainer`.

    Args:
        method: `"distil"`: uniforms lie in the intervals of a teacher's distribution (PTP paper, Algorithm 2);
            `"inverse"`: in those of the student's own, found one after the other (Algorithm 3, categorical slots, no
                teacher).
        loss: `"ce"`, `"kl"`, `"reverse_kl"` or `"bce"` (`slot_losses`). One-hot slots know their token, so that their
            target is certain; categorical ones have the teacher's distribution as target, or its sample with `"ce"`.
        sequences: `"dataset"`: completions are pieces of the data; `"teacher"`: the teacher continues a random
            beginning of every sequence; `"student"`: the student writes every completion itself. Use `"student"` only
            after other training, because a student that ignores its uniforms would keep ignoring them.
        completions: C, completions per sequence, each from a random start of its own.
        concentration: In training, a uniform lies at z ~ Beta(b, b) in the interval that picks its token, and this is
            b. 1 makes all positions equally likely, as they are in decoding, and evaluation always takes 1. The
            public code trains with 0.3, which prefers the ends of intervals; on the benchmark's chain 1 is better.
        gamma: Slot k weighs gamma^k.
        greedy_share: How many of the completions are the teacher's most likely continuations, which slots are asked for
            without uniforms; for students with `config.greedy`. 0 leaves greedy decoding unlearned.
        base_weight: Weight of the backbone's own next-token loss on the data, for backbones that are trained too.

    Raises:
        ValueError: A value out of range, or options that exclude each other.

    Example:
        >>> PTPOptions(loss="kl", completions=16).concentration
        1.0
    """

    method: str = "distil"
    loss: str = "ce"
    sequences: str = "dataset"
    completions: int = 16
    concentration: float = 1.0
    gamma: float = 1.0
    base_weight: float = 0.0
    greedy_share: float = 0.2

    def __post_init__(self) -> None:
        choices = {"method": METHODS, "loss": LOSSES, "sequences": SEQUENCES}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(allowed)}")
        if self.completions < 1:
            raise ValueError(f"completions={self.completions} must be at least 1")
        if not self.concentration > 0:
            raise ValueError(f"concentration={self.concentration} must be above 0")
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma} must lie in (0, 1]")
        if not 0 <= self.greedy_share < 1:
            raise ValueError(f"greedy_share={self.greedy_share} must lie in [0, 1)")
        if self.base_weight < 0:
            raise ValueError(f"base_weight={self.base_weight} must not be negative")
        if self.method == "inverse":
            self._check_inverse()

    def _check_inverse(self) -> None:
        """Refuse other losses and sequences: Algorithm 3 learns from data alone, by likelihood."""
        wanted = {"loss": "ce", "sequences": "dataset"}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ValueError(f"method='inverse' has {name}={value!r}, not {getattr(self, name)!r}")
