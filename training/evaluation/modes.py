"""Ways of decoding that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DecodingMode:
    """A way of decoding.

    Attributes:
        name: What the table calls it.
        options: Keyword arguments of `generate`.
    """

    name: str
    options: dict[str, Any]

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn; then two runs have the same distribution, not the same tokens."""
        return bool(self.options.get("do_sample"))

    @property
    def temperature(self) -> float:
        """Of the samples; 0 for greedy decoding."""
        return float(self.options.get("temperature", 1.0)) if self.is_sampled else 0.0


def sampled(temperature: float) -> DecodingMode:
    """Sampling from the whole distribution: transformers' default `top_k=50` is switched off."""
    options = {"do_sample": True, "temperature": float(temperature), "top_k": 0}
    return DecodingMode(f"sampled, T={temperature:g}", options)


GREEDY = DecodingMode("greedy", {"do_sample": False})
"""The most probable token at every position."""
MODES = (GREEDY, sampled(0.7), sampled(1.0))
"""The ways that every report has."""
