"""The families of heads, without torch: their options and descriptions.

These are the torch-free parts of the records that `modeling.heads.family.register` completes; a family that is defined
elsewhere comes here by that one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COMMON_OPTIONS = ("head_type", "window", "rank", "unembedding")
"""Options that every family writes into a model's `config.json`."""

CONTEXT_OPTIONS = ("context", "context_rank", "transition_context")
"""Options of families whose leaves may read the tokens before them; they are written where they do."""

SHAPING_OPTIONS = (
    *("rank", "unembedding", "contextual", "homogeneous", "leaf_size"),
    *("num_blocks", "tied_blocks", "block", "block_size"),
    *("arch", "grounded", "state_offset", "first", "mix"),
    *CONTEXT_OPTIONS,
)
"""Options that decide which parameters a head has; a family that lacks one leaves it at its default."""


@dataclass(frozen=True)
class HeadFamilyFacts:
    """The part of a family's record that needs no code of its network; "a config" is a `MTPHeadConfig`."""

    name: str  # the value of `MTPHeadConfig.head_type`
    description: str  # a phrase for cards; fields of `MTPHeadConfig` in braces are filled in
    citation: str  # the paper that describes it, as cards name it
    borrows_first: Callable[..., bool]  # whether position 1 is the backbone's own: one that learns is charged once
    paper: str | None = None  # its BibTeX entry, or the key of one in `model_cards/templates/citations.bib`
    options: tuple[str, ...] = ()  # fields that it takes beyond `COMMON_OPTIONS`, with those where it has a choice
    defaults: Mapping[str, Any] = field(default_factory=dict)  # options that `MTPHeadConfig` does not know
    check: Callable[..., None] = lambda config: None  # raises ValueError for a config that contradicts itself
    attends: Callable[..., bool] = lambda config: False  # whether features read other positions, with their own cache
    any_window: bool = False  # a checkpoint serves every window, because positions share no parameters
    rows_of_lm_head: bool = False  # a model that owns its head has it as further rows of its `lm_head`
    apart_only: bool = False  # no model owns such a head: it is separate from its backbone (`MTPHeads`)
    sequential: bool = False  # made of conditionals alone, so that no token can be summed out
    loss_weights: Callable[[int], list[float]] | None = None  # from n to the recipe's weights, where `decay` is None
    loss_target: Callable[..., str] = lambda config: "labels"  # default of `target`
    unembedding: str = "shared"  # default of `unembedding`

    def written(self) -> list[str]:
        """Return the names of the options that a model's `config.json` always holds."""
        own = (name for name in self.options if name not in (*COMMON_OPTIONS, *CONTEXT_OPTIONS))
        return [*COMMON_OPTIONS, *own, *self.defaults]

    def shaping(self) -> list[str]:
        """Return the names of the options that must agree for a checkpoint of one head to fit another."""
        window = () if self.any_window else ("window",)
        return [*window, *(name for name in SHAPING_OPTIONS if name in self.options), *self.defaults]


def _circuit(name: str, *options: str) -> HeadFamilyFacts:
    return HeadFamilyFacts(
        name,
        "a circuit of rank {rank}",
        "MtPC",
        lambda config: False,
        "grivas2025mtpc",
        ("rank", "unembedding", "contextual", "masked_tokens", "leaf_size", "context", "context_rank", *options),
        unembedding="own",
    )


FF = HeadFamilyFacts(
    "ff",
    "independent positions",
    "Gloeckle et al. 2024",
    lambda config: False,
    "gloeckle2024better",
    ("unembedding", "context", "context_rank"),
    unembedding="own",
    any_window=True,
    rows_of_lm_head=True,
)
CP, HMM, BTREE = (
    _circuit("cp"),
    _circuit("hmm", "homogeneous", "identity_bias", "transition_context"),
    _circuit("btree"),
)
MEDUSA = HeadFamilyFacts(
    "medusa",
    "independent heads of {num_blocks} blocks each, with the unembedding `{unembedding}`",
    "Medusa, Cai et al. 2024",
    lambda config: True,
    "cai2024medusa",
    ("num_blocks", "tied_blocks", "unembedding", "block", "block_size"),
    apart_only=True,
    loss_weights=lambda window: [0.0, *(0.8**k for k in range(1, window))],
)
HYDRA = HeadFamilyFacts(
    "hydra",
    "heads that read the tokens drafted before them (`{arch}`)",
    "Hydra, Ankner et al. 2024",
    lambda config: True,
    "ankner2024hydra",
    ("num_blocks", "tied_blocks", "unembedding", "arch", "grounded", "state_offset", "backbone_config"),
    attends=lambda config: config.arch == "prefix-mlp",
    apart_only=True,
    sequential=True,
    loss_weights=lambda window: [0.0] + [1.0] * (window - 1),
    loss_target=lambda config: "teacher" if config.arch == "prefix-mlp" else "labels",
)
LAYER = HeadFamilyFacts(
    "layer",
    "a decoder layer per head on the states below the backbone's last layer",
    "Gloeckle et al. 2024, Mehra et al. 2025",
    lambda config: config.first == "backbone",
    "gloeckle2024better",
    ("first", "init", "mix", "mix_temperature", "mix_init", "backbone_config"),
    attends=lambda config: True,
    apart_only=True,
    loss_weights=lambda window: [1.0] * window,
)

HEAD_FAMILIES = {facts.name: facts for facts in (FF, CP, HMM, BTREE, MEDUSA, HYDRA, LAYER)}
"""All families by name: those of this library, and those that were registered since."""
