"""The families of heads, without torch: which options each takes, and what a card says of it.

A family is registered here and, with its module and its distribution, in `modeling.heads.registry` under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

COMMON_OPTIONS = ("head_type", "window", "rank", "leaf", "gamma")
"""Options that every family writes into a model's `config.json`."""

SHAPING_OPTIONS = (
    *("rank", "contextual", "homogeneous"),
    *("num_blocks", "tied_blocks", "unembed", "block", "block_size"),
    *("arch", "grounded", "state_offset", "first", "mix"),
)
"""Options that decide which parameters a head has; a family that lacks one leaves it at its default."""


@dataclass(frozen=True)
class HeadFamilyFacts:
    """What can be said of a family without its code.

    Args:
        description: A phrase for cards; fields of `MTPHeadConfig` in braces are filled in.
        citation: The paper that describes it.
        options: Fields of `MTPHeadConfig` that it takes beyond `COMMON_OPTIONS`, with `"rank"` and `"leaf"` if it has a
            choice there.
        any_window: A checkpoint serves every window, because positions share no parameters.
        rows_of_lm_head: A model that owns its head keeps it as further rows of its `lm_head`.
        apart_only: No model owns such a head: it stands apart from its backbone (`MTPHeads`).
        sequential: Its distribution is made of conditionals alone, so that no token can be summed out.
        loss_weights: From the window n to the weights of the n depths in the family's own recipe; None: `gamma`
            discounts them.
    """

    description: str
    citation: str
    options: tuple[str, ...] = ()
    any_window: bool = False
    rows_of_lm_head: bool = False
    apart_only: bool = False
    sequential: bool = False
    loss_weights: Callable[[int], list[float]] | None = None

    def written(self) -> list[str]:
        """Names of the options that a model's `config.json` holds."""
        return [*COMMON_OPTIONS, *(name for name in self.options if name not in COMMON_OPTIONS)]

    def shaping(self) -> list[str]:
        """Names of the options that must agree for a checkpoint of one head to fit another of the same family."""
        window = () if self.any_window else ("window",)
        return ["leaf", *window, *(name for name in SHAPING_OPTIONS if name in self.options)]


def _discounted(factor: float) -> Callable[[int], list[float]]:
    """Heads weigh factor, factor^2, ..; the next token, which is the backbone's own, weighs nothing."""
    return lambda window: [0.0, *(factor**k for k in range(1, window))]


_MTPC = "MtPC"
_CIRCUIT = "a circuit of rank {rank}"
_OF_CIRCUITS = ("rank", "leaf", "contextual", "masked_tokens")

HEAD_FAMILIES: dict[str, HeadFamilyFacts] = {
    "ff": HeadFamilyFacts(
        "independent positions", "Gloeckle et al. 2024", ("leaf",), any_window=True, rows_of_lm_head=True
    ),
    "cp": HeadFamilyFacts(_CIRCUIT, _MTPC, _OF_CIRCUITS),
    "hmm": HeadFamilyFacts(_CIRCUIT, _MTPC, (*_OF_CIRCUITS, "homogeneous", "identity_bias")),
    "btree": HeadFamilyFacts(_CIRCUIT, _MTPC, _OF_CIRCUITS),
    "medusa": HeadFamilyFacts(
        "independent heads of {num_blocks} blocks each, with the unembedding `{unembed}`",
        "Medusa, Cai et al. 2024",
        ("num_blocks", "tied_blocks", "unembed", "block", "block_size"),
        apart_only=True,
        loss_weights=_discounted(0.8),
    ),
    "hydra": HeadFamilyFacts(
        "heads that read the tokens drafted before them (`{arch}`)",
        "Hydra, Ankner et al. 2024",
        ("num_blocks", "tied_blocks", "unembed", "arch", "grounded", "state_offset", "backbone_config"),
        apart_only=True,
        sequential=True,
        loss_weights=_discounted(1.0),
    ),
    "layer": HeadFamilyFacts(
        "a decoder layer per head on the states below the backbone's last layer",
        "Gloeckle et al. 2024, Mehra et al. 2025",
        ("first", "mix", "mix_temperature", "mix_init", "backbone_config"),
        apart_only=True,
        loss_weights=lambda window: [1.0] * window,
    ),
}


def takers(option: str) -> list[str]:
    """Names of the families that take an option."""
    return [name for name, facts in HEAD_FAMILIES.items() if option in facts.options]
