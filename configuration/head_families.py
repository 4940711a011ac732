"""The families of heads, without torch: which options each takes, and what a card says of it.

A family is registered here and, with its module and its law, in `modeling.heads.registry` under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass

COMMON_OPTIONS = ("head_type", "window", "rank", "leaf", "gamma")
"""Options that every family writes into a model's `config.json`."""

SHAPING_OPTIONS = ("rank", "contextual", "homogeneous")
"""Options that decide which parameters a head has; a family that lacks one leaves it at its default."""


@dataclass(frozen=True)
class HeadFamilyFacts:
    """What can be said of a family without its code.

    Args:
        description: A phrase for cards; fields of `MTPHeadConfig` in braces are filled in.
        citation: The paper that describes it.
        options: Fields of `MTPHeadConfig` that it takes beyond `COMMON_OPTIONS`, and `"rank"` if it has states.
        any_window: A checkpoint serves every window, because positions share no parameters.
        rows_of_lm_head: A model that owns its head keeps it as further rows of its `lm_head`.
    """

    description: str
    citation: str
    options: tuple[str, ...] = ()
    any_window: bool = False
    rows_of_lm_head: bool = False

    def written(self) -> list[str]:
        """Names of the options that a model's `config.json` holds."""
        return [*COMMON_OPTIONS, *(name for name in self.options if name not in COMMON_OPTIONS)]

    def shaping(self) -> list[str]:
        """Names of the options that must agree for a checkpoint of one head to fit another of the same family."""
        window = () if self.any_window else ("window",)
        return ["leaf", *window, *(name for name in SHAPING_OPTIONS if name in self.options)]


_MTPC = "MtPC"
_CIRCUIT = "a circuit of rank {rank}"
_OF_CIRCUITS = ("rank", "contextual", "masked_tokens")

HEAD_FAMILIES: dict[str, HeadFamilyFacts] = {
    "ff": HeadFamilyFacts("independent positions", "Gloeckle et al. 2024", any_window=True, rows_of_lm_head=True),
    "cp": HeadFamilyFacts(_CIRCUIT, _MTPC, _OF_CIRCUITS),
    "hmm": HeadFamilyFacts(_CIRCUIT, _MTPC, (*_OF_CIRCUITS, "homogeneous", "identity_bias")),
    "btree": HeadFamilyFacts(_CIRCUIT, _MTPC, _OF_CIRCUITS),
}


def takers(option: str) -> list[str]:
    """Names of the families that take an option."""
    return [name for name, facts in HEAD_FAMILIES.items() if option in facts.options]
